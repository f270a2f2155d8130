"""SCTP, ICMP, addresses that two services claim, and the node's own loopback."""

import itertools
import socket

import pytest

from rulecast.lab import Host
from rulecast.model import Family, Protocol
from tests.netns import raw
from tests.netns.objects import BOTH, CLUSTER_IP, EXTERNAL_IP, VIP, Object, Port, Svc, frontend
from tests.netns.rig import Rig
from tests.netns.world import LOCAL_OUT, A, B

PORTS = (
    Port(53, 5353, "TCP", "tcp"),
    Port(53, 8080, "UDP", "udp"),
    Port(53, 5354, "SCTP", "sctp"),
)
DNS = Svc("dns", 70, [A], ports=PORTS)
EMPTY = Svc("empty", 71, ports=PORTS)
LOCAL = Svc("local", 72, [B], ports=PORTS, spec=LOCAL_OUT)
families = pytest.mark.parametrize("family", BOTH, ids=lambda family: f"IPv{int(family)}")
_source_ports = itertools.count(20000)


class TestSctp:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def line(cls, rig: Rig) -> None:
        rig.write(DNS, EMPTY, LOCAL)
        rig.server()
        rig.agent()
        rig.until_programmed()

    def reached(
        self, rig: Rig, client: Host, family: Family, address: str, port: int = 53, backend: str = "A"
    ) -> tuple[str, int] | None:
        """Begins an association; the source that the backend sees and the port that was asked there."""
        number = next(_source_ports)
        host = next(node.pods[backend] for node in (rig.n1, rig.n2) if backend in node.pods)
        with raw.SctpListener(host, family) as listener:
            raw.send_sctp_init(client, family, address, port, number)
            seen = listener.receive(0.5)
        return seen and (seen[0], seen[2])

    @families
    def test_it_reaches_its_own_target_port(self, rig: Rig, family: Family) -> None:
        """Row 25: as TCP and UDP of the same port do theirs."""
        address = frontend(CLUSTER_IP, 70, family)
        assert self.reached(rig, rig.pod, family, address) == (rig.pod.ip(family), 5354)

    @families
    @pytest.mark.parametrize("target", [VIP, EXTERNAL_IP, "node port"])
    def test_from_outside_it_is_masqueraded(self, rig: Rig, family: Family, target: str) -> None:
        address, port = (
            (rig.n1.ip(family), 30070) if target == "node port" else (frontend(target, 70, family), 53)
        )
        assert self.reached(rig, rig.outside, family, address, port) == (rig.n1.ip(family), 5354)

    @families
    def test_a_local_policy_without_local_endpoints_drops_it(self, rig: Rig, family: Family) -> None:
        address = frontend(VIP, 72, family)
        assert self.reached(rig, rig.outside, family, address, backend="B") is None
        assert self.reached(rig, rig.pod, family, address, backend="B") == (rig.pod.ip(family), 5354)

    @families
    def test_a_service_without_endpoints_refuses_it(self, rig: Rig, family: Family) -> None:
        errors = rig.pod.namespace.socket(
            socket.AF_INET if family is Family.IPV4 else socket.AF_INET6,
            socket.SOCK_RAW,
            socket.IPPROTO_ICMP if family is Family.IPV4 else socket.IPPROTO_ICMPV6,
        )
        with errors:
            errors.settimeout(0.5)
            raw.send_sctp_init(rig.pod, family, frontend(CLUSTER_IP, 71, family), 53, next(_source_ports))
            while True:
                data = errors.recv(4096)
                start = (data[0] & 15) * 4 if family is Family.IPV4 else 0
                if data[start] == (3 if family is Family.IPV4 else 1):
                    break
        assert data[start + 1] == (3 if family is Family.IPV4 else 4)

    @families
    def test_an_unused_sctp_port_of_a_cluster_ip_is_not_forwarded(self, rig: Rig, family: Family) -> None:
        assert self.reached(rig, rig.pod, family, frontend(CLUSTER_IP, 70, family), 54) is None


class TestIcmp:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def line(cls, rig: Rig) -> None:
        rig.write(DNS, EMPTY)
        rig.server()
        rig.agent()
        rig.until_programmed()

    @families
    def test_an_echo_to_a_cluster_ip_is_refused(self, rig: Rig, family: Family) -> None:
        for host in (rig.pod, rig.n1):
            assert raw.ping(host, family, rig.n2.ip(family)) == "answered"
            assert raw.ping(host, family, frontend(CLUSTER_IP, 70, family)) == "refused"
            assert raw.ping(host, family, frontend(CLUSTER_IP, 71, family)) == "refused"
            assert raw.ping(host, family, frontend(CLUSTER_IP, 199, family)) == "dropped"


def created(rig: Rig, service: Svc, at: str) -> list[Object]:
    """A service's objects, with a time of creation."""
    first, *slices = service.manifests(rig.lab)
    return [first | {"metadata": first["metadata"] | {"creationTimestamp": at}}, *slices]


SHARED = [frontend(EXTERNAL_IP, 90, family) for family in BOTH]


class TestClaims:
    """kubernetes/kubernetes#69599 and #64466: the same winner on every node, and after restarts."""

    def objects(self, rig: Rig, *names: str) -> list[Object]:
        spec = {"externalIPs": SHARED}
        ports = (Port(80, 8080, node_port=30090),)
        older = Svc("z-older", 80, [A], ports=ports, spec=spec)
        newer = Svc("a-newer", 81, [B], ports=ports, spec=spec)
        made = {
            "older": created(rig, older, "2026-01-01T00:00:00Z"),
            "newer": created(rig, newer, "2026-01-02T00:00:00Z"),
        }
        return [each for name in names for each in made[name]]

    def check(self, rig: Rig, backend: str) -> None:
        for node in (rig.n1, rig.n2):
            rig.until_programmed(node)
        for family, shared in zip(BOTH, SHARED, strict=True):
            rig.until_asked({backend}, shared)
            rig.until_asked({backend}, shared, client=rig.n2.pods["cli2"])
            # Each by the node that the answers pass again: what conntrack sees half of is dropped there.
            (outside2,) = (host for host in rig.lab.hosts if host.name == "outside2")
            for node, client in ((rig.n1, rig.outside), (rig.n2, outside2)):
                rig.until_asked({backend}, node.ip(family), 30090, client=client)

    def test_the_older_service_has_an_address_that_two_claim(self, rig: Rig) -> None:
        rig.write(extra=self.objects(rig, "newer"))
        server = rig.server()
        for node in (rig.n1, rig.n2):
            rig.agent(name=node.name, node=node)
        self.check(rig, "B")
        rig.write(extra=self.objects(rig, "newer", "older"))
        self.check(rig, "A")
        server.until_logged("a-newer: frontend-taken")
        assert rig.metric("rulecast_server_object_problems", host=rig.lab.fabric, port=9440) > 0
        # What only one of them claims is nobody else's.
        for family in BOTH:
            assert rig.ask(frontend(VIP, 81, family), client=rig.outside) == {"B"}
        for process in rig.processes:
            process.kill()
        for node in (rig.n1, rig.n2):
            node.namespace.run("nft", "flush ruleset")
        rig.server()
        for node in (rig.n1, rig.n2):
            rig.agent(name=node.name, node=node)
        self.check(rig, "A")
        rig.write(extra=self.objects(rig, "newer"))
        self.check(rig, "B")


class TestLoopback:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def line(cls, rig: Rig) -> None:
        rig.write(DNS)
        rig.server()
        rig.agent()
        rig.until_programmed()

    @families
    def test_the_nodes_loopback_is_closed_to_neighbours(self, rig: Rig, family: Family) -> None:
        """kubernetes/kubernetes#90259."""
        loopback = "127.0.0.1" if family is Family.IPV4 else "::1"
        servers = rig.lab.servers
        addresses = [loopback, rig.n1.ip(family)]
        servers.listen("n1", rig.n1.namespace, [loopback], 9000, Protocol.UDP)
        servers.listen("n1", rig.n1.namespace, [rig.n1.ip(family)], 9001, Protocol.UDP)
        before = servers.received("n1", Protocol.UDP, 9001)
        try:
            for address, port in zip(addresses, (9000, 9001), strict=True):
                raw.send_udp_frame(rig.outside, rig.n1, family, address, port)
            rig.eventually(lambda: servers.received("n1", Protocol.UDP, 9001) > before, 3)
            assert servers.received("n1", Protocol.UDP, 9000) == 0
        finally:
            servers.close("n1")
        # Node ports answer on it neither, so that nothing has to be opened.
        assert rig.ask(loopback, 30070, client=rig.n1) == {"refused"}

    def test_route_localnet_stays_off(self, rig: Rig) -> None:
        settings = rig.n1.namespace.run("sh", "-c", "cat /proc/sys/net/ipv4/conf/*/route_localnet")
        assert set(settings.split()) == {"0"}
