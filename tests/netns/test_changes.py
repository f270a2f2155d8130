"""What becomes of traffic when objects change: new connections, old connections, UDP flows, affinity."""

import dataclasses
import time

import pytest

from rulecast.lab import Host, Probe, Verdict, run_probes
from rulecast.model import Family, Protocol
from tests.netns import flows
from tests.netns.cluster import Cluster, eventually
from tests.netns.expect import (
    DROPPED,
    OUTSIDE,
    OUTSIDE_VIA_N2,
    POD,
    REFUSED,
    Expected,
    Row,
    judge,
    keeps,
    masquerades,
)
from tests.netns.objects import BOTH, CLUSTER_IP, EXTERNAL_IP, NODE_PORT, VIP, Ep, Port, Svc, frontend
from tests.netns.world import A2, LOCAL_OUT, TCP_AND_UDP, A, B, C

TCP, UDP = Protocol.TCP, Protocol.UDP
WEB = Svc("web", 70, [A, B])
UNRELATED = Svc("unrelated", 71, [C])
families = pytest.mark.parametrize("family", BOTH, ids=lambda family: f"IPv{int(family)}")


def check(
    cluster: Cluster,
    service: Svc,
    client: str,
    target: str,
    expected: Expected,
    *,
    port: int | None = None,
    only_families: tuple[Family, ...] = BOTH,
    protocols: tuple[Protocol, ...] = (TCP, UDP),
    node: str = "n1",
) -> None:
    """Ask at once in every family and protocol."""
    row = Row("", service.name, client, target, expected, port=port, node=node)
    for family in only_families:
        for protocol in protocols:
            judge(cluster, row, service, family, protocol)


def with_spec(service: Svc, **spec: object) -> Svc:
    return dataclasses.replace(service, spec={**service.spec, **spec})


def with_endpoints(service: Svc, *endpoints: Ep) -> Svc:
    return dataclasses.replace(service, endpoints=endpoints)


class TestServices:
    def test_a_service_answers_while_it_exists(self, cluster: Cluster) -> None:
        cluster.apply(WEB)
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"))
        cluster.apply()
        check(cluster, WEB, POD, CLUSTER_IP, DROPPED)
        check(cluster, WEB, OUTSIDE, NODE_PORT, REFUSED)
        cluster.apply(WEB)
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"))
        check(cluster, WEB, OUTSIDE, NODE_PORT, masquerades("A", "B"))

    def test_scaling_down_to_nothing_and_up_again_is_refused_in_between(self, cluster: Cluster) -> None:
        for endpoints in ((A, B, C), (B, C), (C,), (), (A,), (A, A2), ()):
            service = with_endpoints(WEB, *endpoints)
            cluster.apply(service)
            names = [each.name for each in endpoints]
            check(cluster, WEB, POD, CLUSTER_IP, keeps(*names) if names else REFUSED)
            check(cluster, WEB, OUTSIDE, VIP, masquerades(*names) if names else REFUSED)

    def test_switching_the_external_policy_and_back(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#55519 and antrea-io/antrea#3301."""
        local = with_spec(WEB, **LOCAL_OUT)
        for _ in range(2):
            cluster.apply(WEB)
            check(cluster, WEB, OUTSIDE, NODE_PORT, masquerades("A", "B"))
            cluster.apply(local)
            check(cluster, WEB, OUTSIDE, NODE_PORT, keeps("A"))
            check(cluster, WEB, OUTSIDE_VIA_N2, VIP, keeps("B"))
            check(cluster, WEB, POD, VIP, keeps("A", "B"))

    def test_switching_the_internal_policy_and_back(self, cluster: Cluster) -> None:
        cluster.apply(with_spec(with_endpoints(WEB, B), internalTrafficPolicy="Local"))
        check(cluster, WEB, POD, CLUSTER_IP, DROPPED)
        cluster.apply(with_endpoints(WEB, B))
        check(cluster, WEB, POD, CLUSTER_IP, keeps("B"))

    def test_ip_mode_can_change(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#118895."""
        for mode, expected in (
            ("Proxy", keeps("lb:80")),
            ("VIP", masquerades("A", "B")),
            ("Proxy", keeps("lb:80")),
        ):
            ingress = [{"ip": frontend(VIP, 23, family), "ipMode": mode} for family in BOTH]
            service = dataclasses.replace(WEB, number=23, ingress=ingress)
            cluster.apply(service)
            check(cluster, service, POD, VIP, expected)

    def test_source_ranges_come_and_go(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#62638: the ranges of one service are nothing to another."""
        other = dataclasses.replace(WEB, name="other", number=72)
        elsewhere = ["192.0.2.128/25", "2001:db8:2:1::/64"]
        for ranges, expected in ((elsewhere, DROPPED), ([], masquerades("A", "B")), (elsewhere, DROPPED)):
            cluster.apply(with_spec(WEB, loadBalancerSourceRanges=ranges), other)
            check(cluster, WEB, OUTSIDE, VIP, expected)
            check(cluster, other, OUTSIDE, VIP, masquerades("A", "B"))
            check(cluster, WEB, OUTSIDE, NODE_PORT, masquerades("A", "B"))

    def test_deleting_one_service_leaves_the_others_on_its_address(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#80158."""
        ingress = [{"ip": frontend(VIP, 70, family)} for family in BOTH]
        https = Svc("https", 72, [B], ports=(Port(443),), ingress=ingress)
        dns = Svc("dns", 73, [C], ports=(Port(53, 8080, "UDP"),), ingress=ingress)
        first = Svc("first", 70, [A], ports=(Port(80),))
        cluster.apply(first, https, dns)
        for services in ((first, https, dns), (https, dns)):
            cluster.apply(*services)
            check(cluster, first, OUTSIDE, VIP, masquerades("B"), port=443, protocols=(TCP,))
            check(cluster, first, OUTSIDE, VIP, masquerades("C"), port=53, protocols=(UDP,))

    def test_deleting_the_tcp_port_leaves_the_udp_port(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#20092."""
        dns = Svc(
            "dns",
            72,
            ports=(Port(53, 8080, "TCP", "t", endpoints=[A]), Port(53, 8080, "UDP", "u", endpoints=[B])),
        )
        cluster.apply(dns)
        check(cluster, dns, OUTSIDE, NODE_PORT, masquerades("A"), protocols=(TCP,))
        cluster.apply(dataclasses.replace(dns, ports=dns.ports[1:]))
        for target in (NODE_PORT, VIP, EXTERNAL_IP):
            check(cluster, dns, OUTSIDE, target, masquerades("B"), protocols=(UDP,))
        check(cluster, dns, POD, CLUSTER_IP, keeps("B"), protocols=(UDP,))
        check(cluster, dns, POD, CLUSTER_IP, REFUSED, port=53, protocols=(TCP,))
        cluster.apply(with_spec(dataclasses.replace(dns, ports=dns.ports[1:]), **LOCAL_OUT))
        check(cluster, dns, OUTSIDE, NODE_PORT, DROPPED, protocols=(UDP,))
        check(cluster, dns, OUTSIDE_VIA_N2, NODE_PORT, keeps("B"), protocols=(UDP,), node="n2")

    def test_a_port_that_changes_its_protocol(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#105279."""
        udp, tcp = Port(53, 8080, "UDP", "u"), Port(53, 8080, "TCP", "t")
        for ports, works, refused in (
            ((udp,), (UDP,), (TCP,)),
            ((tcp,), (TCP,), (UDP,)),
            ((udp, tcp), (UDP, TCP), ()),
        ):
            service = Svc("x", 72, [A], ports=ports)
            cluster.apply(service)
            check(cluster, service, POD, CLUSTER_IP, keeps("A"), protocols=works)
            check(cluster, service, POD, CLUSTER_IP, REFUSED, port=53, protocols=refused)

    def test_families_are_independent(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#97343."""
        v4 = (Family.IPV4,)
        for service, v6 in (
            (dataclasses.replace(WEB, slice_families=v4), REFUSED),
            (WEB, keeps("A", "B")),
            (dataclasses.replace(WEB, families=v4), DROPPED),
        ):
            cluster.apply(service)
            check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"), only_families=v4)
            check(cluster, WEB, POD, CLUSTER_IP, v6, only_families=(Family.IPV6,))

    def test_only_the_node_port_moves(self, cluster: Cluster) -> None:
        """antrea-io/antrea#4845."""
        cluster.apply(WEB)
        moved = dataclasses.replace(
            WEB, ports=tuple(dataclasses.replace(port, node_port=31070) for port in TCP_AND_UDP)
        )
        cluster.apply(moved)
        check(cluster, moved, OUTSIDE, NODE_PORT, masquerades("A", "B"))
        check(cluster, moved, OUTSIDE, NODE_PORT, REFUSED, port=30070)
        check(cluster, moved, OUTSIDE, VIP, masquerades("A", "B"))

    def test_hints_are_judged_anew_when_the_zone_of_the_node_changes(self, cluster: Cluster) -> None:
        hinted = Svc("hinted", 72, [Ep("A", zones=["za"]), Ep("B", zones=["zb"])])
        try:
            for zone, names in (("", ("A", "B")), ("za", ("A",)), ("zb", ("B",)), ("zx", ("A", "B"))):
                cluster.n1.zone = zone
                cluster.apply(hinted)
                check(cluster, hinted, POD, CLUSTER_IP, keeps(*names))
        finally:
            cluster.n1.zone = "za"

    def test_the_longest_names_that_the_api_allows(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#139515."""
        ports = (Port(name="t" * 63), Port(protocol="UDP", name="u" * 63))
        long = Svc("a" + "b" * 62, 72, [A, B], ports=ports, spec=LOCAL_OUT)
        cluster.apply(long, WEB)
        check(cluster, long, POD, CLUSTER_IP, keeps("A", "B"))
        check(cluster, long, OUTSIDE, NODE_PORT, keeps("A"))
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"))

    def test_a_pod_that_backs_two_services(self, cluster: Cluster) -> None:
        """antrea-io/antrea#1815."""
        other = Svc("other", 72, [A])
        cluster.apply(with_endpoints(WEB, A), other)
        cluster.apply(other)
        check(cluster, other, POD, CLUSTER_IP, keeps("A"))


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
