"""What only the IPVS mode does, asked of the kernel. Run inside the virtual machine."""

import contextlib
import struct
from collections import Counter
from collections.abc import Iterator

import pytest

from rulecast.lab import Probe, run_probes
from rulecast.model import Endpoint, Family
from rulecast_agent.kernel.ipvs import PROTOCOLS, Ipvs, Scheduling, VirtualServer
from rulecast_agent.kernel.netlink_batch import attributes
from tests.netns import flows
from tests.netns.objects import BOTH, CLUSTER_IP, TCP_AND_UDP, VIP, Port, Svc, frontend
from tests.netns.rig import Process, Rig
from tests.netns.test_faults_agent import ended, everywhere, hows, staying
from tests.netns.traffic import Traffic
from tests.netns.world import A2, A, B, C
from tests.vm.inside.table import on, services, table, weights
from tests.vm.machine import SCHEDULERS

WEB = Svc("web", 70, [A, B])
DNS = Svc("dns", 71, [A, B], ports=TCP_AND_UDP)
LOCAL = Svc("local", 72, [A, B], spec={"externalTrafficPolicy": "Local"})
STICKY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 77}}}
FOREIGN = VirtualServer(Family.IPV4, PROTOCOLS["TCP"], "192.0.2.200", 443)
THEIRS = Endpoint("192.0.2.201", 8443)
families = pytest.mark.parametrize("family", BOTH, ids=lambda family: f"IPv{int(family)}")


def cluster_ip(family: Family = Family.IPV4, number: int = 70, protocol: str = "TCP") -> VirtualServer:
    return VirtualServer(family, PROTOCOLS[protocol], frontend(CLUSTER_IP, number, family), 80)


def endpoint(rig: Rig, name: str, family: Family = Family.IPV4) -> Endpoint:
    pods = rig.n1.pods if name in rig.n1.pods else rig.n2.pods
    return Endpoint(pods[name].ip(family), 8080)


def until_in(rig: Rig, expected: set[str] | None = None, number: int = 70) -> None:
    for family in BOTH:
        rig.until_asked(expected or {"A", "B"}, frontend(CLUSTER_IP, number, family), patience=20, times=20)


@contextlib.contextmanager
def running(rig: Rig, *flags: str) -> Iterator[Process]:
    """An agent that has written its first state."""
    agent = rig.agent(*flags)
    try:
        agent.until_logged("first state in the kernel")
        rig.until_programmed()
        yield agent
        ended(agent, "SIGTERM")
    finally:
        if agent.running:
            agent.kill()


@contextlib.contextmanager
def made_by_others(rig: Rig, server: VirtualServer) -> Iterator[None]:
    """A virtual server that is not ours."""

    def make(ipvs: Ipvs) -> None:
        assert not ipvs.commit([ipvs.add(server, Scheduling("wlc")), ipvs.add_destination(server, THEIRS)])

    on(rig.n1, make)
    try:
        yield
    finally:
        on(rig.n1, lambda ipvs: ipvs.commit([ipvs.delete(server)]))


@pytest.fixture(autouse=True, scope="class")
def server(rig: Rig) -> Process:
    rig.write(WEB)
    return rig.server()


class TestFlags:
    @pytest.mark.parametrize("scheduler", SCHEDULERS)
    def test_every_scheduler_carries_traffic(self, rig: Rig, scheduler: str) -> None:
        with running(rig, "--ipvs-scheduler", scheduler):
            assert {how.scheduler for how in services(rig).values()} == {scheduler}
            for family in BOTH:
                assert rig.ask(frontend(CLUSTER_IP, 70, family)) <= {"A", "B"}

    def test_round_robin_is_even(self, rig: Rig) -> None:
        with running(rig):
            probe = Probe(rig.pod.namespace, frontend(CLUSTER_IP, 70, Family.IPV4), 80, timeout=0.9)
            answers = run_probes([probe] * 20)
            counts = Counter(each.reached.backend if each.reached else str(each.verdict) for each in answers)
            assert counts == {"A": 10, "B": 10}

    def test_timeouts(self, rig: Rig) -> None:
        def config(ipvs: Ipvs) -> list[int]:
            fields = attributes(ipvs._netlink.ask(ipvs._request(13))[4:])
            return [struct.unpack_from("=I", fields[kind])[0] for kind in (4, 5, 6)]

        assert on(rig.n1, config) == [900, 120, 300]
        with running(
            rig, "--ipvs-tcp-timeout", "5m", "--ipvs-tcpfin-timeout", "61s", "--ipvs-udp-timeout", "31s"
        ):
            assert on(rig.n1, config) == [300, 61, 31]

    def test_strict_arp_and_what_ipvs_needs(self, rig: Rig) -> None:
        names = ["all/arp_ignore", "all/arp_announce"]

        def read(name: str) -> int:
            return int(rig.n1.namespace.run("cat", f"/proc/sys/net/ipv4/{name}"))

        before = [read(f"conf/{name}") for name in names]
        assert before != [1, 2]
        with running(rig):
            assert [read(f"conf/{name}") for name in names] == before
            for name in ("conntrack", "expire_nodest_conn", "expire_quiescent_template"):
                assert read(f"vs/{name}") == 1
        with running(rig, "--ipvs-strict-arp"):
            assert [read(f"conf/{name}") for name in names] == [1, 2]
        for name, value in zip(names, before, strict=True):
            rig.n1.namespace.run("sysctl", "-q", "-w", f"net.ipv4.conf.{name.replace('/', '.')}={value}")


class TestAffinity:
    def test_is_persistence_with_its_timeout(self, rig: Rig) -> None:
        with running(rig):
            rig.apply(Svc("web", 70, [A, B], spec=STICKY))
            for family in BOTH:
                assert services(rig)[cluster_ip(family)].persistence == 77
                assert len(rig.ask(frontend(CLUSTER_IP, 70, family))) == 1
            rig.apply(WEB)
            assert services(rig)[cluster_ip()].persistence == 0

    def test_from_outside_to_endpoints_of_the_node_goes_by_the_client(self, rig: Rig) -> None:
        """With persistence, a virtual server of a mark leaves the port as it is (ip_vs_sched_persist)."""
        with running(rig):
            spec = {**STICKY, "externalTrafficPolicy": "Local"}
            rig.apply(Svc("local", 72, [A, A2, B], spec=spec))
            for family in BOTH:
                for address, port in ((frontend(VIP, 72, family), 80), (rig.n1.ip(family), 30072)):
                    answered = rig.ask(address, port, client=rig.outside)
                    assert answered in ({"A"}, {"A2"})


class TestDraining:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def agent(cls, rig: Rig, server: Process) -> Process:
        return rig.agent()

    @families
    def test_an_endpoint_that_goes_keeps_its_connections_and_gets_no_new_ones(
        self, rig: Rig, family: Family
    ) -> None:
        number = 70 + int(family)
        address, server = frontend(CLUSTER_IP, number, family), cluster_ip(family, number)
        a, b = endpoint(rig, "A", family), endpoint(rig, "B", family)
        rig.apply(Svc("web", number, [A, B]))
        assert weights(rig, server) == {a: 1, b: 1}
        # Reset at the end: the kernel remembers those that ended by FIN for two minutes.
        with flows.tcp(rig.pod, address, 80, 40001) as one, flows.tcp(rig.pod, address, 80, 40002) as other:
            assert {one.ask(), other.ask()} == {"A", "B"}
            rig.apply(Svc("web", number, [B]))
            assert weights(rig, server) == {a: 0, b: 1}
            assert rig.ask(address) == {"B"}
            assert {one.ask(), other.ask()} == {"A", "B"}
        rig.eventually(lambda: weights(rig, server) == {b: 1}, patience=30)

    def test_an_endpoint_that_comes_back_gets_its_weight_back(self, rig: Rig) -> None:
        rig.apply(WEB)
        address = frontend(CLUSTER_IP, 70, Family.IPV4)
        a, b = endpoint(rig, "A"), endpoint(rig, "B")
        with flows.tcp(rig.pod, address, 80, 40003) as one, flows.tcp(rig.pod, address, 80, 40004) as other:
            assert {one.ask(), other.ask()} == {"A", "B"}
            rig.apply(Svc("web", 70, [B]))
            assert weights(rig, cluster_ip()) == {a: 0, b: 1}
            rig.apply(WEB)
            assert weights(rig, cluster_ip()) == {a: 1, b: 1}
            until_in(rig)
            assert {one.ask(), other.ask()} == {"A", "B"}

    def test_a_service_that_goes_keeps_its_connections_and_then_leaves_nothing(self, rig: Rig) -> None:
        rig.apply(WEB)
        address = frontend(CLUSTER_IP, 70, Family.IPV4)
        with flows.tcp(rig.pod, address, 80, 40005) as one:
            first = one.ask()
            rig.apply()
            assert rig.ask(address) == {"dropped"}
            assert one.ask() == first
        rig.eventually(lambda: not [each for each in table(rig) if each.address == address], patience=30)

    def test_udp_endpoints_go_at_once_and_their_flows_with_them(self, rig: Rig) -> None:
        rig.apply(DNS)
        server = cluster_ip(number=71, protocol="UDP")
        a, b = endpoint(rig, "A"), endpoint(rig, "B")
        assert weights(rig, server) == {a: 1, b: 1}
        address = frontend(CLUSTER_IP, 71, Family.IPV4)
        with flows.udp(rig.pod, address, 80) as one, flows.udp(rig.pod, address, 80) as other:
            assert {one.ask(), other.ask()} == {"A", "B"}
            rig.apply(Svc("dns", 71, [B], ports=TCP_AND_UDP))
            assert weights(rig, server) == {b: 1}
            rig.eventually(lambda: [one.ask(), other.ask()] == ["B", "B"])


class TestOthers:
    def test_virtual_servers_of_others_stay_through_start_change_repair_and_cleanup(self, rig: Rig) -> None:
        """cloudnativelabs/kube-router#830."""
        with made_by_others(rig, FOREIGN):
            with running(rig):
                rig.apply(WEB, LOCAL)
                until_in(rig)
                rig.apply(LOCAL)
            code, log = rig.run(rig.n1, "cleanup")
            assert code == 0, log
            assert set(services(rig)) == {FOREIGN}
            assert weights(rig, FOREIGN) == {THEIRS: 1}
            assert "rulecast" not in rig.ruleset()
            assert "rulecast-ipvs0" not in rig.n1.namespace.run("ip", "link")
            for family in BOTH:
                assert "fwmark" not in rig.n1.namespace.run("ip", f"-{int(family)}", "rule")

    def test_at_an_address_of_a_service_only_those_in_excluded_ranges_stay(self, rig: Rig) -> None:
        rig.write(WEB)
        with running(rig):
            until_in(rig)
        inside = cluster_ip()._replace(port=9999)
        for flags, stays in (((), False), (("--ipvs-exclude-cidrs", "10.96.0.64/28"), True)):
            with made_by_others(rig, inside), running(rig, *flags):
                assert (inside in services(rig)) is stays
                assert weights(rig, inside) == ({THEIRS: 1} if stays else {})

    def test_what_someone_else_removed_is_mended(self, rig: Rig) -> None:
        six = endpoint(rig, "A", Family.IPV6)

        def damage(ipvs: Ipvs) -> None:
            ipvs.commit([ipvs.delete(cluster_ip()), ipvs.delete_destination(cluster_ip(Family.IPV6), six)])

        with running(rig):
            rig.apply(WEB, LOCAL)
            until_in(rig)
            on(rig.n1, damage)
            rig.n1.namespace.run("nft", "flush ruleset")
            for family in BOTH:
                rig.n1.namespace.run("ip", f"-{int(family)}", "rule", "del", "priority", "300")
            rig.n1.namespace.run("ip", "link", "del", "rulecast-ipvs0")
            rig.eventually(lambda: "rulecast-ipvs0" in rig.n1.namespace.run("ip", "link"), 35)
            rig.eventually(lambda: all(len(weights(rig, cluster_ip(family))) == 2 for family in BOTH), 35)
            rig.eventually(lambda: "rulecast-ipvs" in rig.ruleset(), 35)
            until_in(rig)
            for family in BOTH:
                rig.until_asked({"A"}, frontend(VIP, 72, family), client=rig.outside, patience=20)


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
        agent = rig.agent("--mode", "iptables")
        agent.until_logged("first state in the kernel")
        until_in(rig)
        with Traffic(everywhere(rig)) as traffic:
            for mode in ("ipvs", "nftables", "ipvs", "iptables"):
                ended(agent, "SIGTERM")
                agent = rig.agent("--mode", mode)
                agent.until_logged("removed the rules that another mode had left")
                until_in(rig)
                rules = rig.ruleset()
                assert bool(services(rig)) is (mode == "ipvs")
                assert ("rulecast-ipvs" in rules) is (mode == "ipvs")
                assert ("rulecast-ipvs0" in rig.n1.namespace.run("ip", "link")) is (mode == "ipvs")
                assert ("fwmark" in rig.n1.namespace.run("ip", "rule")) is (mode == "ipvs")
                assert ("table ip rulecast " in rules) is (mode == "nftables")
                assert ("RULECAST" in rules) is (mode == "iptables")
        traffic.check()
        ended(agent, "SIGTERM")


class TestHost:
    def test_no_daemon_of_the_host_answers_at_an_address_of_a_service(self, rig: Rig) -> None:
        """kubernetes/kubernetes#72236."""
        rig.n1.serve(2222)
        with running(rig):
            rig.apply(WEB, Svc("other", 73, [C], ports=(Port(443, 8080),)))
            until_in(rig)
            for family in BOTH:
                for client in (rig.pod, rig.outside, rig.n1):
                    here = frontend(CLUSTER_IP, 70, family)
                    assert rig.ask(here, 2222, client=client, times=2) == {"refused"}
                    # Of external addresses, only the services' ports are this node's.
                    here = frontend(VIP, 70, family)
                    assert not {"n1"} & rig.ask(here, 2222, client=client, times=2)
                assert rig.ask(rig.n1.ip(family), 2222, times=2) == {"n1"}
