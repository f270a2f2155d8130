"""What others did to the rules is found and mended; what is theirs stays."""

import pytest

from rulecast_agent.dataplane.base import DataplaneError
from rulecast_agent.dataplane.nftables import table
from rulecast_agent.kernel.nft import NftCommand, NftRefused
from tests.nftables.conftest import Make, listing, nft
from tests.nftables.values import HOST, VIEWS, key, update, view

pytestmark = pytest.mark.netns


@pytest.mark.parametrize(
    "damage",
    [
        ("flush", "ruleset"),
        ("delete", "table", "ip", "rulecast"),
        ("flush", "chain", "ip", "rulecast", "nat-prerouting"),
        ("delete", "chain", "ip", "rulecast", "filter-input"),
        ("insert", "rule", "ip", "rulecast", "nat-output", "accept"),
        ("add", "chain", "ip", "rulecast", "stranger"),
        ("delete", "element", "ip", "rulecast", "services", "{ 172.30.0.41 . tcp . 80 }"),
        ("add", "element", "ip", "rulecast", "services", "{ 172.30.0.99 . tcp . 80 : drop }"),
        ("flush", "map", "ip", "rulecast", "endpoints-tcp"),
    ],
    ids=" ".join,
)
def test_foreign_damage_is_mended_by_the_next_check(make: Make, damage: tuple[str, ...]) -> None:
    clock = [0.0]
    dataplane = make(clock=lambda: clock[0])
    dataplane.apply(update(VIEWS, full=True), HOST)
    before = sorted(listing().split())
    nft(*damage)
    clock[0] += 31
    drift = dataplane.check()
    assert drift is not None
    assert drift.count >= 1
    assert drift.differences
    clock[0] += table.UNUSED_SECONDS
    assert dataplane.check() is None
    assert sorted(listing().split()) == before
    assert dataplane.check() is None
    assert dataplane.verify().count == 0


def test_foreign_damage_is_not_hidden_by_a_change_of_ours(make: Make) -> None:
    """The clock stands still, so that no full comparison is due."""
    dataplane = make(clock=lambda: 0.0)
    dataplane.apply(update(VIEWS, full=True), HOST)
    assert dataplane.check() is None
    before = sorted(listing().split())
    nft("flush", "chain", "ip", "rulecast", "nat-prerouting")
    dataplane.apply(update({key("lb"): None}), HOST)
    dataplane.apply(update({key("lb"): VIEWS[key("lb")]}), HOST)
    assert dataplane.check() is not None
    assert sorted(listing().split()) == before


class Spoiled(NftCommand):
    """Somebody deletes one table as soon as the other one is complete."""

    def run(self, script: str, *, check: bool = False) -> None:
        super().run(script, check=check)
        if "hook prerouting" in script and "ip6 rulecast" in script and not check:
            nft("delete", "table", "ip", "rulecast")


def test_foreign_damage_is_not_hidden_by_the_load(make: Make) -> None:
    dataplane = make(clock=lambda: 0.0, nft=Spoiled())
    dataplane.apply(update(VIEWS, full=True), HOST)
    drift = dataplane.check()
    assert drift is not None
    assert drift.differences == ["table ip rulecast is missing"]
    assert "goto cluster-ip-tcp-3" in listing()


def test_a_reload_that_fails_loses_nothing(make: Make) -> None:
    picky = Broken()
    dataplane = make(nft=picky)
    dataplane.apply(update(VIEWS, full=True), HOST)
    before = sorted(listing().split())
    nft("flush", "ruleset")
    picky.broken = True
    for _ in range(2):
        with pytest.raises(DataplaneError, match="No buffer space"):
            dataplane.check()
    picky.broken = False
    assert dataplane.check() is not None
    assert sorted(listing().split()) == before


class Broken(NftCommand):
    """Takes nothing while it is broken."""

    broken = False

    def run(self, script: str, *, check: bool = False) -> None:
        if self.broken:
            raise NftRefused("Error: No buffer space available")
        super().run(script, check=check)


def test_an_nft_that_takes_nothing_is_not_the_fault_of_each_service(make: Make) -> None:
    broken = Broken()
    dataplane = make(nft=broken)
    dataplane.apply(update({key(): VIEWS[key()]}, full=True), HOST)
    broken.broken = True
    with pytest.raises(DataplaneError, match="takes nothing"):
        dataplane.apply(update(VIEWS), HOST)
    broken.broken = False
    receipt = dataplane.retry()
    assert receipt is not None
    assert receipt.errors == {}
    assert dataplane.verify().count == 0


def test_a_foreign_change_elsewhere_is_no_drift(make: Make) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    nft("add", "table", "inet", "other")
    assert dataplane.check() is None


def test_a_change_on_top_of_unnoticed_damage_still_succeeds(make: Make) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    nft("flush", "map", "ip", "rulecast", "endpoints-udp")
    receipt = dataplane.apply(update({key(protocol="UDP"): view(key(protocol="UDP"), 5, 6, 7)}), HOST)
    assert receipt.errors == {}
    assert dataplane.verify().count == 0


def test_foreign_tables_stay_byte_identical(make: Make) -> None:
    nft("add", "table", "ip", "kube-proxy")
    nft("add", "chain", "ip", "kube-proxy", "services")
    nft("add", "table", "inet", "rulecast")
    before = nft("list", "ruleset")
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    assert nft("list", "table", "ip", "kube-proxy") in before
    assert dataplane.cleanup() is True
    assert nft("list", "ruleset") == before
    assert dataplane.cleanup() is False
