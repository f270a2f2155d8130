"""Rules that others take away."""

from collections.abc import Iterable

import pytest

from rulecast.model import Family
from rulecast_agent.dataplane.iptables import names
from rulecast_agent.kernel.iptables import Backend
from tests.iptables.conftest import TOOLS, Make, Recording, iptables, saved
from tests.nftables.values import HOST, VIEWS, key, update, view

pytestmark = pytest.mark.netns

SEEN_AT_ONCE = {
    "nat flushed": ("-t nat -F",),
    "nat flushed and its chains deleted": ("-t nat -F", "-t nat -X"),
    "filter flushed": ("-t filter -F",),
    "a hook deleted": ("-t nat -D POSTROUTING -j RULECAST-POSTROUTING",),
    "a tree cut at its root": ("-t nat -F RULECAST-FRONTENDS",),
    "refusals cut at their root": ("-t filter -F RULECAST-UNDELIVERED",),
    "a rule put first": ("-t nat -I RULECAST-SERVICES -p tcp -j RETURN",),
}

NONE6 = key("none", family=6)
NOBODY = {NONE6: view(NONE6, cluster_ip="fd00:30::44")}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("damage", SEEN_AT_ONCE.values(), ids=SEEN_AT_ONCE.keys())
def test_it_is_seen_at_the_next_look_and_mended(
    make: Make, backend: Backend, family: Family, damage: tuple[str, ...]
) -> None:
    clock = Clock()
    dataplane = make(clock=clock)
    dataplane.apply(update(VIEWS | NOBODY, full=True), HOST)
    before = saved(backend)
    # A full read-back was had just now, so the next one would have to wait.
    dataplane.verify()
    for command in damage:
        iptables(backend, command, family)
    drift = dataplane.check()
    assert drift is not None
    assert drift.count
    assert saved(backend) == before
    assert dataplane.check() is None


def test_what_is_deep_in_the_rules_is_seen_by_the_paced_read_back(make: Make, backend: Backend) -> None:
    clock = Clock()
    dataplane = make(clock=clock)
    dataplane.apply(update(VIEWS, full=True), HOST)
    before = saved(backend)
    iptables(backend, f"-t nat -F {names.service_chain('SVC', key())}")
    clock.now += 30.0
    drift = dataplane.check()
    assert drift is not None
    assert list(drift.differences) == [f"nat {names.service_chain('SVC', key())}"]
    assert saved(backend) == before


def test_rules_of_others_are_no_drift(make: Make, backend: Backend, kernel: type[Recording]) -> None:
    clock = Clock()
    dataplane = make(clock=clock)
    dataplane.apply(update(VIEWS, full=True), HOST)
    kernel.written.clear()
    for number in range(3):
        iptables(backend, f"-t nat -A OUTPUT -p tcp --dport {number + 1} -j ACCEPT")
        iptables(backend, "-t nat -I PREROUTING -p icmp -j ACCEPT")
        clock.now += 30.0
        assert dataplane.check() is None
    assert kernel.written == []


def test_a_change_by_others_just_before_ours_is_not_taken_for_ours(make: Make, backend: Backend) -> None:
    dataplane = make(clock=Clock())
    dataplane.apply(update(VIEWS, full=True), HOST)
    dataplane.verify()
    iptables(backend, "-t filter -F RULECAST-INPUT")
    dataplane.apply(update({key(protocol="UDP"): view(key(protocol="UDP"), 7)}), HOST)
    assert dataplane.check() is not None
    assert dataplane.verify().count == 0


@pytest.mark.parametrize("backend", [Backend.NFT])
def test_a_change_by_others_between_ours_is_not_taken_for_ours(
    make: Make, backend: Backend, kernel: type[Recording]
) -> None:
    dataplane = make(clock=Clock())
    dataplane.apply(update(VIEWS, full=True), HOST)
    dataplane.verify()
    write = kernel.restore

    def restore(self: Recording, sections: Iterable[str]) -> None:
        iptables(backend, "-t filter -F RULECAST-INPUT")
        write(self, sections)

    kernel.restore = restore  # type: ignore[method-assign]
    dataplane.apply(update({key(protocol="UDP"): view(key(protocol="UDP"), 7)}), HOST)
    kernel.restore = write  # type: ignore[method-assign]
    assert dataplane.check() is not None
    assert dataplane.verify().count == 0


def test_every_family_is_looked_after(make: Make, backend: Backend) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    before = saved(backend)
    for family in TOOLS:
        for table in ("nat", "filter"):
            iptables(backend, f"-t {table} -F", family)
            iptables(backend, f"-t {table} -X", family)
    drift = dataplane.check()
    assert drift is not None
    assert drift.count > len(drift.differences)
    assert saved(backend) == before
