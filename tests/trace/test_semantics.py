"""The compiled rules do to every packet what the services say."""

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings

from rulecast.model import Endpoint, Family, ServiceKey, ServicePort
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector
from tests.trace.compare import CLOSE, TRACERS, AnyTracer, differences
from tests.trace.iptables import IptablesTracer
from tests.trace.packets import DROPPED, RESET, Outcome, Packet, passed
from tests.trace.tracer import Tracer
from tests.trace.worlds import NETS, World, world

Node = Callable[..., AnyTracer]
CLIENT = "203.0.113.9"
HOST = HostConfig(
    families={
        Family.IPV4: FamilyConfig(detector=LocalDetector(source_cidr="10.1.0.0/16"), nodeport_addresses=None)
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world())
def test_every_packet_has_the_fate_and_the_shares_that_the_services_say(world: World) -> None:
    found = {mode: differences(world, tracer(world)) for mode, tracer in TRACERS.items()}
    assert {mode: lines for mode, lines in found.items() if lines} == {}


def plain(number: int, count: int, **fields: object) -> ServiceView:
    members = tuple(sorted(Endpoint(f"10.2.{n >> 8}.{n & 255}", 8080) for n in range(count)))
    port = ServicePort(
        key=ServiceKey(f"ns/s{number}:http/TCP/ipv4"),
        cluster_ip=f"172.30.{number >> 8}.{number & 255}",
        port=80,
        has_endpoints=bool(count),
        **fields,  # type: ignore[arg-type]
    )
    return ServiceView(service=port, cluster=members)


def world_of(*views: ServiceView) -> World:
    local = frozenset(NETS[Family.IPV4].nodes)
    return World(Family.IPV4, HOST, {view.service.key: view for view in views}, local)


@pytest.fixture(params=TRACERS)
def node(request: pytest.FixtureRequest) -> Node:
    def made(*views: ServiceView) -> AnyTracer:
        return TRACERS[request.param](world_of(*views))

    return made


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 16, 33, 64, 257])
def test_each_endpoint_has_its_share(node: Node, count: int) -> None:
    shares = node(plain(1, count)).shares(Packet(CLIENT, "172.30.0.1", 80))
    assert len(shares) == count
    assert max(abs(share - Fraction(1, count)) for share in shares.values()) < CLOSE


@pytest.mark.parametrize(
    ("fields", "most"),
    [({}, 60), ({"node_port": 30001}, 60), ({"affinity_seconds": 60}, 60), ({"external_local": True}, 60)],
)
def test_the_rules_on_a_packet_do_not_grow_with_the_services(
    node: Node, fields: dict[str, object], most: int
) -> None:
    """Twenty times as many services: none more in nftables, a level of a tree more in iptables."""
    counts = []
    for others in (100, 2000):
        services = (plain(number, number % 5) for number in range(2, others))
        tracer = node(plain(1, 3, external_ips=("192.0.2.1",), **fields), *services)
        sent = [Packet(CLIENT, "172.30.0.1", 80), Packet(CLIENT, "192.0.2.1", 80)]
        sent += [Packet(CLIENT, "192.168.0.2", 30001), Packet(CLIENT, "192.0.2.200", 80)]
        evaluated = []
        for packet in sent:
            tracer.shares(packet)
            evaluated.append(tracer.rules_evaluated)
        counts.append(evaluated)
    assert max(counts[1]) <= most
    if isinstance(tracer, Tracer):
        assert counts[0] == counts[1]
        assert max(counts[1]) <= 20
    else:
        assert max(after - before for before, after in zip(*counts, strict=True)) <= 20


def test_a_client_with_affinity_stays_while_others_spread() -> None:
    views = world_of(plain(1, 8, affinity_seconds=600))
    nft, ipt = (tracer(views) for tracer in TRACERS.values())
    assert isinstance(nft, Tracer)
    assert isinstance(ipt, IptablesTracer)
    draw = random.Random(1)

    def send(client: str) -> list[Outcome]:
        packet = Packet(client, "172.30.0.1", 80)
        return [
            nft.send(packet, choose=draw.randrange),
            ipt.send(packet, hit=lambda share: draw.random() < share),
        ]

    clients = [f"198.51.100.{number}" for number in range(60)]
    first = {client: send(client) for client in clients}
    assert [len({outcomes[mode] for outcomes in first.values()}) for mode in (0, 1)] == [8, 8]
    assert all(send(client) == first[client] for client in clients)


def test_packets_for_others_are_left_alone(node: Node) -> None:
    tracer = node(plain(1, 3, node_port=30001))
    for packet in (
        Packet(CLIENT, "10.2.0.1", 8080),
        Packet(CLIENT, "198.51.100.1", 30001),
        Packet(CLIENT, "192.168.0.2", 22),
        Packet("192.168.0.2", "198.51.100.1", 80, interface=""),
    ):
        assert tracer.shares(packet) == {passed(packet.destination, packet.port): Fraction(1)}


def test_nothing_and_nowhere_are_told_apart(node: Node) -> None:
    nowhere = ServiceView(service=plain(2, 1, internal_local=True).service)
    tracer = node(plain(1, 0), nowhere)
    assert tracer.shares(Packet(CLIENT, "172.30.0.1", 80)) == {RESET: Fraction(1)}
    assert tracer.shares(Packet(CLIENT, "172.30.0.2", 80)) == {DROPPED: Fraction(1)}
