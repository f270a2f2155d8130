"""What counts as a difference, and which are known."""

import dataclasses
from pathlib import Path

import pytest

from rulecast.lab import Answer, Reached, Verdict
from rulecast.model import Family, Protocol
from tests.conformance.cases import Case
from tests.conformance.compare import STAYS, Difference, Seen, agree, seen
from tests.conformance.known import KNOWN, contested, known
from tests.conformance.wanted import Endpoint, Port, Slice, Wanted
from tests.netns.objects import CLUSTER_IP, EXTERNAL_IP

SERVICE = Wanted(1, "LoadBalancer", (Family.IPV4,), (Port("", 80, "TCP", 8080, 0),), ingress=(("", "VIP"),))
DROPPED = Answer(Verdict.DROPPED, None)


def explained(found: Difference, service: Wanted) -> str | None:
    return known(found, service, None, "nftables")


def reached(backend: str, source: str = "192.0.2.11") -> Answer:
    return Answer(Verdict.REACHED, Reached(backend, source, 40000, 8080))


def difference(address: str, ours: Seen, theirs: Seen) -> Difference:
    return Difference(Case(1, "outside", address, 80, Protocol.TCP), ours, theirs)


A, B = reached("A"), reached("B")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([A], [B]),
        ([A], [A, B]),
        ([A], [DROPPED]),
        ([A], [A, DROPPED]),
        ([A], [reached("A", "10.244.1.100")]),
        ([DROPPED], [Answer(Verdict.REFUSED, None)]),
    ],
)
def test_other_backends_sources_and_verdicts_are_differences(
    ours: list[Answer], theirs: list[Answer]
) -> None:
    assert not agree(False, seen(ours), seen(theirs))


def test_how_often_who_answers_is_none() -> None:
    assert agree(False, seen([A, A, B]), seen([B, A]))


def test_with_affinity_each_side_stays_at_a_backend_of_its_own() -> None:
    assert agree(True, seen([A, A]), seen([B]))
    assert not agree(True, seen([A]), seen([A, B]))
    assert not agree(True, seen([A]), seen([DROPPED]))


@pytest.mark.parametrize("each", KNOWN.values(), ids=KNOWN.keys())
def test_each_known_difference_stands_in_the_document(each: object) -> None:
    rows = (Path(__file__).parents[2] / "docs" / "differences.md").read_text().splitlines()
    assert any(row.startswith(f"| {each.row}") for row in rows)  # type: ignore[attr-defined]


def test_a_vip_closed_by_ranges_of_the_other_family_is_known_and_nothing_else_of_it() -> None:
    service = dataclasses.replace(SERVICE, ranges=("2001:db8::/32",))
    vip, dropped, answered = "203.0.113.1", seen([DROPPED]), seen([A])
    assert explained(difference(vip, dropped, answered), service) == "ranges of the other family"
    assert explained(difference(vip, answered, dropped), service) is None
    assert explained(difference("10.96.0.1", dropped, answered), service) is None
    both = dataclasses.replace(service, ranges=("2001:db8::/32", "198.51.100.0/24"))
    assert explained(difference(vip, dropped, answered), both) is None
    assert explained(difference(vip, dropped, answered), SERVICE) is None


@pytest.mark.parametrize(("mode", "name"), [("iptables", "port without a service"), ("nftables", None)])
def test_some_differences_are_those_of_one_mode(mode: str, name: str | None) -> None:
    case = Case(1, "outside", "10.96.0.1", 9, Protocol.TCP)
    found = Difference(case, seen([Answer(Verdict.REFUSED, None)]), seen([DROPPED]))
    assert known(found, SERVICE, None, mode) == name


@pytest.mark.parametrize(
    ("ours", "now", "is_known"),
    [("ipvs", "ready", True), ("nftables", "ready", False), ("ipvs", "terminating", False)],
)
def test_in_ipvs_mode_a_udp_flow_may_move_when_its_service_changed(
    ours: str, now: str, is_known: bool
) -> None:
    ports = (Port("", 80, "UDP", 8080, 0),)
    before = dataclasses.replace(
        SERVICE,
        ports=ports,
        slices=(Slice(0, Family.IPV4, (Endpoint("A", "terminating"),), (("", 8080, "UDP"),)),),
    )
    after = dataclasses.replace(
        before, slices=(Slice(0, Family.IPV4, (Endpoint("A", now),), (("", 8080, "UDP"),)),)
    )
    moved = Seen(frozenset({("moved", "")}))
    found = Difference(Case(1, "outside", "10.96.0.1", 80, Protocol.UDP), moved, STAYS)
    assert (known(found, after, before, "nftables", ours=ours) is not None) is is_known


@pytest.mark.parametrize(
    ("client", "address", "is_known"),
    [("n1", "203.0.113.1", True), ("outside", "203.0.113.1", False), ("n1", "10.96.0.1", False)],
)
def test_in_ipvs_mode_a_nodes_own_packets_to_a_vip_that_is_gone_may_be_refused(
    client: str, address: str, is_known: bool
) -> None:
    case = Case(1, client, address, 80, Protocol.TCP)
    found = Difference(case, seen([Answer(Verdict.REFUSED, None)]), seen([DROPPED]))
    assert (known(found, None, SERVICE, "nftables", ours="ipvs") is not None) is is_known
    assert known(found, SERVICE, SERVICE, "nftables", ours="ipvs") is None
    assert known(found, None, SERVICE, "nftables", ours="nftables") is None


def test_in_iptables_mode_a_source_out_of_the_ranges_is_refused_only_without_endpoints() -> None:
    ranged = dataclasses.replace(SERVICE, ranges=("10.0.0.0/8",))
    found = difference("203.0.113.1", seen([DROPPED]), seen([Answer(Verdict.REFUSED, None)]))
    assert known(found, ranged, None, "iptables") == "ranges of a VIP without endpoints"
    with_endpoint = dataclasses.replace(
        ranged, slices=(Slice(0, Family.IPV4, (Endpoint("A"),), (("", 8080, "TCP"),)),)
    )
    assert known(found, with_endpoint, None, "iptables") is None


SHARING = dataclasses.replace(
    SERVICE,
    number=2,
    shared=((EXTERNAL_IP, 201),),
    slices=(Slice(0, Family.IPV4, (Endpoint("A"),), (("", 8080, "TCP"),)),),
)
OTHER = dataclasses.replace(
    SHARING, number=3, slices=(Slice(0, Family.IPV4, (Endpoint("B"),), (("", 8080, "TCP"),)),)
)


@pytest.mark.parametrize(
    ("ours", "states", "is_known"),
    [
        ("A", [[SHARING, OTHER]], True),
        ("B", [[SHARING, OTHER]], False),
        ("A", [[SHARING]], False),
        ("A", [[SHARING, OTHER], [SHARING]], True),
        ("B", [[SHARING, OTHER], [SHARING]], False),
        ("B", [[SHARING, OTHER], [OTHER]], True),
        ("B", [[SHARING, OTHER], []], False),
    ],
)
def test_at_a_shared_frontend_ours_has_to_be_the_one_that_holds_it(
    ours: str, states: list[list[Wanted]], is_known: bool
) -> None:
    found = difference("203.0.114.201", seen([reached(f"{ours}")]), seen([reached("C")]))
    assert (contested(found, states) is not None) is is_known


def test_a_cluster_ip_that_its_service_names_as_an_external_one_is_shared() -> None:
    found = Difference(
        Case(2, "outside", "10.96.0.2", 80, Protocol.TCP), seen([reached("A")]), seen([DROPPED])
    )
    assert contested(found, [[SHARING]]) is None
    assert contested(found, [[dataclasses.replace(SHARING, shared=((CLUSTER_IP, 2),))]]) is not None


@pytest.mark.parametrize(
    ("mode", "name"), [("", None), ("VIP", None), ("Proxy", "flow to a frontend that is gone")]
)
def test_a_udp_flow_that_we_alone_remove_is_known_where_the_frontend_is_gone(
    mode: str, name: str | None
) -> None:
    ports = (Port("", 80, "UDP", 8080, 0),)
    slices = (Slice(0, Family.IPV4, (Endpoint("A"),), (("", 8080, "UDP"),)),)
    service = dataclasses.replace(SERVICE, ports=ports, slices=slices, ingress=((mode, "VIP"),))
    case = Case(1, "outside", "203.0.113.1", 80, Protocol.UDP)
    assert explained(Difference(case, seen([DROPPED]), STAYS), service) == name
    assert explained(Difference(case, STAYS, seen([DROPPED])), service) is None
