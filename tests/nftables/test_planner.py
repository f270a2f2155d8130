"""The planner: whatever comes in whatever order, the kernel ends up as if compiled from scratch."""

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rulecast.model import Endpoint, Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.dataplane.nftables.layout import arrange
from rulecast_agent.dataplane.nftables.planner import Plan, State
from rulecast_agent.kernel.nft_netlink import Value
from tests.nftables.values import HOST, key, view

KEYS = [key(name, protocol=protocol) for name in ("a", "b", "c") for protocol in ("TCP", "UDP")]
HOSTS = st.lists(st.integers(1, 6), unique=True, max_size=5)


@st.composite
def services(draw: st.DrawFn, service: ServiceKey) -> ServiceView | None:
    if draw(st.integers(0, 5)) == 0:
        return None
    hosts = draw(HOSTS)
    restrict = draw(st.booleans())
    return view(
        service,
        *hosts,
        local=tuple(draw(st.lists(st.sampled_from(hosts), unique=True)) if hosts else ()),
        cluster_ip=draw(st.sampled_from(["172.30.0.1", "172.30.0.2", "172.30.0.3"])),
        node_port=draw(st.sampled_from([0, 30001, 30002])),
        external_ips=tuple(draw(st.lists(st.sampled_from(["192.0.2.1", "192.0.2.2"]), unique=True))),
        load_balancer_ips=tuple(draw(st.lists(st.sampled_from(["192.0.2.1", "192.0.2.3"]), unique=True))),
        restrict_sources=restrict,
        source_ranges=tuple(draw(st.sampled_from([(), ("192.168.0.0/24",), ("0.0.0.0/0",)])))
        if restrict
        else (),
        external_local=draw(st.booleans()),
        internal_local=draw(st.booleans()),
        affinity_seconds=draw(st.sampled_from([0, 0, 60])),
    )


STEPS = st.lists(
    st.sampled_from(KEYS).flatmap(lambda k: st.tuples(st.just(k), services(k))), min_size=1, max_size=25
)


class Kernel:
    """Applies plans as the kernel does: it refuses to delete what is not there or to add what is."""

    def __init__(self) -> None:
        self.elements: dict[tuple[str, bytes], Value] = {}
        self.chains: dict[str, tuple[str, ...]] = {names.REJECT_CHAIN: ()}

    def commit(self, plan: Plan) -> None:
        for name, chain in plan.chains.items():
            self.chains[name] = chain.rules
        for set_name, packed, value in plan.deletes:
            assert self.elements.pop((set_name, packed)) == value
        for set_name, packed, value in plan.adds:
            assert (set_name, packed) not in self.elements
            assert not isinstance(value, str) or value == "drop" or value in self.chains
            self.elements[set_name, packed] = value


def desired(state: State) -> dict[tuple[str, bytes], Value]:
    return {
        (name, packed): value
        for name, elements in state.desired_elements().items()
        for packed, value in elements.items()
        if name != names.NODEPORT_IPS
    }


def slots(elements: Mapping[tuple[str, bytes], Value]) -> dict[tuple[str, bytes, bool], set[int]]:
    found: dict[tuple[str, bytes, bool], set[int]] = {}
    for name, packed in elements:
        if "endpoints-" in name:
            slot = int.from_bytes(packed[-4:], "little")
            second = slot >= names.LOCAL_OFFSET
            found.setdefault((name, packed[:-4], second), set()).add(slot - second * names.LOCAL_OFFSET)
    return found


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_any_sequence_ends_as_compiled_from_scratch(
    steps: list[tuple[ServiceKey, ServiceView | None]],
) -> None:
    state, kernel = State(family=Family.IPV4, host=HOST), Kernel()
    for service, wanted in steps:
        plan = state.plan({service: wanted})
        kernel.commit(plan)
        state.merge(plan)
        assert kernel.elements == desired(state)
    final = {service: wanted for service, wanted in dict(steps).items() if wanted is not None}
    fresh = State(family=Family.IPV4, host=HOST)
    fresh.merge(fresh.plan(final))
    assert {k: v for k, v in desired(fresh).items() if "endpoints-" not in k[0]} == {
        k: v for k, v in kernel.elements.items() if "endpoints-" not in k[0]
    }
    assert slots(kernel.elements) == slots(desired(fresh))
    for chains in slots(kernel.elements).values():
        assert chains == set(range(len(chains)))
    assert state.uses == fresh.uses
    assert state.claims == fresh.claims
    for name, chain in state.desired_chains().items():
        assert name == names.REJECT_CHAIN or kernel.chains[name] == chain.rules


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(services(KEYS[0]), min_size=1, max_size=5))
def test_a_view_that_is_there_already_needs_nothing(views: list[ServiceView | None]) -> None:
    state = State(family=Family.IPV4, host=HOST)
    for wanted in views:
        state.merge(state.plan({KEYS[0]: wanted}))
    assert state.plan({KEYS[0]: views[-1]}).operations == 0


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("abc", "abcd", "abcd"),
        ("abc", "bc", "cb"),
        ("abc", "ab", "ab"),
        ("abc", "axc", "axc"),
        ("", "ab", "ab"),
        ("ab", "", ""),
    ],
)
def test_endpoints_keep_their_slots(before: str, after: str, expected: str) -> None:
    def many(text: str) -> list[Endpoint]:
        return [Endpoint(letter, 1) for letter in text]

    assert list(arrange(many(before), many(after))) == many(expected)


def test_one_endpoint_replaced_is_one_slot() -> None:
    state = State(family=Family.IPV4, host=HOST)
    state.merge(state.plan({key(): view(key(), 1, 2, 3)}))
    plan = state.plan({key(): view(key(), 1, 3, 9)})
    assert (len(plan.deletes), len(plan.adds), plan.chains) == (1, 1, {})


def test_a_lost_address_comes_back_when_its_holder_goes() -> None:
    state = State(family=Family.IPV4, host=HOST)
    hijacker = view(key("a"), 1, cluster_ip="172.30.0.9", external_ips=("172.30.0.41",))
    state.merge(state.plan({key("a"): hijacker}))
    state.merge(state.plan({key("web"): view(key("web"), 2)}))
    assert [f.address for f in state.layouts[key("a")].frontends] == ["172.30.0.9"]
    state.merge(state.plan({key("web"): None}))
    assert [f.address for f in state.layouts[key("a")].frontends] == ["172.30.0.9", "172.30.0.41"]


def test_more_endpoints_than_slots_are_cut_off() -> None:
    many = [Endpoint(f"10.{i >> 16}.{(i >> 8) & 255}.{i & 255}", 1) for i in range(names.LOCAL_OFFSET + 5)]
    assert arrange((), many) == tuple(many[: names.LOCAL_OFFSET])
