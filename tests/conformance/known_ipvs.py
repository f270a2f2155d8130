"""Where our IPVS mode differs from kube-proxy's nftables mode, by what IPVS is."""

from collections.abc import Mapping

from rulecast.model import Protocol
from tests.conformance.cases import serves
from tests.conformance.compare import STAYS, Difference, Known
from tests.conformance.places import NODES
from tests.conformance.wanted import Wanted
from tests.netns.objects import CLUSTER_IP


def _udp_endpoint_gone(difference: Difference, service: Wanted | None, before: Wanted | None) -> bool:
    """A UDP flow to an endpoint that still serves, but not this node any more."""
    changed = service != before or _hinted(service)
    return (
        changed
        and difference.case.protocol is Protocol.UDP
        and difference.theirs == STAYS
        and difference.ours.outcomes <= {("moved", ""), ("refused", ""), ("dropped", "")}
    )


def _own_packets_to_what_is_gone(
    difference: Difference, service: Wanted | None, before: Wanted | None
) -> bool:
    """A node's own packets to an external address that nobody has any more: connections to it may be open."""
    case = difference.case
    return (
        case.host in NODES
        and before is not None
        and serves(before, case)
        and case.address != before.addresses(case.family).get(CLUSTER_IP)
        and not (service is not None and serves(service, case))
        and difference.ours.outcomes == {("refused", "")}
        and difference.theirs.outcomes <= {("dropped", ""), ("unreachable", "")}
    )


def _hinted(service: Wanted | None) -> bool:
    """Whether a node may get other endpoints though the service stays as it is: in another zone."""
    return service is not None and any(
        endpoint.zones or endpoint.nodes for each in service.slices for endpoint in each.endpoints
    )


KNOWN: Mapping[str, Known] = {
    "UDP endpoint of another node": Known(
        "UDP flows to an endpoint that still", _udp_endpoint_gone, ours="ipvs"
    ),
    "own packets to what is gone": Known(
        "a node's own new packets to an external address", _own_packets_to_what_is_gone, ours="ipvs"
    ),
}
