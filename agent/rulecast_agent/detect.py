"""Which packets count as sent by a pod of this node (kube-proxy's local detectors)."""

from collections.abc import Mapping

from rulecast.address import is_ipv6
from rulecast.model import Family, NodeInfo
from rulecast_agent.dataplane.base import LocalDetector
from rulecast_agent.settings import Detection, DetectLocalMode


def detectors(detection: Detection, node: NodeInfo | None) -> Mapping[Family, LocalDetector] | None:
    """The detector of each family; an empty one where the mode says nothing about the family.

    None: not known yet, because NodeCIDR mode waits for the Node's pod CIDRs. Without a detector node-local
    traffic would get other masquerading than meant, so the caller must wait, as kube-proxy does.
    """
    if detection.mode is DetectLocalMode.BRIDGE_INTERFACE:
        return dict.fromkeys(Family, LocalDetector(interface=detection.bridge_interface))
    if detection.mode is DetectLocalMode.INTERFACE_NAME_PREFIX:
        return dict.fromkeys(Family, LocalDetector(interface_prefix=detection.interface_name_prefix))
    cidrs = detection.cluster_cidrs
    if detection.mode is DetectLocalMode.NODE_CIDR:
        if node is None or not node.pod_cidrs:
            return None
        # kube-proxy, too, uses only the first of each family.
        cidrs = {_family(cidr): cidr for cidr in reversed(node.pod_cidrs)}
    return {family: LocalDetector(source_cidr=cidrs.get(family, "")) for family in Family}


def _family(cidr: str) -> Family:
    return Family.IPV6 if is_ipv6(cidr) else Family.IPV4
