"""Host facts that shape rules: local detection and the addresses of node ports."""

import pytest

from rulecast.model import ClusterInfo, Family, NodeInfo
from rulecast_agent.dataplane.base import LocalDetector
from rulecast_agent.detect import detectors
from rulecast_agent.nodeports import host_config, nodeport_addresses
from rulecast_agent.settings import Detection, DetectLocalMode, parse
from tests.agent.values import NODE

NONE = LocalDetector()
INTERFACES = (
    *("127.0.0.1", "::1", "192.168.0.2", "192.168.1.2"),
    *("2001:db8::1", "2001:db8:1::2", "fe80::1"),
)
NODE_IPS = ("192.168.0.2", "2001:db8::1", "192.168.1.2")


def cidr(text: str) -> LocalDetector:
    return LocalDetector(source_cidr=text)


@pytest.mark.parametrize(
    ("detection", "node", "ipv4", "ipv6"),
    [
        (Detection(), NODE, NONE, NONE),
        (Detection(cluster_cidrs={Family.IPV4: "10.0.0.0/8"}), NODE, cidr("10.0.0.0/8"), NONE),
        (Detection(cluster_cidrs={Family.IPV6: "fd00::/48"}), None, NONE, cidr("fd00::/48")),
        (
            Detection(mode=DetectLocalMode.NODE_CIDR),
            NODE,
            cidr("10.244.1.0/24"),
            cidr("2001:db8:244:1::/64"),
        ),
        (
            Detection(mode=DetectLocalMode.NODE_CIDR),
            NodeInfo(name="n", pod_cidrs=("10.1.0.0/24", "10.2.0.0/24")),
            cidr("10.1.0.0/24"),
            NONE,
        ),
        (
            Detection(mode=DetectLocalMode.BRIDGE_INTERFACE, bridge_interface="cni0"),
            None,
            LocalDetector(interface="cni0"),
            LocalDetector(interface="cni0"),
        ),
        (
            Detection(mode=DetectLocalMode.INTERFACE_NAME_PREFIX, interface_name_prefix="veth"),
            None,
            LocalDetector(interface_prefix="veth"),
            LocalDetector(interface_prefix="veth"),
        ),
    ],
)
def test_each_mode_gives_a_detector_a_family(
    detection: Detection, node: NodeInfo | None, ipv4: LocalDetector, ipv6: LocalDetector
) -> None:
    assert detectors(detection, node) == {Family.IPV4: ipv4, Family.IPV6: ipv6}


@pytest.mark.parametrize("node", [None, NodeInfo(name="n")])
def test_node_cidr_waits_for_the_nodes_pod_cidrs(node: NodeInfo | None) -> None:
    assert detectors(Detection(mode=DetectLocalMode.NODE_CIDR), node) is None


@pytest.mark.parametrize(
    ("cidrs", "ipv4", "ipv6"),
    [
        (None, ("192.168.0.2",), ("2001:db8::1",)),
        (("192.168.0.0/24", "192.168.1.0/24"), ("192.168.0.2", "192.168.1.2"), None),
        (("192.168.0.0/24", "127.0.0.1/32"), ("192.168.0.2",), None),
        (("127.0.0.0/8",), (), None),
        (("10.99.0.0/16",), (), None),
        (("0.0.0.0/0",), None, None),
        (("192.168.0.0/24", "0.0.0.0/0", "2001:db8::/64"), None, ("2001:db8::1",)),
        (("2001:db8::/64", "2001:db8:1::2/128"), None, ("2001:db8::1", "2001:db8:1::2")),
        (("::/0",), None, None),
    ],
)
def test_node_port_addresses_follow_kube_proxys_rules(
    cidrs: tuple[str, ...] | None, ipv4: tuple[str, ...] | None, ipv6: tuple[str, ...] | None
) -> None:
    assert nodeport_addresses(cidrs, NODE_IPS, INTERFACES, Family.IPV4) == ipv4
    assert nodeport_addresses(cidrs, NODE_IPS, INTERFACES, Family.IPV6) == ipv6


def test_the_primary_address_of_an_unknown_node_is_never_guessed() -> None:
    assert nodeport_addresses(None, (), INTERFACES, Family.IPV4) == ()


def test_a_host_config_has_everything_of_the_families_that_the_kernel_has() -> None:
    settings = parse(["--server", "s:1", "--insecure", "--masquerade-all", "--masquerade-bit", "3"], {})
    host = host_config(
        settings,
        families=[Family.IPV4],
        node=NODE,
        cluster=ClusterInfo(service_cidrs=("10.96.0.0/16", "fd00::/108")),
        interface_ips=INTERFACES,
    )
    assert host is not None
    assert host.families.keys() == {Family.IPV4}
    assert host.families[Family.IPV4].service_cidrs == ("10.96.0.0/16",)
    assert host.families[Family.IPV4].node_ips == ("192.0.2.11", "198.51.100.11")
    assert host.masquerade_all
    assert host.masquerade_mark == 8
