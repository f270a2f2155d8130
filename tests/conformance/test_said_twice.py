"""What an endpoint that two slices name in different ways explains, and what it does not."""

import pytest

from rulecast.lab import Answer, Reached, Verdict
from rulecast.model import Family, Protocol
from tests.conformance.cases import Case
from tests.conformance.compare import STAYS, Difference, seen
from tests.conformance.said_twice import said_twice
from tests.conformance.wanted import Endpoint, Port, Slice, Wanted

DROPPED = Answer(Verdict.DROPPED, None)
CASE = Case(1, "outside", "10.96.0.1", 80, Protocol.TCP)


def service(*slices: tuple[Endpoint, ...]) -> Wanted:
    made = tuple(
        Slice(number, Family.IPV4, endpoints, (("", 8080, "TCP"),)) for number, endpoints in enumerate(slices)
    )
    return Wanted(1, "ClusterIP", (Family.IPV4,), (Port("", 80, "TCP", 8080, 0),), slices=made)


def reached(*backends: str, source: str = "192.0.2.11") -> list[Answer]:
    return [
        Answer(Verdict.REACHED, Reached(backend, source, 40000, 8080)) if backend else DROPPED
        for backend in backends
    ]


READY, UNREADY, ENDING = Endpoint("A"), Endpoint("A", "unready"), Endpoint("B", "terminating")


@pytest.mark.parametrize(
    ("slices", "ours", "theirs", "explains"),
    [
        ([(READY,), (UNREADY,)], ["A"], [""], True),
        ([(READY,), (READY,)], ["A"], [""], False),
        ([(READY,), (READY._replace(written="zeros"),)], ["A"], [""], False),
        ([(READY,), (UNREADY, Endpoint("B"))], ["A", "B"], ["B"], True),
        ([(READY,), (UNREADY, Endpoint("B"))], ["A"], ["A", "B"], False),
        ([(READY,), (UNREADY, ENDING)], ["A"], ["B"], True),
        ([(READY,), (READY._replace(said_where=False), ENDING)], ["A"], ["B"], False),
        ([(READY, Endpoint("B")), (READY._replace(zones=("za",)),)], ["A"], ["A", "B"], True),
        ([(READY,), (UNREADY, Endpoint("B"))], ["A", "B"], ["C"], False),
    ],
)
def test_only_that_endpoint_and_what_hangs_on_it_may_differ(
    slices: list[tuple[Endpoint, ...]], ours: list[str], theirs: list[str], explains: bool
) -> None:
    found = Difference(CASE, seen(reached(*ours)), seen(reached(*theirs)))
    assert said_twice(found, service(*slices), None) is explains


def test_another_source_address_is_not_explained() -> None:
    ours, theirs = (seen(reached("A", source=source)) for source in ("192.0.2.11", "198.51.100.7"))
    assert not said_twice(Difference(CASE, ours, theirs), service((READY,), (UNREADY,)), None)


def test_another_port_of_the_service_is_not_explained() -> None:
    found = Difference(CASE._replace(port=81), seen(reached("A")), seen([DROPPED]))
    assert not said_twice(found, service((READY,), (UNREADY,)), None)


def test_a_flow_may_have_been_decided_by_the_state_before() -> None:
    found = Difference(CASE, STAYS, seen([DROPPED]))
    assert said_twice(found, service((READY,)), service((READY,), (UNREADY,)))
    assert not said_twice(found, service((READY,)), service((READY,)))
