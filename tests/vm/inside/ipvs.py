"""What only the IPVS mode does, asked of the kernel. Run inside the virtual machine."""

import contextlib
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from rulecast.lab import Probe, run_probes
from rulecast.model import Endpoint, Family
from rulecast_agent.kernel.ipvs import PROTOCOLS, Ipvs, Scheduling, Table, VirtualServer
from rulecast_agent.kernel.netlink_batch import attributes
from tests.netns import flows
from tests.netns.objects import BOTH, CLUSTER_IP, TCP_AND_UDP, VIP, Port, Svc, frontend
from tests.netns.rig import Process, Rig
from tests.netns.test_faults_agent import ended, everywhere, hows, staying
from tests.netns.traffic import Traffic
from tests.netns.world import A, B, C
from tests.vm.machine import SCHEDULERS

WEB = Svc("web", 70, [A, B])
DNS = Svc("dns", 71, [A, B], ports=TCP_AND_UDP)
LOCAL = Svc("local", 72, [A, B], spec={"externalTrafficPolicy": "Local"})
FOREIGN = VirtualServer(Family.IPV4, PROTOCOLS["TCP"], "192.0.2.200", 443)
THEIRS = Endpoint("192.0.2.201", 8443)
families = pytest.mark.parametrize("family", BOTH, ids=lambda family: f"IPv{int(family)}")


T = TypeVar("T")


def on(rig: Rig, work: Callable[[Ipvs], T]) -> T:
    """Do it with the IPVS of n1."""

    def there() -> T:
        with contextlib.closing(Ipvs()) as ipvs:
            return work(ipvs)

    return rig.n1.namespace.call(there)


def services(rig: Rig) -> dict[VirtualServer, Scheduling]:
    return on(rig, lambda ipvs: ipvs.services())


def table(rig: Rig) -> Table:
    """Without those of marks."""
    found = on(rig, lambda ipvs: ipvs.table({}))
    return {server: destinations for server, destinations in found.items() if not server.mark}


def web(family: Family = Family.IPV4, number: int = 70, protocol: str = "TCP") -> VirtualServer:
    return VirtualServer(family, PROTOCOLS[protocol], frontend(CLUSTER_IP, number, family), 80)


def endpoint(rig: Rig, name: str, family: Family = Family.IPV4) -> Endpoint:
    pods = rig.n1.pods if name in rig.n1.pods else rig.n2.pods
    return Endpoint(pods[name].ip(family), 8080)


def until_in(rig: Rig, expected: set[str] | None = None, number: int = 70) -> None:
    for family in BOTH:
        rig.until_asked(expected or {"A", "B"}, frontend(CLUSTER_IP, number, family), patience=20, times=20)


def weights(rig: Rig, server: VirtualServer) -> dict[Endpoint, int]:
    return {one: state.weight for one, state in table(rig).get(server, {}).items()}


@pytest.fixture(autouse=True, scope="class")
def server(rig: Rig) -> Process:
    rig.write(WEB)
    return rig.server()


class TestFlags:
    @pytest.mark.parametrize("scheduler", SCHEDULERS)
    def test_every_scheduler_carries_traffic(self, rig: Rig, scheduler: str) -> None:
        agent = rig.agent("--ipvs-scheduler", scheduler)
        rig.until_programmed()
        assert {how.scheduler for how in services(rig).values()} == {scheduler}
        for family in BOTH:
            assert rig.ask(frontend(CLUSTER_IP, 70, family)) <= {"A", "B"}
        ended(agent, "SIGTERM")

    def test_round_robin_is_even(self, rig: Rig) -> None:
        agent = rig.agent()
        rig.until_programmed()
        probe = Probe(rig.pod.namespace, frontend(CLUSTER_IP, 70, Family.IPV4), 80, timeout=0.9)
        answers = run_probes([probe] * 20)
        counts = Counter(each.reached.backend if each.reached else str(each.verdict) for each in answers)
        assert counts == {"A": 10, "B": 10}
        ended(agent, "SIGTERM")

    def test_timeouts(self, rig: Rig) -> None:
        agent = rig.agent(
            "--ipvs-tcp-timeout", "5m", "--ipvs-tcpfin-timeout", "61s", "--ipvs-udp-timeout", "31s"
        )
        rig.until_programmed()

        def config(ipvs: Ipvs) -> list[int]:
            fields = attributes(ipvs._netlink.ask(ipvs._request(13))[4:])
            return [struct.unpack_from("=I", fields[kind])[0] for kind in (4, 5, 6)]

        assert on(rig, config) == [300, 61, 31]
        ended(agent, "SIGTERM")

    def test_strict_arp_and_what_ipvs_needs(self, rig: Rig) -> None:
        names = ["all/arp_ignore", "all/arp_announce"]

        def read(name: str) -> int:
            return int(rig.n1.namespace.run("cat", f"/proc/sys/net/ipv4/{name}"))

        before = [read(f"conf/{name}") for name in names]
        assert before != [1, 2]
        agent = rig.agent()
        rig.until_programmed()
        assert [read(f"conf/{name}") for name in names] == before
        for name in ("conntrack", "expire_nodest_conn", "expire_quiescent_template"):
            assert read(f"vs/{name}") == 1
        ended(agent, "SIGTERM")
        agent = rig.agent("--ipvs-strict-arp")
        rig.eventually(lambda: [read(f"conf/{name}") for name in names] == [1, 2])
        ended(agent, "SIGTERM")
        for name, value in zip(names, before, strict=True):
            rig.n1.namespace.run("sysctl", "-q", "-w", f"net.ipv4.conf.{name.replace('/', '.')}={value}")

    def test_affinity_is_persistence_with_its_timeout(self, rig: Rig) -> None:
        sticky = {
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 77}},
        }
        agent = rig.agent()
        rig.apply(Svc("web", 70, [A, B], spec=sticky))
        for family in BOTH:
            assert services(rig)[web(family)].persistence == 77
            assert len(rig.ask(frontend(CLUSTER_IP, 70, family))) == 1
        rig.apply(WEB)
        assert services(rig)[web()].persistence == 0
        ended(agent, "SIGTERM")


class TestDraining:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def agent(cls, rig: Rig, server: Process) -> Process:
        return rig.agent("--ipvs-tcpfin-timeout", "1s")

    @families
    def test_an_endpoint_that_goes_keeps_its_connections_and_gets_no_new_ones(
        self, rig: Rig, family: Family
    ) -> None:
        rig.apply(WEB)
        until_in(rig)
        address = frontend(CLUSTER_IP, 70, family)
        with flows.tcp(rig.pod, address, 80) as one, flows.tcp(rig.pod, address, 80) as other:
            assert {one.ask(), other.ask()} == {"A", "B"}
            rig.apply(Svc("web", 70, [B]))
            assert weights(rig, web(family)) == {endpoint(rig, "A", family): 0, endpoint(rig, "B", family): 1}
            assert rig.ask(address) == {"B"}
            assert {one.ask(), other.ask()} == {"A", "B"}
        rig.eventually(lambda: weights(rig, web(family)) == {endpoint(rig, "B", family): 1}, patience=30)

    def test_an_endpoint_that_comes_back_gets_its_weight_back(self, rig: Rig) -> None:
        rig.apply(WEB)
        until_in(rig)
        address = frontend(CLUSTER_IP, 70, Family.IPV4)
        with flows.tcp(rig.pod, address, 80) as one, flows.tcp(rig.pod, address, 80) as other:
            assert {one.ask(), other.ask()} == {"A", "B"}
            rig.apply(Svc("web", 70, [B]))
            assert weights(rig, web())[endpoint(rig, "A")] == 0
            rig.apply(WEB)
            assert weights(rig, web()) == {endpoint(rig, "A"): 1, endpoint(rig, "B"): 1}
            until_in(rig)
            assert {one.ask(), other.ask()} == {"A", "B"}

    def test_a_service_that_goes_leaves_nothing_when_its_connections_have_ended(self, rig: Rig) -> None:
        rig.apply(WEB)
        until_in(rig)
        with flows.tcp(rig.pod, frontend(CLUSTER_IP, 70, Family.IPV4), 80) as one:
            first = one.ask()
            rig.apply()
            assert rig.ask(frontend(CLUSTER_IP, 70, Family.IPV4)) == {"refused"}
            assert one.ask() == first
        rig.eventually(lambda: not [s for s in table(rig) if s.address == web().address], patience=30)

    def test_udp_endpoints_go_at_once(self, rig: Rig) -> None:
        rig.apply(DNS)
        until_in(rig, number=71)
        server = web(number=71, protocol="UDP")
        assert len(weights(rig, server)) == 2
        rig.apply(Svc("dns", 71, [B], ports=TCP_AND_UDP))
        assert list(weights(rig, server).values()) == [1]


class TestOthers:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def foreign(cls, rig: Rig) -> Iterator[None]:
        def make(ipvs: Ipvs) -> None:
            failed = ipvs.commit(
                [ipvs.add(FOREIGN, Scheduling("wlc")), ipvs.add_destination(FOREIGN, THEIRS)]
            )
            assert not failed

        on(rig, make)
        yield
        on(rig, lambda ipvs: ipvs.commit([ipvs.delete(FOREIGN)]))

    def test_virtual_servers_of_others_stay_through_start_change_repair_and_cleanup(self, rig: Rig) -> None:
        """cloudnativelabs/kube-router#830."""
        agent = rig.agent()
        rig.apply(WEB, LOCAL)
        until_in(rig)
        rig.apply(LOCAL)
        ended(agent, "SIGTERM")
        code, log = rig.run(rig.n1, "cleanup")
        assert code == 0, log
        assert set(services(rig)) == {FOREIGN}
        assert weights(rig, FOREIGN) == {THEIRS: 1}
        assert "rulecast" not in rig.ruleset()
        assert "rulecast" not in rig.n1.namespace.run("ip", "link")

    def test_what_someone_else_removed_is_mended(self, rig: Rig) -> None:
        agent = rig.agent()
        rig.apply(WEB, LOCAL)
        until_in(rig)

        def damage(ipvs: Ipvs) -> None:
            ipvs.commit([ipvs.delete(web()), ipvs.delete_destination(web(Family.IPV6), six)])

        six = endpoint(rig, "A", Family.IPV6)
        on(rig, damage)
        rig.eventually(lambda: len(weights(rig, web())) == 2 and len(weights(rig, web(Family.IPV6))) == 2, 60)
        until_in(rig)
        rig.n1.namespace.run("ip", "link", "del", "rulecast-ipvs0")
        rig.eventually(lambda: "rulecast-ipvs0" in rig.n1.namespace.run("ip", "link"), 60)
        until_in(rig)
        rig.n1.namespace.run("nft", "flush ruleset")
        rig.eventually(lambda: "rulecast-ipvs" in rig.ruleset(), 60)
        rig.until_asked({"A"}, frontend(VIP, 72, Family.IPV4), client=rig.outside, patience=20)
        ended(agent, "SIGTERM")


class TestRestarts:
    @hows
    def test_an_agent_that_restarts_costs_no_packet_and_writes_nothing(self, rig: Rig, how: str) -> None:
        """kubernetes/kubernetes#75283."""
        rig.write(WEB, LOCAL)
        agent = rig.agent()
        rig.until_programmed()
        until_in(rig)
        with Traffic(everywhere(rig), staying=staying(rig)) as traffic:
            before = rig.writes()
            for _ in range(2):
                ended(agent, how)
                agent = rig.agent()
                agent.until_logged("first state in the kernel")
                rig.until_connected()
                assert rig.metric("rulecast_agent_operations_total") == 0
                assert rig.writes() == before
        traffic.check()
        ended(agent, how)

    def test_a_change_of_mode_leaves_nothing_behind_and_costs_no_packet(self, rig: Rig) -> None:
        """kubernetes/kubernetes#102314."""
        rig.write(WEB, LOCAL)
        agent = rig.agent()
        rig.until_programmed()
        until_in(rig)
        with Traffic(everywhere(rig)) as traffic:
            for mode in ("nftables", "ipvs", "iptables", "ipvs"):
                ended(agent, "SIGTERM")
                agent = rig.agent("--mode", mode)
                agent.until_logged("removed the rules that another mode had left")
                until_in(rig)
                assert bool(services(rig)) is (mode == "ipvs")
                assert ("table ip rulecast " in rig.ruleset()) is (mode == "nftables")
                assert ("rulecast-ipvs" in rig.ruleset()) is (mode == "ipvs")
        traffic.check()
        ended(agent, "SIGTERM")


class TestHost:
    def test_no_daemon_of_the_host_answers_at_an_address_of_a_service(self, rig: Rig) -> None:
        """kubernetes/kubernetes#72236."""
        rig.n1.serve(2222)
        agent = rig.agent()
        rig.apply(WEB, Svc("other", 73, [C], ports=(Port(443, 8080),)))
        until_in(rig)
        for family in BOTH:
            for client in (rig.pod, rig.outside, rig.n1):
                for place in (CLUSTER_IP, VIP):
                    assert rig.ask(frontend(place, 70, family), 2222, client=client, times=2) == {"refused"}
            assert rig.ask(rig.n1.ip(family), 2222, times=2) == {"n1"}
        ended(agent, "SIGTERM")
