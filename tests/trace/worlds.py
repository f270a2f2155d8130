"""Nodes with services drawn at random, and every packet worth sending there."""

from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import strategies as st

from rulecast.model import Endpoint, Family, Protocol, ServiceKey, ServicePort
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector
from tests.trace.packets import Packet


class Net(NamedTuple):
    """The addresses of one family."""

    nodes: tuple[str, ...]
    outside: tuple[str, ...]
    """The first is in `allowed`."""
    allowed: str
    node_range: str
    ours: str
    """Our pods: a CIDR, and a prefix for addresses in it."""
    our_pod: str
    their_pod: str
    services: str
    service: str
    vip: str


NETS = {
    Family.IPV4: Net(
        nodes=("192.168.0.2", "192.168.1.2"),
        outside=("203.0.113.9", "198.51.100.7"),
        allowed="203.0.113.0/24",
        node_range="192.168.0.0/24",
        ours="10.1.0.0/16",
        our_pod="10.1.0.",
        their_pod="10.2.0.",
        services="172.30.0.0/16",
        service="172.30.0.",
        vip="192.0.2.",
    ),
    Family.IPV6: Net(
        nodes=("fd00:a::2", "fd00:b::2"),
        outside=("2001:db8::9", "2001:db8:1::7"),
        allowed="2001:db8::/64",
        node_range="fd00:a::/64",
        ours="fd00:1::/64",
        our_pod="fd00:1::",
        their_pod="fd00:2::",
        services="fd00:30::/112",
        service="fd00:30::",
        vip="2001:db8:ffff::",
    ),
}


class World(NamedTuple):
    """One node."""

    family: Family
    host: HostConfig
    views: dict[ServiceKey, ServiceView]
    local: frozenset[str]

    @property
    def net(self) -> Net:
        return NETS[self.family]


def endpoints(net: Net) -> st.SearchStrategy[Endpoint]:
    """Our pods, pods elsewhere, and what runs in the node's own network."""
    hosts = [f"{net.our_pod}{n}" for n in (1, 2, 3)] + [f"{net.their_pod}{n}" for n in (1, 2, 3)]
    return st.builds(Endpoint, st.sampled_from([*hosts, net.nodes[0]]), st.sampled_from((8080, 9090)))


@st.composite
def view(draw: st.DrawFn, family: Family, number: int) -> ServiceView:
    """A service port; external addresses are few, so that services meet at them."""
    net = NETS[family]
    protocol = draw(st.sampled_from(("TCP", "UDP", "SCTP")))
    every = draw(st.sets(endpoints(net), max_size=5))
    local = [one for one in every if not one.ip.startswith(net.their_pod)]
    # Hints and a terminating fallback can keep some of each out of the other set.
    cluster = draw(st.sets(st.sampled_from(sorted(every)), min_size=1)) if every else set()
    addresses = st.lists(st.sampled_from([f"{net.vip}{n}" for n in (1, 2)]), max_size=2, unique=True)
    balancers, external = draw(addresses), draw(addresses)
    node_port = draw(st.sampled_from((0, 30000 + number)))
    restricted = bool(balancers) and draw(st.booleans())
    ranges = draw(st.sets(st.sampled_from((net.allowed, net.node_range)))) if restricted else set()
    reachable = bool(balancers or external or node_port)
    port = ServicePort(
        key=ServiceKey(f"ns/s{number}:http/{protocol}/ipv{int(family)}"),
        cluster_ip=f"{net.service}{number}",
        port=draw(st.sampled_from((80, 443))),
        node_port=node_port,
        external_ips=tuple(external),
        load_balancer_ips=tuple(balancers),
        source_ranges=tuple(sorted(ranges)),
        restrict_sources=restricted,
        external_local=reachable and draw(st.booleans()),
        internal_local=draw(st.booleans()),
        affinity_seconds=draw(st.sampled_from((0, 0, 600))),
        has_endpoints=bool(every),
    )
    return ServiceView(service=port, cluster=tuple(sorted(cluster)), local=tuple(sorted(local)))


@st.composite
def world(draw: st.DrawFn) -> World:
    """A node of one family."""
    family = draw(st.sampled_from(Family))
    net = NETS[family]
    detector = draw(
        st.sampled_from(
            (
                LocalDetector(source_cidr=net.ours),
                LocalDetector(interface="pods0"),
                LocalDetector(interface_prefix="pod"),
                LocalDetector(),
            )
        )
    )
    config = FamilyConfig(
        detector=detector,
        node_ips=net.nodes[:1],
        nodeport_addresses=draw(st.sampled_from((None, net.nodes, net.nodes[:1], ()))),
        service_cidrs=draw(st.sampled_from(((), (net.services,)))),
    )
    host = HostConfig(families={family: config}, masquerade_all=draw(st.booleans()))
    drawn = [draw(view(family, number)) for number in range(1, draw(st.integers(1, 3)) + 1)]
    return World(family, host, {each.service.key: each for each in drawn}, frozenset(net.nodes))


def packets(world: World) -> Iterator[Packet]:
    """From everywhere to everything."""
    net = world.net
    sources = [
        *((f"{net.our_pod}{n}", "pods0") for n in (1, 9)),
        *((f"{net.their_pod}{n}", "eth0") for n in (1, 9)),
        *((address, "eth0") for address in net.outside),
        (net.nodes[0], ""),
    ]
    for destination, port, protocol in _destinations(world):
        for source, interface in sources:
            yield Packet(source, destination, port, protocol, interface)
        if destination.startswith(net.vip):
            # A node that has the balancer's address sends from it.
            yield Packet(destination, destination, port, protocol, "")


def _destinations(world: World) -> Iterator[tuple[str, int, str]]:
    net = world.net
    for each in world.views.values():
        port = each.service
        protocol = port.name.protocol.lower()
        frontends = [port.cluster_ip, *port.load_balancer_ips, *port.external_ips]
        yield from ((address, port.port, protocol) for address in frontends)
        yield from ((address, 81, protocol) for address in frontends)
        other = next(one.lower() for one in Protocol if one.lower() != protocol)
        yield port.cluster_ip, port.port, other
        if port.node_port:
            yield from ((address, port.node_port, protocol) for address in net.nodes)
            yield net.nodes[0], port.node_port, other
            yield port.cluster_ip, port.node_port, protocol
    yield f"{net.service}77", 80, "tcp"
    yield f"{net.their_pod}3", 8080, "tcp"
    yield net.outside[1], 443, "udp"
    yield net.nodes[0], 22, "tcp"
