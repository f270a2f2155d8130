"""What the kernel gets, and what a new instance makes of it."""

import subprocess

import pytest

from rulecast.model import Family, ServiceKey
from rulecast_agent.dataplane.nftables import table
from rulecast_agent.dataplane.nftables.render import render_ruleset
from tests.nftables.conftest import Make, listing, nft
from tests.nftables.values import HOST, VIEWS, key, update, view

pytestmark = pytest.mark.netns


def test_everything_loads_and_reads_back_the_same(make: Make) -> None:
    dataplane = make()
    receipt = dataplane.apply(update(VIEWS, full=True), HOST)
    assert receipt.errors == {}
    assert receipt.operations > len(VIEWS)
    assert dataplane.check() is None
    assert dataplane.verify().count == 0
    for text in ("goto cluster-ip-tcp-3", "goto local-tcp-2-1", "goto nodeport-external-tcp-3", ": drop"):
        assert text in listing()


def test_nothing_is_written_before_the_first_update(make: Make) -> None:
    dataplane = make()
    assert dataplane.check() is None
    assert dataplane.retry() is None
    assert nft("list", "tables") == ""


def test_a_single_change_is_a_few_elements_and_the_same_again_none(make: Make) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    change = update({key(protocol="UDP"): view(key(protocol="UDP"), 1, 7)})
    assert dataplane.apply(change, HOST).operations == 2
    assert dataplane.apply(change, HOST).operations == 0
    assert dataplane.verify().count == 0


def test_a_new_instance_adopts_what_is_there(make: Make) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    before = listing(), listing("ip6")
    second = make()
    assert second.apply(update(VIEWS, full=True), HOST).operations == 0
    assert (listing(), listing("ip6")) == before


def test_adoption_writes_only_the_differences_and_removes_what_went(make: Make) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    less = {k: v for k, v in VIEWS.items() if k != key("lb")}
    less[key()] = view(key(), 2, 3, 4, local=(), node_port=30080)
    second = make()
    assert 0 < second.apply(update(less, full=True), HOST).operations < 30
    assert "172.30.0.43" not in listing()
    assert second.verify().count == 0


def test_the_rendered_ruleset_is_what_gets_programmed(make: Make) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    programmed = listing(), listing("ip6")
    dataplane.cleanup()
    for family in Family:
        subprocess.run(["nft", "-f", "-"], input=render_ruleset(VIEWS, HOST, family), text=True, check=True)
    rendered = listing(), listing("ip6")
    assert [sorted(text.split()) for text in rendered] == [sorted(text.split()) for text in programmed]
    assert make().apply(update(VIEWS, full=True), HOST).operations == 0


def test_very_long_names_load(make: Make) -> None:
    long = ServiceKey(f"{'n' * 63}/{'s' * 63}:{'p' * 63}/TCP/ipv4")
    receipt = make().apply(update({long: view(long, 1, affinity_seconds=60)}, full=True), HOST)
    assert receipt.errors == {}


def test_unused_chains_go_later_and_come_back_if_needed(make: Make) -> None:
    clock = [0.0]
    dataplane = make(clock=lambda: clock[0])
    dataplane.apply(update(VIEWS, full=True), HOST)
    dataplane.apply(update({key(): None}), HOST)
    assert "chain cluster-ip-tcp-3" in listing()
    clock[0] += table.UNUSED_SECONDS
    assert dataplane.check() is None
    assert "cluster-ip-tcp-3" not in listing()
    assert dataplane.apply(update({key(): VIEWS[key()]}), HOST).errors == {}
    clock[0] += table.UNUSED_SECONDS
    assert dataplane.check() is None
    assert "goto cluster-ip-tcp-3" in listing()
    assert dataplane.verify().count == 0


def test_another_host_configuration_rewrites_only_what_it_concerns(make: Make) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    families = {**HOST.families}
    changed = type(HOST)(families=families, masquerade_all=True, masquerade_mark=0x8000)
    assert dataplane.apply(update({}), changed).errors == {}
    assert "0x00008000" in listing()
    assert "0x00004000" not in listing()
    assert dataplane.verify().count == 0
