"""What the kernel gets, and what a new instance makes of it."""

from pathlib import Path

import msgspec
import pytest

from rulecast.model import ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.iptables import family, names
from rulecast_agent.dataplane.iptables.dataplane import IptablesDataplane
from rulecast_agent.dataplane.iptables.host_rules import HOOKS
from rulecast_agent.kernel.iptables import Backend, detect
from tests.iptables.conftest import KilledError, Make, Recording, iptables, saved
from tests.nftables.values import HOST, VIEWS, key, update, view

pytestmark = pytest.mark.netns


def many(count: int, *hosts: int) -> dict[ServiceKey, ServiceView]:
    return {
        key(f"n{i}"): view(key(f"n{i}"), *hosts, cluster_ip=f"172.30.{i >> 8}.{i & 255}", node_port=31000 + i)
        for i in range(count)
    }


def test_everything_loads_and_reads_back_the_same(make: Make) -> None:
    dataplane = make()
    receipt = dataplane.apply(update(VIEWS, full=True), HOST)
    assert receipt.errors == {}
    assert receipt.operations > len(VIEWS)
    assert dataplane.check() is None
    assert dataplane.verify().count == 0


def test_nothing_is_written_before_the_first_update(make: Make, kernel: type[Recording]) -> None:
    dataplane = make()
    dataplane.probe()
    assert dataplane.check() is None
    assert dataplane.retry() is None
    assert kernel.written == []


def test_a_load_in_small_transactions_is_hooked_in_when_all_is_there(
    make: Make, kernel: type[Recording], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(family._LIMIT, backend, 20)
    services = many(300, 1, 2) | many(20)
    dataplane = make()
    assert dataplane.apply(update(services, full=True), HOST).errors == {}
    hooking = [number for number, section in enumerate(kernel.written) if "\n-I " in section]
    assert len(kernel.written) > 50
    # Two tables of the first family, two of the second, each pair after all else of its family.
    first, second, third, fourth = hooking
    assert (first + 1, third + 1) == (second, fourth)
    assert fourth == len(kernel.written) - 1
    assert dataplane.verify().count == 0


@pytest.mark.parametrize("part", [0.2, 0.8])
@pytest.mark.parametrize("before", [{}, VIEWS | many(80, 1, 2)], ids=["load", "large change"])
def test_what_a_killed_agent_left_half_done_is_finished_by_the_next(
    make: Make,
    kernel: type[Recording],
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    part: float,
    before: dict[ServiceKey, ServiceView],
) -> None:
    monkeypatch.setitem(family._LIMIT, backend, 40)
    monkeypatch.setattr(family, "_SMALL", 100)
    after = VIEWS | many(250, 1)

    def begin() -> IptablesDataplane:
        dataplane = make()
        if before:
            dataplane.apply(update(before, full=True), HOST)
        kernel.written.clear()
        return dataplane

    begin().apply(update(after, full=True), HOST)
    whole, sections = saved(backend), len(kernel.written)
    make().cleanup()
    dataplane = begin()
    kernel.killed_after = int(sections * part)
    with pytest.raises(KilledError):
        dataplane.apply(update(after, full=True), HOST)
    kernel.killed_after = -1
    make().apply(update(after, full=True), HOST)
    assert saved(backend) == whole


def test_a_change_of_endpoints_writes_the_services_chain_alone(make: Make, kernel: type[Recording]) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS | many(50, 1), full=True), HOST)
    kernel.written.clear()
    change = update({key(protocol="UDP"): view(key(protocol="UDP"), 1, 7)})
    dataplane.apply(change, HOST)
    (section,) = kernel.written
    assert [line for line in section.splitlines() if line[0] == ":"] == [
        f":{names.service_chain('SVC', key(protocol='UDP'))} - [0:0]"
    ]
    assert dataplane.apply(change, HOST).operations == 0
    assert dataplane.verify().count == 0


def test_a_change_in_a_service_of_a_thousand_endpoints_is_about_a_hundred_rules(
    make: Make, kernel: type[Recording]
) -> None:
    dataplane = make()
    large = view(key("large"), *range(1, 250), cluster_ip="172.30.9.9")
    others = view(key("large"), *range(1, 250), prefix="10.181.0.").cluster
    large = msgspec.structs.replace(large, cluster=tuple(sorted((*large.cluster, *others))))
    dataplane.apply(update({key("large"): large}, full=True), HOST)
    kernel.written.clear()
    dataplane.apply(update({key("large"): msgspec.structs.replace(large, cluster=large.cluster[1:])}), HOST)
    assert "".join(kernel.written).count("\n-A ") < 100
    assert dataplane.verify().count == 0


def test_what_went_leaves_nothing(make: Make, backend: Backend) -> None:
    dataplane = make()
    dataplane.apply(update({}, full=True), HOST)
    empty = saved(backend)
    dataplane.apply(update(VIEWS | many(100, 1, 2)), HOST)
    assert len(saved(backend)) > len(empty) + 300
    dataplane.apply(update({}, full=True), HOST)
    assert saved(backend) == empty


def test_changes_end_where_a_load_of_the_same_ends(make: Make, backend: Backend) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS | many(200, 1, 2), full=True), HOST)
    dataplane.apply(update(dict.fromkeys(many(150))), HOST)
    dataplane.apply(update(many(60, 3)), HOST)
    changed = saved(backend)
    assert dataplane.cleanup()
    make().apply(update(VIEWS | many(200, 1, 2) | dict.fromkeys(many(150)) | many(60, 3), full=True), HOST)
    assert saved(backend) == changed


def test_a_new_instance_adopts_what_is_there(make: Make, backend: Backend, kernel: type[Recording]) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    before = saved(backend)
    kernel.written.clear()
    assert make().apply(update(VIEWS, full=True), HOST).operations == 0
    assert kernel.written == []
    assert saved(backend) == before


def test_adoption_writes_only_the_differences_and_removes_what_went(
    make: Make, kernel: type[Recording]
) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    less = {k: v for k, v in VIEWS.items() if k != key("lb")}
    less[key()] = view(key(), 2, 3, 4, node_port=30080)
    kernel.written.clear()
    second = make()
    second.apply(update(less, full=True), HOST)
    assert f":{names.service_chain('SVC', key('sticky'))} " not in "".join(kernel.written)
    assert second.verify().count == 0


@pytest.mark.parametrize("changed", ["nodeport_addresses", "node_ips", "detector"])
def test_another_host_configuration_is_followed(make: Make, backend: Backend, changed: str) -> None:
    first, last = HOST.families[4], HOST.families[6]  # type: ignore[index]
    other = msgspec.structs.replace(
        first,
        **{  # type: ignore[arg-type]
            changed: {
                "nodeport_addresses": ("192.168.0.3",),
                "node_ips": ("198.51.100.1",),
                "detector": msgspec.structs.replace(first.detector, source_cidr="10.1.0.0/16"),
            }[changed]
        },
    )
    host = msgspec.structs.replace(HOST, families=dict(zip(HOST.families, (other, last), strict=True)))
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    before = saved(backend)
    dataplane.apply(update({}), host)
    after = saved(backend)
    assert after != before
    assert dataplane.verify().count == 0
    dataplane.cleanup()
    make().apply(update(VIEWS, full=True), host)
    assert saved(backend) == after


def test_cleanup_leaves_what_others_have_and_takes_all_of_ours(make: Make, backend: Backend) -> None:
    iptables(backend, "-t nat -N RULECASTLIKE")
    iptables(backend, "-t nat -A PREROUTING -p tcp -m tcp --dport 1 -j RULECASTLIKE")
    make().apply(update({}, full=True), HOST)
    dataplane = make()
    assert dataplane.cleanup()
    assert not dataplane.cleanup()
    left = [line for line in saved(backend) if "RULECAST" in line]
    assert left == [
        "4 nat :RULECASTLIKE -",
        "4 nat -A PREROUTING -p tcp -m tcp --dport 1 -j RULECASTLIKE",
    ]


def test_every_hook_is_there_once(make: Make, backend: Backend) -> None:
    for _ in range(2):
        make().apply(update(VIEWS, full=True), HOST)
    lines = saved(backend)
    for family_number in (4, 6):
        for table, hooks in HOOKS.items():
            for chain, rule in hooks.items():
                assert lines.count(f"{family_number} {table} -A {chain} {rule}") == 1


def legacy_tables() -> str:
    path = Path("/proc/thread-self/net/ip_tables_names")
    return path.read_text() if path.exists() else ""


@pytest.mark.usefixtures("namespace")
class TestTheOtherBackend:
    def test_looking_at_it_does_not_make_its_tables(self) -> None:
        """A legacy table that exists stands in the way of each packet, and iptables-nft warns of it."""
        dataplane = IptablesDataplane(backend=Backend.NFT)
        assert not dataplane.cleanup()
        assert not dataplane.leftovers()
        assert detect(ours=names.PREFIX) is Backend.NFT
        assert legacy_tables() == ""

    @pytest.mark.parametrize("backend", list(Backend))
    def test_what_is_left_in_it_goes(self, backend: Backend) -> None:
        dataplane = IptablesDataplane(backend=backend)
        dataplane.apply(update(VIEWS, full=True), HOST)
        dataplane.close()
        (other,) = (each for each in Backend if each is not backend)
        assert not IptablesDataplane(backend=backend).leftovers()
        assert IptablesDataplane(backend=other).leftovers()
        assert [line for line in saved(backend) if names.PREFIX in line] == []


@pytest.mark.usefixtures("namespace")
class TestDetection:
    def test_with_nothing_there_it_is_nft(self) -> None:
        assert detect(ours=names.PREFIX) is Backend.NFT

    @pytest.mark.parametrize("backend", list(Backend))
    def test_it_is_where_others_have_more_rules(self, backend: Backend) -> None:
        iptables(backend, "-t filter -A FORWARD -p tcp -j ACCEPT")
        assert detect(ours=names.PREFIX) is backend

    @pytest.mark.parametrize("backend", list(Backend))
    def test_kubelets_hint_decides(self, backend: Backend) -> None:
        """KEP-3178."""
        (other,) = (each for each in Backend if each is not backend)
        iptables(other, "-t filter -A FORWARD -p tcp -j ACCEPT")
        iptables(backend, "-t mangle -N KUBE-IPTABLES-HINT")
        assert detect(ours=names.PREFIX) is backend

    def test_our_own_rules_do_not_count(self) -> None:
        dataplane = IptablesDataplane(backend=Backend.NFT)
        dataplane.apply(update(VIEWS, full=True), HOST)
        dataplane.close()
        iptables(Backend.LEGACY, "-t filter -A FORWARD -p tcp -j ACCEPT")
        assert detect(ours=names.PREFIX) is Backend.LEGACY
