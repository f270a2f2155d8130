"""Which UDP flows are stale, decided without a kernel."""

from collections.abc import Mapping

import pytest

from rulecast.model import ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.kernel.udp_flows import Frontend, UdpServices, is_stale
from tests.agent.udp import ALL, STAT, A, B, C, frontend, packed, stat
from tests.agent.values import key, view


def dirty(*steps: Mapping[ServiceKey, ServiceView | None]) -> set[Frontend]:
    """The frontends to look at after the last step, all before it being clean."""
    services = UdpServices()
    for step in steps:
        services.take()
        services.settled(step)
    return set(services.take())


@pytest.mark.parametrize(
    ("backend", "backends", "stale"),
    [
        (A, [A, B], False),
        (C, [A, B], True),
        ("10.240.0.4:8080", [A], True),
        ("10.96.0.30:8125", [A], True),
        ("10.96.0.30:8125", [], False),
        (A, [], True),
        (A, None, True),
        ("10.96.0.30:8125", None, True),
    ],
    ids=[
        "to a serving endpoint",
        "to one that is gone",
        "to the right address but an old port",
        "never translated, and there is an endpoint",
        "never translated, and there is none",
        "translated, of a service that lost its last endpoint",
        "translated, of a service that is gone",
        "never translated, of a service that is gone",
    ],
)
def test_a_flow_to_a_frontend(backend: str, backends: list[str] | None, stale: bool) -> None:
    valid = None if backends is None else frozenset(map(packed, backends))
    assert is_stale(destination=packed("10.96.0.30:8125"), backend=packed(backend), backends=valid) is stale


def test_every_kind_of_frontend_is_looked_at_with_everyone_who_may_serve() -> None:
    services = UdpServices()
    assert services.settled({STAT: stat(A, serving=(A, B), local=(C,), internal_local=True)})
    assert services.take() == dict.fromkeys(ALL, frozenset(map(packed, (A, B, C))))


def test_ipv6_is_its_own() -> None:
    service = key("stat", protocol="UDP", family=6)
    services = UdpServices()
    services.settled({service: view(service, "2001:db8::4:53", cluster_ip="fd00::1", port=53)})
    assert services.take() == {frontend("fd00::1:53"): frozenset([packed("2001:db8::4:53")])}


@pytest.mark.parametrize("protocol", ["TCP", "SCTP"])
def test_other_protocols_are_never_looked_at(protocol: str) -> None:
    service = key("stat", protocol=protocol)
    assert dirty({service: stat(A, service=service)}, {service: None}) == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (stat(A), stat(B)),
        (stat(A, B), stat(B)),
        (stat(A), stat()),
        (stat(), stat(A)),
        (stat(serving=(A,), has_endpoints=False), stat(A)),
        (stat(A), None),
    ],
    ids=[
        "endpoint replaced",
        "endpoint gone",
        "last endpoint gone",
        "first endpoint",
        "the only endpoint becomes ready",
        "service gone",
    ],
)
def test_a_change_that_can_leave_flows_stale_makes_every_frontend_due(
    before: ServiceView, after: ServiceView | None
) -> None:
    assert dirty({STAT: before}, {STAT: after}) == ALL


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (stat(A), stat(A)),
        (stat(A), stat(A, B)),
        (stat(A, B), stat(A, serving=(A, B))),
        (stat(), stat(serving=(A,), has_endpoints=False)),
        (stat(A), stat(A, affinity_seconds=10)),
    ],
    ids=[
        "nothing",
        "one more endpoint",
        "an endpoint that stays serving goes out of use",
        "an endpoint that is not usable yet",
        "another policy",
    ],
)
def test_a_change_that_leaves_no_flow_stale_costs_nothing(before: ServiceView, after: ServiceView) -> None:
    assert dirty({STAT: before}, {STAT: after}) == set()


def test_only_the_frontend_that_changed_is_due() -> None:
    moved = stat(A, load_balancer_ips=("203.0.113.12",))
    assert dirty({STAT: stat(A)}, {STAT: moved}) == {
        frontend("203.0.113.11:8125"),
        frontend("203.0.113.12:8125"),
    }


def test_a_port_that_turns_from_udp_to_tcp_leaves_udp_without_an_owner() -> None:
    tcp = key("stat", protocol="TCP")
    services = UdpServices()
    services.settled({STAT: stat(A)})
    services.take()
    services.settled({STAT: None, tcp: stat(A, service=tcp)})
    assert services.take() == dict.fromkeys(ALL)


@pytest.mark.parametrize("old_first", [True, False])
def test_a_frontend_that_moves_to_another_service_is_judged_by_the_new_one(old_first: bool) -> None:
    other = key("other", protocol="UDP")
    changes = {STAT: None, other: stat(B, service=other)}
    if not old_first:
        changes = dict(reversed(changes.items()))
    services = UdpServices()
    services.settled({STAT: stat(A)})
    services.take()
    services.settled(changes)
    assert services.take() == dict.fromkeys(ALL, frozenset([packed(B)]))


def test_what_could_not_be_done_is_due_again_with_what_holds_by_then() -> None:
    services = UdpServices()
    services.settled({STAT: stat(A)})
    services.take()
    services.settled({STAT: stat(B)})
    failed = services.take()
    services.settled({STAT: stat(B, C)})
    services.put_back(failed)
    assert services.take() == dict.fromkeys(ALL, frozenset(map(packed, (B, C))))
