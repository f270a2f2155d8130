"""The same objects under other agent configurations: what a flag changes, and what it must not."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from rulecast.model import Family, Protocol
from tests.netns.cluster import CLUSTER_CIDR, Cluster
from tests.netns.expect import (
    DROPPED,
    LOCALHOST,
    NODE,
    OUTSIDE,
    POD,
    REFUSED,
    REMOTE_POD,
    Expected,
    Row,
    judge,
    keeps,
    masquerades,
)
from tests.netns.objects import BOTH, CLUSTER_IP, EXTERNAL_IP, NODE_PORT, VIP
from tests.netns.world import BY_NAME, V4, V6

_WITH_DETECTOR = ("--cluster-cidr", CLUSTER_CIDR)
_SECOND = {V4: "192.0.3.11", V6: "2001:db8:3::11"}


@dataclass(frozen=True)
class Variant:
    """Flags of n1's agent, and the rows that hold under them."""

    name: str
    flags: tuple[str, ...]
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return self.name


def second(number: str, expected_v4: Expected, expected_v6: Expected) -> tuple[Row, ...]:
    """Outside to the node port on the node's second addresses."""
    return tuple(
        Row(number, "plain", OUTSIDE, NODE_PORT, expected, address=_SECOND[families], families=families)
        for families, expected in ((V4, expected_v4), (V6, expected_v6))
    )


def localhost(number: str) -> tuple[Row, ...]:
    """The node to its own node port on the loopback addresses: refused, whatever the flags."""
    return tuple(
        Row(number, "plain", LOCALHOST, NODE_PORT, REFUSED, address=address, families=families)
        for families, address in ((V4, "127.0.0.1"), (V6, "::1"))
    )


_HOST = keeps("n1:30001")
"""What listens on the host itself answers: the node port does not exist there."""
_SERVICE = masquerades("A", "B")
_MAIN = Row("62", "plain", OUTSIDE, NODE_PORT, _SERVICE)

VARIANTS = [
    Variant(
        "no detector",
        (),
        (
            Row("120", "plain", NODE, CLUSTER_IP, keeps("A", "B")),
            Row("120", "etp-local", NODE, CLUSTER_IP, keeps("A", "B")),
            Row("121", "plain", OUTSIDE, CLUSTER_IP, keeps("A", "B")),
            Row("121", "etp-local", OUTSIDE, CLUSTER_IP, keeps("A", "B")),
            Row("122", "itp-local", NODE, CLUSTER_IP, keeps("A")),
            Row("123", "itp-local", OUTSIDE, CLUSTER_IP, keeps("A")),
            Row("124", "etp-local", POD, NODE_PORT, keeps("A")),
            Row("125", "etp-local", POD, VIP, keeps("A")),
            Row("125", "etp-local", POD, EXTERNAL_IP, keeps("A")),
            Row("3.2", "etp-local", NODE, VIP, masquerades("A", "B")),
            Row("3.2", "etp-remote", POD, VIP, DROPPED),
            Row("126", "plain", POD, NODE_PORT, masquerades("A", "B")),
            Row("126", "plain", POD, VIP, masquerades("A", "B")),
            Row("126", "itp-local", POD, VIP, masquerades("A", "B")),
            Row("126", "itp-local", POD, NODE_PORT, masquerades("A", "B")),
            Row("90", "plain", POD, CLUSTER_IP, keeps("A", "B")),
            Row("20", "self", "A", CLUSTER_IP, masquerades("A")),
        ),
    ),
    Variant(
        "masquerade all",
        (*_WITH_DETECTOR, "--masquerade-all"),
        (
            Row("127", "plain", POD, CLUSTER_IP, masquerades("A", "B")),
            Row("128", "etp-local", POD, CLUSTER_IP, masquerades("A", "B")),
            Row("129", "itp-local", POD, CLUSTER_IP, masquerades("A")),
            Row("130", "etp-local", OUTSIDE, NODE_PORT, keeps("A")),
            Row("130", "etp-local", POD, NODE_PORT, keeps("A", "B")),
        ),
    ),
    Variant(
        "masquerade all and no detector",
        ("--masquerade-all",),
        (
            Row("131", "plain", POD, CLUSTER_IP, masquerades("A", "B")),
            Row("131", "plain", NODE, CLUSTER_IP, masquerades("A", "B")),
            Row("131", "plain", OUTSIDE, CLUSTER_IP, masquerades("A", "B")),
            Row("132", "etp-local", POD, NODE_PORT, keeps("A")),
            Row("132", "etp-local", POD, VIP, keeps("A")),
        ),
    ),
    Variant(
        "node ports on both networks",
        (
            *_WITH_DETECTOR,
            "--nodeport-addresses",
            "192.0.2.0/24,192.0.3.0/24,2001:db8:2::/64,2001:db8:3::11/128",
        ),
        (_MAIN, *second("65, 66", _SERVICE, _SERVICE), *localhost("67")),
    ),
    Variant(
        "node ports on one network, IPv6 not restricted",
        (*_WITH_DETECTOR, "--nodeport-addresses", "192.0.2.0/24"),
        (_MAIN, *second("54, 3.4", _HOST, _SERVICE), *localhost("67")),
    ),
    Variant(
        "node ports on the second network only",
        (*_WITH_DETECTOR, "--nodeport-addresses", "192.0.3.0/24,2001:db8:3::/64"),
        (
            *second("56, 60", _SERVICE, _SERVICE),
            Row("60", "plain", OUTSIDE, NODE_PORT, _HOST),
        ),
    ),
    Variant(
        "node ports everywhere",
        (*_WITH_DETECTOR, "--nodeport-addresses", "0.0.0.0/0,::/0"),
        (_MAIN, *second("3.4", _SERVICE, _SERVICE), *localhost("67")),
    ),
    Variant(
        "node ports on the primary address",
        (*_WITH_DETECTOR, "--nodeport-addresses", "primary"),
        (_MAIN, *second("63, 64", _HOST, _HOST)),
    ),
    Variant(
        "pods told by the node's pod CIDRs",
        ("--detect-local-mode", "NodeCIDR"),
        (
            Row("90", "plain", POD, CLUSTER_IP, keeps("A", "B")),
            Row("93", "plain", NODE, CLUSTER_IP, masquerades("A", "B")),
            Row("97", "plain", OUTSIDE, CLUSTER_IP, masquerades("A", "B")),
            Row("101", "etp-local", POD, NODE_PORT, keeps("A", "B")),
            Row("108", "etp-local", REMOTE_POD, NODE_PORT, keeps("A")),
            Row("315", "etp-remote", REMOTE_POD, NODE_PORT, DROPPED),
        ),
    ),
    Variant(
        "pods told by one interface",
        ("--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "veth-cli1"),
        (
            Row("90", "plain", POD, CLUSTER_IP, keeps("A", "B")),
            Row("97", "single", "A", CLUSTER_IP, masquerades("B")),
            Row("101", "etp-local", POD, VIP, keeps("A", "B")),
            Row("109", "etp-local", "A2", VIP, keeps("A")),
        ),
    ),
    Variant(
        "pods told by a prefix of interfaces",
        ("--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "veth-"),
        (
            Row("90", "plain", POD, CLUSTER_IP, keeps("A", "B")),
            Row("90", "single", "A", CLUSTER_IP, keeps("B")),
            Row("93", "plain", NODE, CLUSTER_IP, masquerades("A", "B")),
            Row("97", "plain", OUTSIDE, CLUSTER_IP, masquerades("A", "B")),
        ),
    ),
]

CASES = [
    pytest.param(variant, row, family, protocol, id=f"{variant}: {row}-IPv{int(family)}-{protocol}")
    for variant in VARIANTS
    for row in variant.rows
    for family in BOTH
    if family in row.families
    for protocol in (Protocol.TCP, Protocol.UDP)
]


@pytest.fixture(scope="module")
def switch(world: Cluster) -> Iterator[Callable[[Variant], None]]:
    """Give n1's agent a variant's flags; the rows of a variant follow each other."""
    current: Variant | None = None
    with contextlib.ExitStack() as stack:

        def to(variant: Variant) -> None:
            nonlocal current
            if variant is not current:
                stack.close()
                stack.enter_context(world.agent_flags(world.n1, *variant.flags))
                current = variant

        yield to


@pytest.mark.parametrize(("variant", "row", "family", "protocol"), CASES)
def test_row(
    world: Cluster,
    switch: Callable[[Variant], None],
    variant: Variant,
    row: Row,
    family: Family,
    protocol: Protocol,
) -> None:
    switch(variant)
    judge(world, row, BY_NAME[row.service], family, protocol)
