"""The IPVS planner: what a service port becomes, and that differences add up to it."""

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rulecast.model import Endpoint, Family, Protocol, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.ipvs import rules
from rulecast_agent.dataplane.ipvs.planner import Absent, Change, Element, LocalAddress, Planner, Served
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.kernel.ipvs import Scheduling, VirtualServer
from rulecast_agent.kernel.nft_netlink import Value
from tests.nftables.values import HOST, endpoints, key, view

RR = Scheduling("rr")
NODE = "192.168.0.2"


def planner(family: Family = Family.IPV4, marks: Mapping[ServiceKey, int] | None = None) -> Planner:
    return Planner(family=family, host=HOST, how=RR, marks=marks)


def planned(*views: ServiceView) -> Planner:
    made = planner()
    made.change({each.service.key: each for each in views})
    return made


def by_address(made: Planner) -> dict[tuple[str, int], frozenset[Endpoint]]:
    return {(s.address, s.port): served.endpoints for s, served in made.servers.items() if not s.mark}


def marked(made: Planner) -> list[tuple[VirtualServer, Served]]:
    return [(server, served) for server, served in made.servers.items() if server.mark]


def verdict(made: Planner, name: str, address: str, port: int = 80) -> Value | Absent:
    packed = names.pack_frontend(address, Protocol.TCP, port)
    return made.elements.get((name, packed), Absent())


def some(*hosts: int) -> frozenset[Endpoint]:
    return frozenset(endpoints(*hosts))


def test_every_frontend_has_a_virtual_server() -> None:
    made = planned(
        view(key(), 1, 2, node_port=30080, external_ips=("192.0.2.9",), load_balancer_ips=("192.0.2.1",))
    )
    places = [("172.30.0.41", 80), (NODE, 30080), ("192.0.2.9", 80), ("192.0.2.1", 80)]
    assert by_address(made) == dict.fromkeys(places, some(1, 2))


CLUSTER_IP, EXTERNAL_IP = LocalAddress("172.30.0.41", False), LocalAddress("192.0.2.9", True)


def test_a_cluster_ip_is_local_and_an_external_address_only_for_its_frontends() -> None:
    made = planned(view(key(), 1, node_port=30080, external_ips=("192.0.2.9",)))
    assert made.addresses == {CLUSTER_IP, EXTERNAL_IP}
    known = {element for element in made.elements if element[0] == rules.EXTERNAL_FRONTENDS}
    packed = names.pack_frontend("192.0.2.9", Protocol.TCP, 80)
    assert known == {(rules.EXTERNAL_FRONTENDS, packed)}


def test_packets_to_an_external_address_without_endpoints_are_left_on_their_way() -> None:
    made = planned(view(key(), external_ips=("192.0.2.9",)))
    assert not [element for element in made.elements if element[0] == rules.EXTERNAL_FRONTENDS]


def test_an_address_that_services_share_stays_until_the_last_of_them_goes() -> None:
    one, two = (
        view(key(n), 1, cluster_ip=f"172.30.0.{i}", external_ips=("192.0.2.9",), node_port=0)
        for i, n in enumerate("ab")
    )
    two = view(key("b"), 1, cluster_ip="172.30.0.1", external_ips=("192.0.2.9",))
    made = planned(one, two)
    made.change({one.service.key: None})
    assert EXTERNAL_IP in made.addresses
    assert made.change({two.service.key: None}).addresses[EXTERNAL_IP] is False
    assert made.addresses == set()


def test_the_protocols_of_one_port_do_not_meet() -> None:
    made = planned(view(key(), 1), view(key(protocol="UDP"), 2))
    assert {(s.protocol, tuple(served.endpoints)) for s, served in made.servers.items()} == {
        (6, endpoints(1)),
        (17, endpoints(2)),
    }


@pytest.mark.parametrize(
    ("policies", "where", "answer"),
    [
        ({}, "172.30.0.41", rules.CLUSTER_IP),
        ({}, "192.0.2.9", rules.EXTERNAL),
        ({"internal_local": True}, "172.30.0.41", "drop"),
        ({"internal_local": True}, "192.0.2.9", rules.EXTERNAL),
        ({"external_local": True}, "172.30.0.41", rules.CLUSTER_IP),
        ({"external_local": True}, "192.0.2.9", rules.LOCAL_NONE),
    ],
)
def test_without_local_endpoints_a_local_policy_drops_where_it_applies(
    policies: dict[str, bool], where: str, answer: str
) -> None:
    made = planned(view(key(), 1, 2, external_ips=("192.0.2.9",), **policies))
    assert verdict(made, rules.SERVICES, where) == answer
    assert marked(made) == []


def test_without_any_endpoints_every_frontend_is_refused_and_none_is_a_virtual_server() -> None:
    made = planned(view(key(), node_port=30080, external_ips=("192.0.2.9",), external_local=True))
    assert made.servers == {}
    for place in (("172.30.0.41", 80), ("192.0.2.9", 80), (NODE, 30080)):
        assert verdict(made, rules.NO_ENDPOINTS, *place) == rules.REJECT
        assert verdict(made, rules.SERVICES, *place) == Absent()
    assert made.addresses == {CLUSTER_IP, EXTERNAL_IP}


def test_internal_local_serves_only_the_cluster_ip_from_this_node() -> None:
    made = planned(view(key(), 1, 2, local=(2,), internal_local=True, node_port=30080))
    assert by_address(made) == {("172.30.0.41", 80): some(2), (NODE, 30080): some(1, 2)}


def test_external_local_gives_the_outside_a_second_virtual_server_by_mark() -> None:
    made = planned(view(key(), 1, 2, local=(2,), external_local=True, node_port=30080))
    assert by_address(made) == {("172.30.0.41", 80): some(1, 2), (NODE, 30080): some(1, 2)}
    [(server, served)] = marked(made)
    assert served.endpoints == some(2)
    assert verdict(made, rules.MARKS, NODE, 30080) == rules.pack_mark(server.mark)
    assert (rules.MARK_VALUES, rules.pack_mark(server.mark)) in made.elements
    assert verdict(made, rules.SERVICES, NODE, 30080) == rules.LOCAL
    assert verdict(made, rules.MARKS, "172.30.0.41") == Absent()


def test_marks_never_touch_the_masquerade_bit_and_differ_between_families_and_services() -> None:
    four, six = planner(), planner(Family.IPV6)
    for made, family, prefix in ((four, 4, "10.180.0."), (six, 6, "fd00:10::")):
        for name in "abc":
            service = key(name, family=family)
            made.change({service: view(service, 1, local=(1,), prefix=prefix, external_local=True)})
    marks = [server.mark for made in (four, six) for server, _ in marked(made)]
    assert len(set(marks)) == 6
    assert not any(mark & 0x4000 for mark in marks)


def test_a_mark_is_kept_over_changes_and_a_restart() -> None:
    service = view(key("b"), 1, 2, local=(1,), external_local=True, node_port=30080)
    other = view(key("a"), 1, local=(1,), external_local=True, node_port=30081, cluster_ip="172.30.0.9")
    made = planned(other, service)
    before = {owner: server.mark for server, owner in made.owners().items() if server.mark}
    made.change({service.service.key: view(key("b"), 1, 2, local=(1, 2), external_local=True)})
    after = {owner: server.mark for server, owner in made.owners().items() if server.mark}
    assert after == before
    again = planner(marks=made.marks)
    again.change({each.service.key: each for each in (service, other)})
    assert {o: s.mark for s, o in again.owners().items() if s.mark} == before


def test_a_service_for_which_no_mark_is_left_is_named_and_lets_nobody_in() -> None:
    made = planner(marks={key("last"): 0xFFFE})
    service = view(key(), 1, local=(1,), external_local=True, node_port=30080)
    change = made.change({key(): service})
    assert change.errors.keys() == {key()}
    assert verdict(made, rules.SERVICES, NODE, 30080) == rules.LOCAL_NONE
    assert marked(made) == []


def test_affinity_is_persistence_for_its_seconds() -> None:
    made = planned(view(key(), 1, affinity_seconds=600))
    assert [served.how for served in made.servers.values()] == [Scheduling("rr", 600)]


def test_affinity_at_a_mark_is_a_hash_of_the_client_for_persistence_there_translates_no_ports() -> None:
    made = planned(view(key(), 1, local=(1,), external_local=True, node_port=30080, affinity_seconds=600))
    [(_, served)] = marked(made)
    assert (served.how.scheduler, served.how.persistence) == ("mh", 0)


def test_two_that_want_one_address_and_port_get_it_one_after_the_other() -> None:
    made = planned(
        view(key("a"), 1, cluster_ip="172.30.0.1", external_ips=("192.0.2.9",)),
        view(key("b"), 2, cluster_ip="172.30.0.2", external_ips=("192.0.2.9",)),
    )
    assert by_address(made)["192.0.2.9", 80] == some(1)
    made.change({key("a"): None})
    assert by_address(made)["192.0.2.9", 80] == some(2)


def test_source_ranges_guard_load_balancer_addresses_only() -> None:
    service = view(
        key(),
        1,
        load_balancer_ips=("192.0.2.1",),
        external_ips=("192.0.2.9",),
        restrict_sources=True,
        source_ranges=("192.168.0.0/24", "192.168.0.128/25"),
    )
    made = planned(service)
    chain = names.firewall_chain(("192.168.0.0/24",))
    assert made.firewalls() == {chain: ("192.168.0.0/24",)}
    assert verdict(made, rules.FIREWALL_IPS, "192.0.2.1") == chain
    assert verdict(made, rules.FIREWALL_IPS, "192.0.2.9") == Absent()
    # The node is in the range: what it sends from the address itself may come.
    packed = names.pack_frontend("192.0.2.1", Protocol.TCP, 80)
    assert (rules.FIREWALL_SELF, names.pack_address("192.0.2.1") + packed) in made.elements
    made.change({key(): None})
    assert made.firewalls() == {}


def test_ranges_of_the_other_family_only_let_nobody_in() -> None:
    made = planned(view(key(), 1, load_balancer_ips=("192.0.2.1",), restrict_sources=True))
    assert verdict(made, rules.FIREWALL_IPS, "192.0.2.1") == "drop"


def test_only_endpoints_of_this_node_may_reach_themselves() -> None:
    made = planned(view(key(), 1, 2, local=(2,)))
    [endpoint] = endpoints(2)
    held = [element for element in made.elements if element[0] == rules.HAIRPIN]
    assert held == [(rules.HAIRPIN, names.pack_hairpin(endpoint, Protocol.TCP))]


def test_one_endpoint_more_is_one_difference_a_frontend() -> None:
    made = planned(*(view(key(f"s{i}"), 1, cluster_ip=f"172.30.1.{i}") for i in range(50)))
    change = made.change({key("s7"): view(key("s7"), 1, 2, cluster_ip="172.30.1.7")})
    assert [server.address for server in change.servers] == ["172.30.1.7"]
    assert change.elements == {}
    assert change.addresses == {}


def test_node_ports_follow_the_node_s_addresses() -> None:
    made = planner(Family.IPV6)
    service = view(key(family=6), 1, prefix="fd00:10::", node_port=30080, cluster_ip="fd00:30::41")
    made.use_host(HOST, node_port_addresses=["fd00:1::1"])
    made.change({key(family=6): service})
    made.use_host(HOST, node_port_addresses=["fd00:1::2"])
    change = made.change({key(family=6): service})
    assert [(s.address, after is None) for s, (_, after) in change.servers.items()] == [
        ("fd00:1::1", True),
        ("fd00:1::2", False),
    ]


KEYS = [key(name, protocol=protocol) for name in ("a", "b", "c") for protocol in ("TCP", "UDP")]
HOSTS = st.lists(st.integers(1, 6), unique=True, max_size=5)


@st.composite
def services(draw: st.DrawFn, service: ServiceKey) -> ServiceView | None:
    if draw(st.integers(0, 5)) == 0:
        return None
    hosts = draw(HOSTS)
    restrict = draw(st.booleans())
    ranges = draw(st.sampled_from([(), ("192.168.0.0/24",), ("0.0.0.0/0",)])) if restrict else ()
    return view(
        service,
        *hosts,
        local=tuple(draw(st.lists(st.sampled_from(hosts), unique=True)) if hosts else ()),
        cluster_ip=draw(st.sampled_from(["172.30.0.1", "172.30.0.2", "172.30.0.3"])),
        node_port=draw(st.sampled_from([0, 30001, 30002])),
        external_ips=tuple(draw(st.lists(st.sampled_from(["192.0.2.1", "192.0.2.2"]), unique=True))),
        load_balancer_ips=tuple(draw(st.lists(st.sampled_from(["192.0.2.1", "192.0.2.3"]), unique=True))),
        restrict_sources=restrict,
        source_ranges=ranges,
        external_local=draw(st.booleans()),
        internal_local=draw(st.booleans()),
        affinity_seconds=draw(st.sampled_from([0, 0, 60])),
    )


ONE = st.sampled_from(KEYS).flatmap(lambda k: st.tuples(st.just(k), services(k)))
STEPS = st.lists(st.lists(ONE, min_size=1, max_size=4), min_size=1, max_size=10)


class Simulated:
    """A kernel that does what the differences say, and minds when they do not fit."""

    def __init__(self) -> None:
        self.servers: dict[VirtualServer, Served] = {}
        self.elements: dict[Element, Value] = {}
        self.addresses: set[LocalAddress] = set()

    def apply(self, change: Change) -> None:
        for server, (before, after) in change.servers.items():
            assert self.servers.get(server) == before
            if after is None:
                self.servers.pop(server, None)
            else:
                self.servers[server] = after
        for element, (old, new) in change.elements.items():
            assert self.elements.get(element, Absent()) == old
            if isinstance(new, Absent):
                self.elements.pop(element, None)
            else:
                self.elements[element] = new
        for address, there in change.addresses.items():
            (self.addresses.add if there else self.addresses.discard)(address)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_differences_add_up_to_what_is_planned_from_scratch(
    steps: list[list[tuple[ServiceKey, ServiceView | None]]],
) -> None:
    made, kernel = planner(), Simulated()
    for step in steps:
        kernel.apply(made.change(dict(step)))
    scratch = planner(marks=made.marks)
    scratch.change(made.views)
    assert (kernel.servers, kernel.elements, kernel.addresses) == (
        scratch.servers,
        scratch.elements,
        scratch.addresses,
    )
    assert made.firewalls() == scratch.firewalls()
    assert (made.servers, made.elements, made.addresses) == (
        kernel.servers,
        kernel.elements,
        kernel.addresses,
    )
    kernel.apply(made.change(dict.fromkeys(KEYS)))
    assert (kernel.servers, kernel.elements, kernel.addresses) == ({}, {}, set())
