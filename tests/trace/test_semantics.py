"""The compiled nftables rules do to every packet what the services say."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings

from rulecast.model import Endpoint, Family, ServiceKey, ServicePort
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector
from rulecast_agent.dataplane.nftables.render import render_ruleset
from tests.trace.compare import differences, rules
from tests.trace.packets import DROPPED, RESET, Packet, passed
from tests.trace.ruleset import parse
from tests.trace.tracer import Tracer
from tests.trace.worlds import NETS, World, world

CLIENT = "203.0.113.9"
HOST = HostConfig(
    families={
        Family.IPV4: FamilyConfig(detector=LocalDetector(source_cidr="10.1.0.0/16"), nodeport_addresses=None)
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world())
def test_every_packet_has_the_fate_and_the_shares_that_the_services_say(world: World) -> None:
    assert differences(world, rules(world)) == []


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


def node(*views: ServiceView) -> Tracer:
    return Tracer(
        parse(render_ruleset({view.service.key: view for view in views}, HOST, Family.IPV4)),
        local=NETS[Family.IPV4].nodes,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 16, 64, 100, 257])
def test_each_endpoint_has_exactly_its_share(count: int) -> None:
    shares = node(plain(1, count)).shares(Packet(CLIENT, "172.30.0.1", 80))
    assert set(shares.values()) == {Fraction(1, count)}
    assert len(shares) == count


@pytest.mark.parametrize(
    "fields", [{}, {"node_port": 30001}, {"affinity_seconds": 60}, {"external_local": True}]
)
def test_the_rules_on_a_packet_are_as_many_beside_two_thousand_services_as_beside_ten(
    fields: dict[str, object],
) -> None:
    counts = set()
    for others in (10, 2000):
        services = (plain(number, number % 5) for number in range(2, others))
        tracer = node(plain(1, 3, external_ips=("192.0.2.1",), **fields), *services)
        sent = [Packet(CLIENT, "172.30.0.1", 80), Packet(CLIENT, "192.0.2.1", 80)]
        sent += [Packet(CLIENT, "192.168.0.2", 30001), Packet(CLIENT, "192.0.2.200", 80)]
        evaluated = []
        for packet in sent:
            tracer.shares(packet)
            evaluated.append(tracer.rules_evaluated)
        counts.add(tuple(evaluated))
    assert len(counts) == 1
    assert max(counts.pop()) <= 20


def test_a_client_with_affinity_stays_while_others_spread() -> None:
    tracer = node(plain(1, 8, affinity_seconds=600))
    turns = iter(range(1000))

    def choose(limit: int) -> int:
        return next(turns) % limit

    first: dict[str, object] = {}
    for _ in range(3):
        for number in range(16):
            client = f"198.51.100.{number}"
            outcome = tracer.send(Packet(client, "172.30.0.1", 80), choose=choose)
            assert first.setdefault(client, outcome) == outcome
    assert set(Counter(first.values()).values()) == {2}


def test_packets_for_others_are_left_alone() -> None:
    tracer = node(plain(1, 3, node_port=30001))
    for packet in (
        Packet(CLIENT, "10.2.0.1", 8080),
        Packet(CLIENT, "198.51.100.1", 30001),
        Packet(CLIENT, "192.168.0.2", 22),
        Packet("192.168.0.2", "198.51.100.1", 80, interface=""),
    ):
        assert tracer.shares(packet) == {passed(packet.destination, packet.port): Fraction(1)}


def test_nothing_and_nowhere_are_told_apart() -> None:
    nowhere = ServiceView(service=plain(2, 1, internal_local=True).service)
    tracer = node(plain(1, 0), nowhere)
    assert tracer.shares(Packet(CLIENT, "172.30.0.1", 80)) == {RESET: Fraction(1)}
    assert tracer.shares(Packet(CLIENT, "172.30.0.2", 80)) == {DROPPED: Fraction(1)}
