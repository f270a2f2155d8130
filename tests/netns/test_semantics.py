"""Where packets go: kube-proxy's tables, row by row, on the default configuration.

The node whose rules are judged is n1: A, A2, A3 and A4 are local to it, B and C are on n2. Row numbers are
kube-proxy's test tables as we numbered them; kubernetes/kubernetes#N is the report that a row comes from.
"""

import pytest

from rulecast.lab import Answer
from rulecast.model import Family, Protocol
from tests.netns.cluster import Cluster
from tests.netns.expect import (
    BLOCKED,
    DROPPED,
    LOCALHOST,
    NODE,
    NODE_MAIN,
    NODE_VIP,
    OUTSIDE,
    OUTSIDE_VIA_N2,
    POD,
    REFUSED,
    REMOTE_NODE,
    REMOTE_POD,
    Case,
    Row,
    ask_drops,
    case_id,
    cases,
    judge,
    keeps,
    masquerades,
    reaches,
)
from tests.netns.objects import CLUSTER_IP, EXTERNAL_IP, NODE_PORT, VIP
from tests.netns.world import BY_NAME, V4, V6

TCP, UDP = (Protocol.TCP,), (Protocol.UDP,)
SECOND = {4: "192.0.3.11", 6: "2001:db8:3::11"}

CLUSTER_POLICIES = [
    Row("90", "plain", POD, CLUSTER_IP, keeps("A", "B")),
    Row("91", "plain", POD, NODE_PORT, masquerades("A", "B")),
    Row("92", "plain", POD, VIP, masquerades("A", "B")),
    Row("84", "plain", POD, EXTERNAL_IP, masquerades("A", "B")),
    Row("93", "plain", NODE, CLUSTER_IP, masquerades("A", "B")),
    Row("94", "plain", NODE, NODE_PORT, masquerades("A", "B")),
    Row("96", "plain", NODE, VIP, masquerades("A", "B")),
    Row("96", "plain", NODE, EXTERNAL_IP, masquerades("A", "B")),
    Row("97", "plain", OUTSIDE, CLUSTER_IP, masquerades("A", "B")),
    Row("98", "plain", OUTSIDE, NODE_PORT, masquerades("A", "B")),
    Row("99", "plain", OUTSIDE, VIP, masquerades("A", "B")),
    Row("85", "plain", OUTSIDE, EXTERNAL_IP, masquerades("A", "B")),
    Row("329", "plain", REMOTE_POD, CLUSTER_IP, keeps("A", "B")),
    Row("314", "plain", REMOTE_POD, NODE_PORT, masquerades("A", "B")),
    Row("314", "plain", REMOTE_NODE, NODE_PORT, masquerades("A", "B")),
    Row("1", "single", POD, CLUSTER_IP, keeps("B")),
    Row("19", "single", "A", CLUSTER_IP, keeps("B")),
    Row("133", "three", POD, CLUSTER_IP, keeps("A", "B", "C")),
    Row("133", "four", POD, CLUSTER_IP, keeps("A", "A2", "B", "C")),
    Row("no node port", "no-node-port", OUTSIDE, VIP, masquerades("A", "B")),
    Row("no node port", "no-node-port", OUTSIDE, NODE_PORT, REFUSED, port=30060),
]

EXTERNAL_LOCAL = [
    Row("100", "etp-local", POD, CLUSTER_IP, keeps("A", "B")),
    Row("101", "etp-local", POD, NODE_PORT, keeps("A", "B")),
    Row("102", "etp-local", POD, VIP, keeps("A", "B")),
    Row("77", "etp-local", POD, EXTERNAL_IP, keeps("A", "B")),
    Row("103", "etp-local", NODE, CLUSTER_IP, masquerades("A", "B")),
    Row("104", "etp-local", NODE, NODE_PORT, masquerades("A", "B")),
    Row("106", "etp-local", NODE, VIP, masquerades("A", "B")),
    Row("106", "etp-local", NODE, EXTERNAL_IP, masquerades("A", "B")),
    Row("107", "etp-local", OUTSIDE, CLUSTER_IP, masquerades("A", "B")),
    Row("108", "etp-local", OUTSIDE, NODE_PORT, keeps("A")),
    Row("109", "etp-local", OUTSIDE, VIP, keeps("A")),
    Row("78", "etp-local", OUTSIDE, EXTERNAL_IP, keeps("A")),
    Row("342", "etp-local", OUTSIDE_VIA_N2, VIP, keeps("B")),
    Row("342", "etp-local", OUTSIDE_VIA_N2, NODE_PORT, keeps("B"), node="n2"),
    Row("345", "etp-local", REMOTE_NODE, NODE_PORT, keeps("A")),
    Row("3", "etp-remote", NODE, EXTERNAL_IP, masquerades("B")),
    Row("4", "etp-remote", OUTSIDE, EXTERNAL_IP, DROPPED),
    Row("kubernetes/kubernetes#131765", "etp-remote", POD, VIP, keeps("B")),
    Row("kubernetes/kubernetes#131765", "etp-remote", NODE, VIP, masquerades("B")),
    Row("kubernetes/kubernetes#131765", "etp-remote", POD, NODE_PORT, keeps("B")),
    Row("kubernetes/kubernetes#131765", "etp-remote", NODE, NODE_PORT, masquerades("B")),
    Row("kubernetes/kubernetes#131765", "etp-remote", OUTSIDE, VIP, DROPPED),
    Row("kubernetes/kubernetes#131765", "etp-remote", OUTSIDE, NODE_PORT, DROPPED),
    Row("242", "etp-remote", OUTSIDE, CLUSTER_IP, masquerades("B")),
    Row("246", "etp-local-internal", POD, CLUSTER_IP, keeps("B")),
]

INTERNAL_LOCAL = [
    Row("110", "itp-local", POD, CLUSTER_IP, keeps("A")),
    Row("111", "itp-local", POD, NODE_PORT, masquerades("A", "B")),
    Row("112", "itp-local", POD, VIP, masquerades("A", "B")),
    Row("112", "itp-local", POD, EXTERNAL_IP, masquerades("A", "B")),
    Row("113", "itp-local", NODE, CLUSTER_IP, masquerades("A")),
    Row("114", "itp-local", NODE, NODE_PORT, masquerades("A", "B")),
    Row("116", "itp-local", NODE, VIP, masquerades("A", "B")),
    Row("117", "itp-local", OUTSIDE, CLUSTER_IP, masquerades("A")),
    Row("118", "itp-local", OUTSIDE, NODE_PORT, masquerades("A", "B")),
    Row("119", "itp-local", OUTSIDE, VIP, masquerades("A", "B")),
    Row("307", "itp-local", REMOTE_POD, CLUSTER_IP, keeps("B")),
    Row("135", "itp-two-local", POD, CLUSTER_IP, keeps("A", "A2")),
    Row("136", "itp-remote", POD, CLUSTER_IP, DROPPED),
    Row("308", "itp-remote", NODE, CLUSTER_IP, DROPPED),
    Row("136", "itp-remote", OUTSIDE, CLUSTER_IP, DROPPED),
    Row("2.6", "itp-remote", OUTSIDE, VIP, masquerades("B")),
    Row("2.6", "itp-remote", POD, NODE_PORT, masquerades("B")),
    Row("243", "both-remote", POD, CLUSTER_IP, DROPPED),
    Row("243", "both-remote", POD, VIP, keeps("B")),
    Row("243", "both-remote", OUTSIDE, VIP, DROPPED),
    Row("313", "remote-terminating-itp-local", POD, CLUSTER_IP, DROPPED),
    Row("313", "remote-terminating-itp-local", REMOTE_POD, CLUSTER_IP, keeps("B")),
    Row("313", "all-terminating-itp-local", POD, CLUSTER_IP, keeps("A2", "A3")),
]

NO_ENDPOINTS = [
    Row("kubernetes/kubernetes#43415", service, client, target, REFUSED)
    for service in ("empty", "empty-etp-local")
    for client in (POD, NODE, OUTSIDE)
    for target in (CLUSTER_IP, NODE_PORT, EXTERNAL_IP, VIP)
] + [
    Row("232", "empty-itp-local", POD, CLUSTER_IP, REFUSED),
    Row("kubernetes/kubernetes#106182", "none-usable", POD, CLUSTER_IP, REFUSED),
]

TERMINATING = [
    Row("138", "mixed", POD, CLUSTER_IP, keeps("A", "A2", "B")),
    Row("139", "mixed", OUTSIDE, VIP, keeps("A", "A2")),
    Row("139", "mixed", OUTSIDE, NODE_PORT, keeps("A", "A2")),
    Row("140", "local-terminating", POD, CLUSTER_IP, keeps("B")),
    Row("141", "local-terminating", OUTSIDE, VIP, keeps("A2", "A3")),
    Row("141", "local-terminating", OUTSIDE, NODE_PORT, keeps("A2", "A3")),
    Row("245", "local-terminating", POD, VIP, keeps("B")),
    Row("142", "remote-terminating", POD, CLUSTER_IP, keeps("B")),
    Row("143", "remote-terminating", OUTSIDE, VIP, DROPPED),
    Row("143", "remote-terminating", OUTSIDE, NODE_PORT, DROPPED),
    Row("244", "remote-terminating", POD, VIP, keeps("B")),
    Row("144", "none-usable", POD, CLUSTER_IP, REFUSED),
    Row("145", "none-usable", OUTSIDE, VIP, REFUSED),
    Row("145", "none-usable", OUTSIDE, NODE_PORT, REFUSED),
    Row("147", "mixed-cluster", POD, CLUSTER_IP, keeps("A", "A2", "B")),
    Row("148", "mixed-cluster", OUTSIDE, VIP, masquerades("A", "A2", "B")),
    Row("149", "all-terminating-cluster", POD, CLUSTER_IP, keeps("A2", "A3", "B")),
    Row("149", "all-terminating-cluster", OUTSIDE, VIP, masquerades("A2", "A3", "B")),
    Row("150", "remote-terminating-cluster", POD, CLUSTER_IP, keeps("B")),
    Row("150", "remote-terminating-cluster", OUTSIDE, VIP, masquerades("B")),
    Row("151", "none-usable-cluster", POD, CLUSTER_IP, REFUSED),
    Row("151", "none-usable-cluster", OUTSIDE, VIP, REFUSED),
]

TOPOLOGY = [
    Row("220", "zones", POD, CLUSTER_IP, keeps("A")),
    Row("220", "zones", REMOTE_POD, CLUSTER_IP, keeps("B")),
    Row("229", "zones-incomplete", POD, CLUSTER_IP, keeps("A", "B")),
    Row("226", "zones-elsewhere", POD, CLUSTER_IP, keeps("A", "B")),
    Row("222", "zones-etp-local", POD, CLUSTER_IP, keeps("B")),
    Row("222", "zones-etp-local", POD, VIP, keeps("B")),
    Row("222", "zones-etp-local", OUTSIDE, VIP, keeps("A")),
    Row("223", "zones-itp-local", POD, CLUSTER_IP, keeps("A")),
    Row("230", "zones-two-each", POD, CLUSTER_IP, keeps("A")),
    Row("230", "zones-two-each", REMOTE_POD, CLUSTER_IP, keeps("A", "B")),
    Row("228", "zone-unready", POD, CLUSTER_IP, keeps("B")),
    Row("2.2", "zones-terminating", POD, CLUSTER_IP, keeps("A", "B")),
    Row("247", "nodes", POD, CLUSTER_IP, keeps("A")),
    Row("247", "nodes", REMOTE_POD, CLUSTER_IP, keeps("B")),
    Row("250", "nodes-then-zones", POD, CLUSTER_IP, keeps("B")),
]

PORTS = [
    Row("22", "many-ports", POD, CLUSTER_IP, keeps("A", "B"), port=80, protocols=TCP),
    Row("22", "many-ports", POD, CLUSTER_IP, keeps("A:8443", "B:8443"), port=443, protocols=TCP),
    Row("23", "many-ports", POD, CLUSTER_IP, keeps("A:5353", "B:5353"), port=53, protocols=TCP),
    Row("24", "many-ports", POD, CLUSTER_IP, keeps("A:53", "B:53"), port=53, protocols=UDP),
    Row("26", "tcp-only", POD, CLUSTER_IP, REFUSED, protocols=UDP),
    Row("26", "tcp-only", NODE, CLUSTER_IP, REFUSED, protocols=UDP),
    Row("26", "tcp-only", OUTSIDE, CLUSTER_IP, REFUSED, protocols=UDP),
    Row("27", "plain", POD, CLUSTER_IP, REFUSED, port=81),
    Row("27", "plain", NODE, CLUSTER_IP, REFUSED, port=81),
    Row("27", "plain", OUTSIDE, CLUSTER_IP, REFUSED, port=81),
    Row("27", "etp-local", POD, CLUSTER_IP, REFUSED, port=81),
    Row(
        "kubernetes/kubernetes#101935", "one-address-two-ports", POD, CLUSTER_IP, keeps("n1:9001", "n1:9002")
    ),
    Row("340", "two-targets", POD, CLUSTER_IP, keeps("A", "B:9090")),
    Row("334", "ports-apart", POD, CLUSTER_IP, keeps("A"), port=80, protocols=TCP),
    Row("334", "ports-apart", POD, CLUSTER_IP, keeps("B:8443"), port=443, protocols=TCP),
    Row("334", "ports-apart", OUTSIDE, NODE_PORT, masquerades("B:8443"), port=31443, protocols=TCP),
    Row("kubernetes/kubernetes#20092", "per-protocol", POD, CLUSTER_IP, keeps("A"), protocols=TCP),
    Row("kubernetes/kubernetes#20092", "per-protocol", POD, CLUSTER_IP, keeps("B"), protocols=UDP),
    Row("kubernetes/kubernetes#20092", "per-protocol", OUTSIDE, NODE_PORT, masquerades("A"), protocols=TCP),
    Row("kubernetes/kubernetes#20092", "per-protocol", OUTSIDE, NODE_PORT, masquerades("B"), protocols=UDP),
    Row("kubernetes/kubernetes#80158", "shared-http", OUTSIDE, VIP, masquerades("A"), protocols=TCP),
    Row(
        "kubernetes/kubernetes#80158",
        "shared-http",
        OUTSIDE,
        VIP,
        masquerades("B"),
        port=443,
        protocols=TCP,
    ),
    Row("339", "shared-http", OUTSIDE, VIP, masquerades("C"), port=53, protocols=UDP),
]

SOURCE_RANGES = [
    Row("29", "ranges", POD, CLUSTER_IP, keeps("B")),
    Row("30", "ranges", OUTSIDE, NODE_PORT, masquerades("B")),
    Row("31", "ranges", BLOCKED, NODE_PORT, masquerades("B")),
    Row("31", "ranges", BLOCKED, EXTERNAL_IP, masquerades("B")),
    Row("31", "ranges", BLOCKED, CLUSTER_IP, masquerades("B")),
    Row("32", "ranges", OUTSIDE, VIP, masquerades("B")),
    Row("33", "ranges", OUTSIDE, VIP, masquerades("B"), address="203.0.113.19", families=V4),
    Row("33", "ranges", OUTSIDE, VIP, masquerades("B"), address="2001:db8:113::19", families=V6),
    Row("34", "ranges", BLOCKED, VIP, DROPPED),
    Row("35", "ranges", BLOCKED, VIP, DROPPED, address="203.0.113.19", families=V4),
    Row("35", "ranges", BLOCKED, VIP, DROPPED, address="2001:db8:113::19", families=V6),
    Row("36", "ranges", POD, VIP, DROPPED),
    Row("37", "ranges", POD, VIP, DROPPED, address="203.0.113.19", families=V4),
    Row("37", "ranges", POD, VIP, DROPPED, address="2001:db8:113::19", families=V6),
    Row("38", "ranges", NODE_MAIN, VIP, reaches("B")),
    Row("39", "ranges", NODE_MAIN, VIP, reaches("B"), address="203.0.113.19", families=V4),
    Row("39", "ranges", NODE_MAIN, VIP, reaches("B"), address="2001:db8:113::19", families=V6),
    Row("3.3", "ranges", NODE, VIP, DROPPED),
    Row("40", "ranges-own-address", NODE_VIP, VIP, masquerades("B")),
    Row("3.3", "ranges-empty", OUTSIDE, VIP, REFUSED),
    Row("3.3", "ranges-empty", BLOCKED, VIP, DROPPED),
    Row("kubernetes/kubernetes#119656", "ranges-without-node", OUTSIDE, VIP, masquerades("B")),
    Row("kubernetes/kubernetes#119656", "ranges-without-node", NODE_MAIN, VIP, DROPPED),
    Row("kubernetes/kubernetes#119656", "ranges-without-node", POD, VIP, DROPPED),
    Row("kubernetes/kubernetes#119656", "ranges-pods", POD, VIP, masquerades("B")),
    Row("kubernetes/kubernetes#119656", "ranges-pods", OUTSIDE, VIP, DROPPED),
    Row("kubernetes/kubernetes#62638", "plain", BLOCKED, VIP, masquerades("A", "B")),
    Row("kubernetes/kubernetes#33035", "ranges-other-family", OUTSIDE, VIP, masquerades("B"), families=V4),
    Row("kubernetes/kubernetes#33035", "ranges-other-family", OUTSIDE, VIP, DROPPED, families=V6),
]

LOAD_BALANCERS = [
    Row("42", "lb-proxy", POD, VIP, keeps("lb:80")),
    Row("42", "lb-proxy", NODE, VIP, keeps("lb:80")),
    Row("42", "lb-proxy", OUTSIDE, NODE_PORT, masquerades("A", "B")),
    Row("43", "lb-vip", POD, VIP, masquerades("A", "B")),
    Row("44", "plain", POD, VIP, masquerades("A", "B")),
    Row("kubernetes/kubernetes#114815", "node-address", OUTSIDE, NODE_PORT, masquerades("A", "B")),
    Row(
        "kubernetes/kubernetes#114815",
        "node-address",
        OUTSIDE,
        VIP,
        masquerades("A", "B"),
        address="192.0.2.11",
        families=V4,
    ),
    Row(
        "kubernetes/kubernetes#114815",
        "node-address",
        OUTSIDE,
        VIP,
        masquerades("A", "B"),
        address="2001:db8:2::11",
        families=V6,
    ),
]

HAIRPIN = [
    Row("20", "self", "A", CLUSTER_IP, masquerades("A")),
    Row("20", "self", "A", NODE_PORT, masquerades("A")),
    Row("20", "self", "A", VIP, masquerades("A")),
    Row("20", "self", "A", EXTERNAL_IP, masquerades("A")),
    Row("20", "self-etp-local", "A", CLUSTER_IP, masquerades("A")),
    Row("20", "self-etp-local", "A", NODE_PORT, masquerades("A")),
    Row("20", "self-etp-local", "A", VIP, masquerades("A")),
    Row("20", "host", POD, CLUSTER_IP, keeps("n1")),
    Row("20", "host", NODE, CLUSTER_IP, reaches("n1")),
    Row("20", "host", NODE_MAIN, CLUSTER_IP, reaches("n1")),
]

NODE_PORT_ADDRESSES = [
    Row("62", "plain", OUTSIDE, NODE_PORT, masquerades("A", "B")),
    Row("63", "plain", OUTSIDE, NODE_PORT, keeps("n1:30001"), address=SECOND[4], families=V4),
    Row("64", "plain", OUTSIDE, NODE_PORT, keeps("n1:30001"), address=SECOND[6], families=V6),
    Row("67", "plain", LOCALHOST, NODE_PORT, REFUSED, address="127.0.0.1", families=V4),
    Row("kubernetes/kubernetes#96879", "plain", LOCALHOST, NODE_PORT, REFUSED, address="::1", families=V6),
    Row(
        "kubernetes/kubernetes#96879",
        "etp-local",
        LOCALHOST,
        NODE_PORT,
        REFUSED,
        address="127.0.0.1",
        families=V4,
    ),
    Row(
        "kubernetes/kubernetes#96879", "etp-local", LOCALHOST, NODE_PORT, REFUSED, address="::1", families=V6
    ),
]

ADDRESSES = [
    Row("215", "malformed", POD, CLUSTER_IP, keeps("B"), address="10.96.0.53", families=V4),
    Row("216", "malformed", OUTSIDE, VIP, masquerades("B"), address="203.0.113.53", families=V4),
    Row("217", "malformed", OUTSIDE, EXTERNAL_IP, masquerades("B"), address="203.0.114.53", families=V4),
    Row("218", "malformed", BLOCKED, VIP, DROPPED, address="203.0.113.53", families=V4),
    Row("28", "plain", POD, CLUSTER_IP, DROPPED, address="10.96.0.250", families=V4),
    Row("28", "plain", POD, CLUSTER_IP, DROPPED, address="2001:db8:96::250", families=V6),
    Row("28", "plain", NODE, CLUSTER_IP, DROPPED, address="10.96.0.250", families=V4),
    Row("28", "plain", NODE, CLUSTER_IP, DROPPED, address="2001:db8:96::250", families=V6),
    Row("12", "v4-only", POD, CLUSTER_IP, keeps("A", "B"), families=V4),
    Row("12", "v4-only", POD, CLUSTER_IP, DROPPED, families=V6),
    Row("12", "v6-only", POD, CLUSTER_IP, keeps("A", "B"), families=V6),
    Row("12", "v6-only", POD, CLUSTER_IP, DROPPED, families=V4),
    Row("kubernetes/kubernetes#97343", "v6-without-endpoints", POD, CLUSTER_IP, keeps("A", "B"), families=V4),
    Row("kubernetes/kubernetes#97343", "v6-without-endpoints", POD, CLUSTER_IP, REFUSED, families=V6),
    Row("301", "other-proxy", POD, CLUSTER_IP, DROPPED),
    Row("321", "external-name", POD, CLUSTER_IP, DROPPED),
]

ALL = [
    *CLUSTER_POLICIES,
    *EXTERNAL_LOCAL,
    *INTERNAL_LOCAL,
    *NO_ENDPOINTS,
    *TERMINATING,
    *TOPOLOGY,
    *PORTS,
    *SOURCE_RANGES,
    *LOAD_BALANCERS,
    *HAIRPIN,
    *NODE_PORT_ADDRESSES,
    *ADDRESSES,
]


@pytest.fixture(scope="module")
def drops(world: Cluster) -> dict[Case, list[Answer]]:
    return ask_drops(world, ALL, BY_NAME)


@pytest.mark.parametrize(("row", "family", "protocol"), cases(ALL), ids=case_id)
def test_row(
    world: Cluster, drops: dict[Case, list[Answer]], row: Row, family: Family, protocol: Protocol
) -> None:
    judge(world, row, BY_NAME[row.service], family, protocol, drops.get((row, family, protocol)))
