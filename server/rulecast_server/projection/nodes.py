"""Node and ServiceCIDR objects to what agents need of them."""

from collections.abc import Iterable

from rulecast.address import AddressError, canonical_cidr, canonical_ip, is_unspecified
from rulecast.model import ClusterInfo, NodeInfo
from rulecast_server.kube.objects import Node, ServiceCIDR
from rulecast_server.projection.problems import Reason

ZONE_LABEL = "topology.kubernetes.io/zone"
DELETION_TAINT = "ToBeDeletedByClusterAutoscaler"

Problems = tuple[tuple[Reason, str], ...]


def parse_node(name: str, node: Node) -> tuple[NodeInfo, Problems]:
    """Project one Node, known by that name; bad addresses and pod CIDRs are left out and reported."""
    meta, spec = node.metadata, node.spec
    problems: list[tuple[Reason, str]] = []
    addresses: dict[str, None] = {}
    listed = (node.status.addresses if node.status else None) or ()
    for kind in ("InternalIP", "ExternalIP"):
        for address in listed:
            if address.type == kind:
                try:
                    ip = canonical_ip(address.address)
                except AddressError as error:
                    problems.append((Reason.BAD_ADDRESS, f"{kind}: {error}"))
                    continue
                if is_unspecified(ip):
                    problems.append((Reason.BAD_ADDRESS, f"{kind}: {ip} is no node's address"))
                else:
                    addresses[ip] = None
    pod_cidrs: list[str] = []
    if spec is not None:
        texts = spec.pod_cidrs or ([spec.pod_cidr] if spec.pod_cidr else [])
        pod_cidrs, bad = _cidrs(texts, "podCIDRs")
        problems += bad
    info = NodeInfo(
        name=name,
        zone=(meta.labels or {}).get(ZONE_LABEL, ""),
        addresses=tuple(addresses),
        pod_cidrs=tuple(pod_cidrs),
        eligible=meta.deletion_timestamp is None
        and not any(taint.key == DELETION_TAINT for taint in (spec.taints if spec else None) or ()),
    )
    return info, tuple(problems)


def parse_service_cidr(service_cidr: ServiceCIDR) -> tuple[tuple[str, ...], Problems]:
    """Project one ServiceCIDR to canonical CIDRs."""
    texts = (service_cidr.spec.cidrs if service_cidr.spec else None) or ()
    cidrs, problems = _cidrs(texts, "cidrs")
    return tuple(cidrs), tuple(problems)


def cluster_info(service_cidrs: Iterable[tuple[str, ...]]) -> ClusterInfo:
    """Merge all ServiceCIDRs."""
    return ClusterInfo(service_cidrs=tuple(sorted({cidr for cidrs in service_cidrs for cidr in cidrs})))


def _cidrs(texts: Iterable[str], field: str) -> tuple[list[str], list[tuple[Reason, str]]]:
    cidrs: dict[str, None] = {}
    problems: list[tuple[Reason, str]] = []
    for text in texts:
        try:
            cidrs[canonical_cidr(text)] = None
        except AddressError as error:
            problems.append((Reason.BAD_CIDR, f"{field}: {error}"))
    return list(cidrs), problems
