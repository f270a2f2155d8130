"""The table beside IPVS: loads for every host, in a constant number of rules, and takes every element."""

import json
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from rulecast.model import Family
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector
from rulecast_agent.dataplane.ipvs import rules
from rulecast_agent.dataplane.ipvs.packets import PacketTable, differences
from rulecast_agent.dataplane.ipvs.planner import Element, Planner
from rulecast_agent.dataplane.nftables.names import WORD
from rulecast_agent.kernel.ipvs import Scheduling
from rulecast_agent.kernel.nft import NftCommand
from rulecast_agent.kernel.nft_netlink import NftSocket, Value
from tests.nftables.values import HOST, VIEWS, key, view

pytestmark = pytest.mark.netns

FAMILIES = pytest.mark.parametrize("family", list(Family), ids=lambda family: f"ipv{int(family)}")
CIDR = {Family.IPV4: "10.0.0.0/8", Family.IPV6: "fd00:10::/64"}
SERVICES = {Family.IPV4: "172.30.0.0/16", Family.IPV6: "fd00:30::/112"}


def table(family: Family, socket: NftSocket) -> PacketTable:
    return PacketTable(family=family, socket=socket, nft=NftCommand(), route_mark=0x2000)


@pytest.fixture
def socket(namespace: str) -> Iterator[NftSocket]:
    made = NftSocket()
    yield made
    made.close()


def objects(family: Family) -> dict[str, int]:
    listing = subprocess.run(
        ["nft", "-j", "list", "table", WORD[family], rules.TABLE], check=True, capture_output=True
    ).stdout
    kinds = [next(iter(each)) for each in json.loads(listing)["nftables"]]
    return {kind: kinds.count(kind) for kind in ("chain", "rule", "set", "map")}


def of_family(family: Family) -> Planner:
    planner = Planner(family=family, host=HOST, how=Scheduling("rr"))
    planner.use_host(HOST, node_port_addresses=["fd00:1::1"])
    ending = f"/ipv{int(family)}"
    planner.change({service: each for service, each in VIEWS.items() if service.endswith(ending)})
    return planner


def fill(packets: PacketTable, planner: Planner) -> dict[Element, Value]:
    packets.program(HOST, planner.firewalls())
    packets.write(differences({}, planner.elements))
    return packets.elements()


@FAMILIES
@pytest.mark.parametrize(
    "detector",
    [
        {},
        {"source_cidr": True},
        {"interface": "cni0"},
        {"interface_prefix": "veth"},
    ],
    ids=["no detector", "cidr", "interface", "prefix"],
)
@pytest.mark.parametrize("masquerade_all", [False, True], ids=["", "masquerade-all"])
def test_loads_for_every_way_to_tell_pods(
    socket: NftSocket, family: Family, detector: dict[str, str | bool], masquerade_all: bool
) -> None:
    told = {name: CIDR[family] if value is True else str(value) for name, value in detector.items()}
    config = FamilyConfig(detector=LocalDetector(**told), service_cidrs=(SERVICES[family],))
    host = HostConfig(families={family: config}, masquerade_all=masquerade_all, masquerade_mark=0x8000)
    packets = table(family, socket)
    assert packets.program(host, {}) is True
    assert packets.program(host, {}) is False
    assert packets.program(msgspec.structs.replace(host, masquerade_mark=0x4000), {}) is True


@FAMILIES
def test_every_element_comes_back_as_it_was_written(socket: NftSocket, family: Family) -> None:
    planner = of_family(family)
    assert fill(table(family, socket), planner) == planner.elements


def test_the_number_of_rules_does_not_grow_with_services(socket: NftSocket) -> None:
    packets, planner = table(Family.IPV4, socket), of_family(Family.IPV4)
    fill(packets, planner)
    few = objects(Family.IPV4)
    services = [
        view(
            key(f"more{i}"),
            1,
            local=(1,),
            cluster_ip=f"172.30.9.{i}",
            node_port=31000 + i,
            external_local=True,
        )
        for i in range(200)
    ]
    change = planner.change({each.service.key: each for each in services})
    packets.write(change.elements)
    assert packets.elements() == planner.elements
    assert objects(Family.IPV4) == few


def test_changes_leave_nothing_behind(socket: NftSocket) -> None:
    packets, planner = table(Family.IPV4, socket), of_family(Family.IPV4)
    fill(packets, planner)
    packets.write(planner.change(dict.fromkeys(list(planner.views))).elements)
    assert packets.elements() == {}


def test_source_ranges_that_come_later_get_a_chain(socket: NftSocket) -> None:
    packets, planner = table(Family.IPV4, socket), of_family(Family.IPV4)
    fill(packets, planner)
    late = view(
        key("late"),
        1,
        cluster_ip="172.30.9.1",
        load_balancer_ips=("192.0.2.77",),
        restrict_sources=True,
        source_ranges=("198.51.100.0/24",),
    )
    change = planner.change({late.service.key: late})
    packets.add_firewalls(planner.firewalls())
    packets.write(change.elements)
    assert packets.elements() == planner.elements
    assert packets.program(HOST, planner.firewalls()) is False


@pytest.mark.parametrize("damage", ["flush chain ip {} postrouting", "delete chain ip {} postrouting"])
def test_rules_that_someone_took_away_are_told_and_come_back(socket: NftSocket, damage: str) -> None:
    packets, planner = table(Family.IPV4, socket), of_family(Family.IPV4)
    before = fill(packets, planner)
    if damage.startswith("delete"):
        NftCommand().run(f"flush chain ip {rules.TABLE} postrouting")
    NftCommand().run(damage.format(rules.TABLE))
    assert packets.program(HOST, planner.firewalls()) is True
    assert packets.program(HOST, planner.firewalls()) is False
    assert packets.elements() == before
