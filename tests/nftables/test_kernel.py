"""The dataplane against a real kernel, in a network namespace of its own."""

import contextlib
import re
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import DataplaneError
from rulecast_agent.dataplane.nftables import table
from rulecast_agent.dataplane.nftables.dataplane import NftablesDataplane
from rulecast_agent.dataplane.nftables.render import render_ruleset
from rulecast_agent.kernel.nft import NftCommand, NftRefused
from tests.nftables.conftest import nft
from tests.nftables.values import HOST, key, update, view

pytestmark = pytest.mark.netns
Make = Callable[..., NftablesDataplane]

V6 = key(family=6)
VIEWS: dict[ServiceKey, ServiceView] = {
    key(): view(key(), 1, 2, 3, local=(1,), node_port=30080),
    key(protocol="UDP"): view(key(protocol="UDP"), 1, 2),
    key("sctp", protocol="SCTP"): view(key("sctp", protocol="SCTP"), 1, cluster_ip="172.30.0.42"),
    key("lb"): view(
        key("lb"),
        1,
        2,
        local=(2,),
        cluster_ip="172.30.0.43",
        load_balancer_ips=("192.0.2.1",),
        external_ips=("192.0.2.9",),
        node_port=30081,
        external_local=True,
        restrict_sources=True,
        source_ranges=("192.168.0.0/24", "192.168.0.128/25", "203.0.113.0/25"),
    ),
    key("none"): view(key("none"), cluster_ip="172.30.0.44", node_port=30082),
    key("gone"): view(key("gone"), cluster_ip="172.30.0.45", internal_local=True, has_endpoints=True),
    key("sticky"): view(
        key("sticky"),
        1,
        2,
        local=(2,),
        cluster_ip="172.30.0.46",
        node_port=30083,
        external_local=True,
        affinity_seconds=600,
    ),
    V6: view(V6, 1, 2, local=(2,), cluster_ip="fd00:30::41", prefix="fd00:10::", node_port=30080),
    key("sticky", family=6): view(
        key("sticky", family=6), 1, 2, cluster_ip="fd00:30::46", prefix="fd00:10::", affinity_seconds=60
    ),
}


def listing(family: str = "ip") -> str:
    return nft("list", "table", family, "rulecast")


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


class Picky(NftCommand):
    """Refuses every script that names a word."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word
        self.runs = 0

    def run(self, script: str, *, check: bool = False) -> None:
        self.runs += 1
        if self.word and self.word in script:
            raise NftRefused(f"refused: {self.word}")
        super().run(script, check=check)


def test_one_refused_service_holds_back_no_other(make: Make) -> None:
    nft_command = Picky("bad-")
    dataplane = make(nft=nft_command)
    many = {
        key(f"n{i}"): view(key(f"n{i}"), i, affinity_seconds=9, cluster_ip=f"172.30.1.{i}") for i in range(60)
    }
    bad = key("bad-one")
    many[bad] = view(bad, 99, affinity_seconds=9, cluster_ip="172.30.2.1")
    receipt = dataplane.apply(update(many, full=True), HOST)
    assert list(receipt.errors) == [bad]
    assert "refused" in receipt.errors[bad]
    assert nft_command.runs < 40
    assert listing().count("goto affinity-cluster-ip") == 60
    assert dataplane.verify().count == 0
    again = dataplane.retry()
    assert again is not None
    assert list(again.errors) == [bad]
    nft_command.word = ""
    mended = dataplane.retry()
    assert mended is not None
    assert mended.errors == {}
    assert dataplane.retry() is None
    assert listing().count("goto affinity-cluster-ip") == 61


def test_a_refused_change_leaves_the_service_as_it_was(make: Make) -> None:
    nft_command = Picky("")
    dataplane = make(nft=nft_command)
    dataplane.apply(update(VIEWS, full=True), HOST)
    before = listing()
    nft_command.word = "cluster-ip-tcp-4"
    receipt = dataplane.apply(update({key(): view(key(), 1, 2, 3, 4, local=(1,), node_port=30080)}), HOST)
    assert list(receipt.errors) == [key()]
    assert listing() == before


def test_without_nft_the_error_is_one_clear_line(make: Make) -> None:
    dataplane = make(nft=NftCommand(command="nft-is-not-here"))
    with pytest.raises(DataplaneError, match="cannot run nft-is-not-here") as caught:
        dataplane.apply(update(VIEWS, full=True), HOST)
    assert "\n" not in str(caught.value)


def test_what_could_not_start_is_owed_to_the_next_retry(make: Make) -> None:
    nft_command = Picky("rulecast")
    dataplane = make(nft=nft_command)
    with pytest.raises(DataplaneError):
        dataplane.apply(update(VIEWS, full=True), HOST)
    nft_command.word = ""
    receipt = dataplane.retry()
    assert receipt is not None
    assert receipt.errors == {}
    assert dataplane.verify().count == 0
    assert "172.30.0.41" in listing()


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


@pytest.fixture
def local_backends(namespace: str) -> None:
    """Backends and routes inside the one namespace: traffic of the node itself."""
    for command in (
        "link set lo up",
        "addr add 192.168.0.2/32 dev lo",
        "link add out type veth peer name peer",
        "link set peer up",
        "addr add 192.168.9.1/24 dev out",
        "link set out up",
        "route add default dev out",
        *(f"addr add 10.180.0.{i}/32 dev lo" for i in (1, 2, 3)),
    ):
        subprocess.run(["ip", *command.split()], check=True)


Listen = Callable[[int], list[socket.socket]]


@pytest.fixture
def listen(local_backends: None) -> Iterator[Listen]:
    """Opens the three backends' sockets; they are closed at the end."""
    made: list[socket.socket] = []

    def build(kind: int) -> list[socket.socket]:
        for i in (1, 2, 3):
            made.append(socket.socket(socket.AF_INET, kind))
            made[-1].bind((f"10.180.0.{i}", 8080))
            if kind == socket.SOCK_STREAM:
                made[-1].listen(64)
        return made

    yield build
    for server in made:
        server.close()


def connect(address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=2):
        pass


def accepted(servers: list[socket.socket]) -> list[int]:
    counts = []
    for server in servers:
        server.setblocking(False)
        count = 0
        while True:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                break
            count += 1
        counts.append(count)
    return counts


def test_tcp_reaches_every_endpoint(make: Make, listen: Listen) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    servers = listen(socket.SOCK_STREAM)
    for _ in range(60):
        connect("172.30.0.41", 80)
    counts = accepted(servers)
    assert sum(counts) == 60
    assert min(counts) > 4


def test_udp_reaches_an_endpoint(make: Make, listen: Listen) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    servers = listen(socket.SOCK_DGRAM)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", ("172.30.0.41", 80))
    got = 0
    for server in servers:
        server.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            got += len(server.recv(10))
        server.close()
    assert got == 1


@pytest.mark.usefixtures("local_backends")
@pytest.mark.parametrize(
    ("address", "port"), [("172.30.0.44", 80), ("172.30.0.41", 81), ("192.168.0.2", 30082)]
)
def test_no_endpoints_and_wrong_ports_are_refused(make: Make, address: str, port: int) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    with pytest.raises(ConnectionRefusedError):
        connect(address, port)


def test_clients_stay_with_their_endpoint_over_changes_and_restarts(make: Make, listen: Listen) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    servers = listen(socket.SOCK_STREAM)
    for _ in range(20):
        connect("172.30.0.46", 80)
    first = accepted(servers)
    assert sorted(first) == [0, 0, 20]
    dataplane.apply(update({key(): view(key(), 1)}), HOST)
    grown = view(
        key("sticky"),
        1,
        2,
        3,
        local=(2,),
        cluster_ip="172.30.0.46",
        node_port=30083,
        external_local=True,
        affinity_seconds=300,
    )
    dataplane.apply(update({key("sticky"): grown}), HOST)
    second = make()
    second.apply(update({**VIEWS, key("sticky"): grown}, full=True), HOST)
    for _ in range(20):
        connect("172.30.0.46", 80)
    assert accepted(servers) == first
    assert re.search(r"timeout 5m\b.* expires (5m|4m)", listing()) or re.search(
        r"elements = .* expires (5m|4m5)", listing()
    )
    held = first.index(20) + 1
    without = view(key("sticky"), *({1, 2, 3} - {held}), cluster_ip="172.30.0.46", affinity_seconds=300)
    second.apply(update({key("sticky"): without}), HOST)
    for _ in range(5):
        connect("172.30.0.46", 80)
    assert accepted(servers)[held - 1] == 0
