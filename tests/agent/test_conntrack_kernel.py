"""Stale UDP flows go from the real kernel, and no other flow does."""

import resource
import subprocess
from ipaddress import ip_address

import pytest

from rulecast.model import Family
from rulecast_agent.kernel import ctnetlink
from rulecast_agent.kernel.ctnetlink import remove_stale
from rulecast_agent.kernel.udp_flows import Frontend, Targets
from tests.agent.flows import Flow, add, flow, listed
from tests.agent.udp import A, B, C, frontend, packed

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("namespace")]
NODE_PORTS = {
    Family.IPV4: [ip_address("192.0.2.11").packed],
    Family.IPV6: [ip_address("2001:db8::11").packed],
}
SERVING = frozenset([packed(A)])
STAT: Targets = {
    frontend("10.96.0.30:8125"): SERVING,
    frontend("198.51.100.30:8125"): SERVING,
    frontend("203.0.113.11:8125"): SERVING,
    frontend("30125"): SERVING,
}
MANY: Targets = {**STAT, **{frontend(f"10.96.1.{number}:53"): SERVING for number in range(10)}}


@pytest.fixture(params=[STAT, MANY], ids=["asked for one by one", "out of all UDP flows"])
def targets(request: pytest.FixtureRequest) -> Targets:
    chosen: Targets = request.param
    assert (len(chosen) > ctnetlink._FILTERED_DUMPS) is (chosen is MANY)
    return chosen


def run(targets: Targets, *flows: Flow, family: str = "ipv4") -> set[Flow]:
    """Which of the flows are removed."""
    add(flows)
    assert listed(family) == set(flows)
    removed = remove_stale(targets, NODE_PORTS)
    gone = set(flows) - listed(family)
    assert removed.deleted == len(gone)
    return gone


@pytest.mark.parametrize(
    "destination", ["10.96.0.30:8125", "198.51.100.30:8125", "203.0.113.11:8125", "192.0.2.11:30125"]
)
def test_flows_to_every_kind_of_frontend(targets: Targets, destination: str) -> None:
    kept = flow(destination, A)
    stale = [
        flow(destination, C, client_port=2000),
        flow(destination, B, client_port=2001),
        flow(destination, "10.240.0.4:8080", client_port=2002),
        flow(destination, destination, client_port=2003),
    ]
    assert run(targets, kept, *stale) == set(stale)


def test_flows_that_are_not_to_a_frontend_stay(targets: Targets) -> None:
    # No two may have the same tuple of replies.
    foreign = [
        flow("10.96.0.30:8126", C, client_port=1),
        flow("10.96.0.99:8125", C, client_port=2),
        flow("192.0.2.12:30125", C, client_port=3),
        flow("192.0.2.12:8472", "192.0.2.12:8472", client_port=4),
        flow("192.0.2.11:8125", C, client_port=5),
        flow("10.96.0.30:8125", C, protocol="tcp"),
        flow("10.96.0.30:8125", C, protocol="sctp"),
    ]
    assert run(targets, *foreign) == set()


def test_flows_of_a_service_that_is_gone_all_go() -> None:
    flows = [flow("10.96.0.30:8125", backend, client_port=port) for port, backend in enumerate((A, B, C), 1)]
    assert run({frontend("10.96.0.30:8125"): None}, *flows) == set(flows)


def test_without_endpoints_only_translated_flows_go() -> None:
    translated = flow("10.96.0.30:8125", A)
    untranslated = flow("10.96.0.30:8125", "10.96.0.30:8125", client_port=2)
    assert run({frontend("10.96.0.30:8125"): frozenset()}, translated, untranslated) == {translated}


@pytest.mark.parametrize("destination", ["fd00:96::30:8125", "2001:db8::11:30125"])
@pytest.mark.parametrize("extra", [0, 10])
def test_ipv6(destination: str, extra: int) -> None:
    serving = frozenset([packed("2001:db8:1::4:9090")])
    node_port = Frontend(Family.IPV6, packed("30125"))
    targets = {frontend("fd00:96::30:8125"): serving, node_port: serving}
    targets |= {frontend(f"fd00:96::{number:x}:53"): serving for number in range(extra)}
    kept = [flow(destination, "2001:db8:1::4:9090"), flow("fd00:96::31:8125", "2001:db8:1::5:9090")]
    stale = flow(destination, "2001:db8:1::5:9090", client_port=2)
    assert run(targets, *kept, stale, family="ipv6") == {stale}


def test_flows_in_a_conntrack_zone_are_found_by_walking_their_attributes() -> None:
    insert = ["conntrack", "-I", "-p", "udp", "-t", "300", "--orig-zone", "5"]
    insert += ["-s", "10.9.0.1", "-d", "10.96.0.30", "--sport", "7", "--dport", "8125"]
    insert += ["-r", "10.240.2.6", "-q", "10.9.0.1", "--reply-port-src", "9090", "--reply-port-dst", "7"]
    subprocess.run(insert, check=True, capture_output=True)
    assert len(listed()) == 1
    assert remove_stale(STAT, NODE_PORTS).deleted == 1
    assert listed() == set()


def test_a_big_table_is_cleaned_without_holding_it() -> None:
    count = 60_000
    add(
        Flow(
            "10.96.0.30",
            8125,
            ("10.240.0.4", "10.240.2.6")[number & 1],
            9090,
            1024 + number % 50_000,
            "udp",
            f"10.9.{number // 50_000}.1",
        )
        for number in range(count)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    removed = remove_stale({frontend("10.96.0.30:8125"): SERVING}, NODE_PORTS)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert removed.deleted == count // 2
    assert grown < 16 * 1024  # KiB; the dump alone is some 12 MB on the wire, and far more as objects
    assert remove_stale({frontend("10.96.0.30:8125"): SERVING}, NODE_PORTS).deleted == 0
