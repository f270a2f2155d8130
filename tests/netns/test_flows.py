"""What becomes of open connections, UDP flows and session affinity when objects change."""

import dataclasses
import time

import pytest

from rulecast.lab import Host, Probe, Verdict, run_probes
from rulecast.model import Family, Protocol
from tests.netns import flows
from tests.netns.changing import TCP, UDP, UNRELATED, WEB, check, families, with_endpoints, with_spec
from tests.netns.cluster import MODE, Cluster, eventually
from tests.netns.expect import (
    OUTSIDE,
    POD,
    REFUSED,
    keeps,
    masquerades,
)
from tests.netns.objects import BOTH, CLUSTER_IP, EXTERNAL_IP, NODE_PORT, VIP, Ep, frontend
from tests.netns.world import A2, LOCAL_OUT, A, B, C

VIP_OF_BALANCER = {family: frontend(VIP, 23, family) for family in BOTH}


class TestConnections:
    @families
    def test_an_open_connection_outlives_its_endpoint(self, cluster: Cluster, family: Family) -> None:
        """kubernetes/kubernetes#57841."""
        client = cluster.n1.pods["cli1"]
        address = frontend(CLUSTER_IP, 70, family)
        cluster.apply(with_endpoints(WEB, A))
        with flows.tcp(client, address, 80) as old:
            assert old.ask() == "A"
            cluster.apply(with_endpoints(WEB, B))
            check(cluster, WEB, POD, CLUSTER_IP, keeps("B"), only_families=(family,))
            assert [old.ask() for _ in range(5)] == ["A"] * 5
            cluster.apply()
            assert old.ask() == "A"

    @families
    def test_a_client_that_uses_its_port_again_has_the_new_endpoint_at_once(
        self, cluster: Cluster, family: Family
    ) -> None:
        """kubernetes/kubernetes#81775."""
        client, address = cluster.n1.pods["cli1"], frontend(CLUSTER_IP, 70, family)
        cluster.apply(with_endpoints(WEB, A))
        for endpoint in (A, B, A):
            cluster.apply(with_endpoints(WEB, endpoint))
            check(cluster, WEB, POD, CLUSTER_IP, keeps(endpoint.name), only_families=(family,))
            with flows.tcp(client, address, 80, source_port=23456) as flow:
                assert flow.ask() == endpoint.name

    @families
    def test_a_refused_port_accepts_as_soon_as_an_endpoint_is_there(
        self, cluster: Cluster, family: Family
    ) -> None:
        """kubernetes/kubernetes#48370, for TCP."""
        cluster.apply(with_endpoints(WEB))
        check(cluster, WEB, OUTSIDE, NODE_PORT, REFUSED, only_families=(family,))
        cluster.apply(with_endpoints(WEB, A))
        check(cluster, WEB, OUTSIDE, NODE_PORT, masquerades("A"), only_families=(family,))

    @families
    def test_open_connections_stay_where_they_went_when_an_address_goes_to_its_load_balancer_and_back(
        self, cluster: Cluster, family: Family
    ) -> None:
        by_service, by_balancer = (
            dataclasses.replace(WEB, number=23, ingress=[{"ip": VIP_OF_BALANCER[family], "ipMode": mode}])
            for mode in ("VIP", "Proxy")
        )
        client, address = cluster.n1.pods["cli1"], VIP_OF_BALANCER[family]
        cluster.apply(by_balancer)
        with flows.tcp(client, address, 80) as direct:
            assert direct.ask() == "lb"
            cluster.apply(by_service)
            with flows.tcp(client, address, 80) as translated:
                backend = translated.ask()
                assert backend in {"A", "B"}
                for service in (by_balancer, by_service, by_balancer):
                    cluster.apply(service)
                    assert (direct.ask(), translated.ask()) == ("lb", backend)
                with flows.tcp(client, address, 80) as later:
                    assert later.ask() == "lb"


FRONTENDS = [(POD, CLUSTER_IP), (OUTSIDE, NODE_PORT), (OUTSIDE, VIP), (OUTSIDE, EXTERNAL_IP)]
frontends = pytest.mark.parametrize(("client", "target"), FRONTENDS, ids=[target for _, target in FRONTENDS])


class TestUdpFlows:
    """The rules decide about the first datagram of a flow only; conntrack about all others."""

    def flow(self, cluster: Cluster, client: str, target: str, family: Family) -> flows.Flow:
        host: Host = cluster.n1.pods["cli1"] if client == POD else cluster.lab.outside
        if target == NODE_PORT:
            return flows.udp(host, cluster.n1.ip(family), WEB.node_port(WEB.ports[1]))
        return flows.udp(host, WEB.address(target, family), 80)

    @families
    @frontends
    def test_a_flow_leaves_an_endpoint_that_is_gone(
        self, cluster: Cluster, client: str, target: str, family: Family
    ) -> None:
        """kubernetes/kubernetes#59368 and #98305."""
        cluster.apply(with_endpoints(WEB, A))
        with self.flow(cluster, client, target, family) as flow:
            assert flow.ask() == "A"
            cluster.apply(with_endpoints(WEB, B))
            eventually(lambda: flow.ask() == "B", lambda: "the flow reaches B", 5)

    @families
    @frontends
    def test_a_flow_that_began_without_endpoints_finds_the_first_one(
        self, cluster: Cluster, client: str, target: str, family: Family
    ) -> None:
        """kubernetes/kubernetes#48370."""
        cluster.apply(with_endpoints(WEB))
        with self.flow(cluster, client, target, family) as flow:
            assert flow.ask() == "refused"
            cluster.apply(with_endpoints(WEB, A))
            eventually(lambda: flow.ask() == "A", lambda: "the flow reaches A", 5)

    @families
    def test_a_flow_that_began_before_its_service_finds_it(self, cluster: Cluster, family: Family) -> None:
        cluster.apply()
        with self.flow(cluster, POD, CLUSTER_IP, family) as flow:
            assert flow.ask() == "dropped"
            cluster.apply(with_endpoints(WEB, A))
            eventually(lambda: flow.ask() == "A", lambda: "the flow reaches A", 5)

    @families
    @frontends
    def test_nothing_reaches_a_pod_once_its_service_is_deleted(
        self, cluster: Cluster, client: str, target: str, family: Family
    ) -> None:
        """kubernetes/kubernetes#141371."""
        cluster.apply(with_endpoints(WEB, A))
        with self.flow(cluster, client, target, family) as flow:
            assert flow.ask() == "A"
            cluster.apply()
            eventually(lambda: flow.ask() != "A", lambda: "the flow is cut", 5)
            before = cluster.lab.servers.received("A", UDP, 8080)
            assert "A" not in {flow.ask(), flow.ask()}
            assert cluster.lab.servers.received("A", UDP, 8080) == before

    @families
    def test_flows_to_endpoints_that_stay_do_not_move(self, cluster: Cluster, family: Family) -> None:
        """kubernetes/kubernetes#122740: neither with changes elsewhere nor with a restart of the agent."""
        cluster.apply(with_endpoints(WEB, A, B, C))
        opened = [self.flow(cluster, POD, CLUSTER_IP, family) for _ in range(30)]
        try:
            before = [flow.ask() for flow in opened]
            cluster.apply(with_endpoints(WEB, A, B), UNRELATED)
            stayed = [index for index, name in enumerate(before) if name != "C"]
            assert [opened[index].ask() for index in stayed] == [before[index] for index in stayed]
            eventually(
                lambda: {opened[i].ask() for i in range(30) if i not in stayed} <= {"A", "B"},
                lambda: "flows to C move",
                5,
            )
            now = [flow.ask() for flow in opened]
            cluster.restart_agent(cluster.n1)
            assert [flow.ask() for flow in opened] == now
        finally:
            for flow in opened:
                flow.__exit__()


@pytest.fixture(scope="module")
def clients(cluster: Cluster) -> dict[Family, list[str]]:
    """Addresses of twenty clients on the outside host.

    By chance all of them choose the same one of two backends, or stay where they were, once in half a million
    runs.
    """
    prefixes = {Family.IPV4: "198.51.100.", Family.IPV6: "2001:db8:51::"}
    made = {family: [f"{text}{20 + n}" for n in range(20)] for family, text in prefixes.items()}
    for addresses in made.values():
        for address in addresses:
            cluster.lab.outside.add_address(address)
            cluster.n2.route(address, cluster.n1)
    return made


class TestAffinity:
    STICKY = with_spec(
        WEB, sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 600}}
    )

    def pinned(
        self, cluster: Cluster, clients: list[str], family: Family, protocol: Protocol, target: str = VIP
    ) -> dict[str, str]:
        """Where each client goes, once; all three times must agree."""
        if target == NODE_PORT:
            address, port = cluster.n1.ip(family), WEB.node_port(WEB.ports[0])
        else:
            address, port = frontend(target, WEB.number, family), 80
        probes = [
            Probe(cluster.lab.outside.namespace, address, port, protocol, client, timeout=2.0)
            for client in clients
        ]
        answers = [[answer.reached for answer in run_probes(probes)] for _ in range(3)]
        assert all(reached for turn in answers for reached in turn)
        turns = [[reached.backend for reached in turn if reached] for turn in answers]
        assert turns[0] == turns[1] == turns[2]
        return dict(zip(clients, turns[0], strict=True))

    @families
    @pytest.mark.parametrize("protocol", [TCP, UDP])
    @pytest.mark.parametrize("target", [CLUSTER_IP, NODE_PORT, VIP, EXTERNAL_IP])
    def test_each_client_keeps_its_backend(
        self,
        cluster: Cluster,
        clients: dict[Family, list[str]],
        family: Family,
        protocol: Protocol,
        target: str,
    ) -> None:
        cluster.apply(self.STICKY)
        assert set(self.pinned(cluster, clients[family], family, protocol, target).values()) == {"A", "B"}

    @families
    def test_with_the_external_policy_local(
        self, cluster: Cluster, clients: dict[Family, list[str]], family: Family
    ) -> None:
        """kubernetes/kubernetes#55519."""
        cluster.apply(with_spec(with_endpoints(self.STICKY, A, A2, B), **LOCAL_OUT))
        assert set(self.pinned(cluster, clients[family], family, TCP).values()) == {"A", "A2"}

    @families
    def test_only_the_loss_of_the_backend_moves_a_client(
        self, cluster: Cluster, clients: dict[Family, list[str]], family: Family
    ) -> None:
        """kubernetes/kubernetes#123162."""
        cluster.apply(self.STICKY)
        first = self.pinned(cluster, clients[family], family, TCP)
        for number in range(73, 76):
            cluster.apply(self.STICKY, dataclasses.replace(UNRELATED, name=f"s{number}", number=number))
        cluster.restart_agent(cluster.n1)
        cluster.apply(with_endpoints(self.STICKY, A, B, C))
        assert self.pinned(cluster, clients[family], family, TCP) == first
        cluster.apply(with_endpoints(self.STICKY, B, C))
        later = self.pinned(cluster, clients[family], family, TCP)
        assert {client: later[client] for client in later if first[client] == "B"} == {
            client: name for client, name in first.items() if name == "B"
        }
        assert {later[client] for client in later if first[client] == "A"} <= {"B", "C"}

    @families
    def test_an_unready_backend_keeps_nobody(self, cluster: Cluster, family: Family) -> None:
        """kubernetes/kubernetes#106030."""
        cluster.apply(with_endpoints(self.STICKY, A))
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A"), only_families=(family,))
        cluster.apply(with_endpoints(self.STICKY, Ep("A", "unready"), B))
        check(cluster, WEB, POD, CLUSTER_IP, keeps("B"), only_families=(family,))
        cluster.apply(with_endpoints(self.STICKY, Ep("A", "unready"), Ep("B", "unready")))
        check(cluster, WEB, POD, CLUSTER_IP, REFUSED, only_families=(family,))

    @families
    def test_switched_off_it_spreads_again(self, cluster: Cluster, family: Family) -> None:
        cluster.apply(WEB)
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"), only_families=(family,))
        cluster.apply(self.STICKY)
        answers = run_probes(
            [Probe(cluster.n1.pods["cli1"].namespace, frontend(CLUSTER_IP, WEB.number, family), 80)] * 22
        )
        assert {answer.verdict for answer in answers} == {Verdict.REACHED}
        assert len({answer.reached.backend for answer in answers if answer.reached}) == 1
        cluster.apply(WEB)
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"), only_families=(family,))

    @families
    def test_the_timeout_is_in_seconds(
        self, cluster: Cluster, clients: dict[Family, list[str]], family: Family
    ) -> None:
        """kubernetes/kubernetes#35677."""
        if MODE == "ipvs":
            pytest.skip("IPVS forgets a client only some minutes after its last connection; docs/ipvs.md")
        short = with_spec(self.STICKY, sessionAffinityConfig={"clientIP": {"timeoutSeconds": 1}})
        cluster.apply(short)
        first = self.pinned(cluster, clients[family], family, TCP)
        eventually(
            lambda: self._after_idling(cluster, clients[family], family) != first,
            lambda: "a client moves",
            10,
        )

    def _after_idling(self, cluster: Cluster, clients: list[str], family: Family) -> dict[str, str]:
        time.sleep(1.5)
        return self.pinned(cluster, clients, family, TCP)
