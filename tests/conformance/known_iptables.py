"""Where kube-proxy's iptables mode differs from its nftables mode, which ours follows in every mode."""

import ipaddress
from collections.abc import Mapping

from tests.conformance.cases import Case, endpoints_of, serves, vips
from tests.conformance.compare import Difference, Known, Seen
from tests.conformance.places import BACKENDS, NODES, SECOND
from tests.conformance.wanted import Wanted, usable
from tests.netns.objects import EXTERNAL_IP, SERVICE_CIDRS, VIP

_REFUSED = Seen(frozenset({("refused", "")}))
_LOST = (Seen(frozenset({("dropped", "")})), Seen(frozenset({("unreachable", "")})))


def _port_without_service(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """A port that no service has, at a cluster IP: ours refuses, theirs lets it go nowhere."""
    return _nobodys(difference, service) and difference.ours == _REFUSED and difference.theirs in _LOST


def _address_without_service(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """An address of the service CIDRs that no service has: ours drops, theirs lets it find no way."""
    return _nobodys(difference, service) and (difference.ours, difference.theirs) == _LOST


def _nobodys(difference: Difference, service: Wanted | None) -> bool:
    """The service in question does not have that address and port of the service CIDRs."""
    case = difference.case
    inside = ipaddress.ip_address(case.address) in ipaddress.ip_network(SERVICE_CIDRS[case.family])
    return inside and (service is None or not serves(service, case))


def _own_packets_to_external_addresses(
    difference: Difference, service: Wanted | None, _: Wanted | None
) -> bool:
    """A node's own packets to an external address without endpoints: theirs has the refusal for others."""
    case = difference.case
    return (
        service is not None
        and case.host in NODES
        and case.address in _external(service, case)
        and _has_port(service, case)
        and difference.ours == _REFUSED
        and difference.theirs in _LOST
    )


def _node_port_elsewhere(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """A node port of a Local policy, at an address that serves none: theirs drops, ours is not asked."""
    case = difference.case
    return (
        service is not None
        and service.external_policy == "Local"
        and any(case.address in place.addresses.values() for place in SECOND.values())
        and case.port in [port.node_port for port in service.ports]
        and difference.ours == _REFUSED
        and difference.theirs in _LOST
    )


def _to_itself_through_another_node(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """A pod that another node sends back to itself: theirs masquerades it there, ours is lost."""
    case = difference.case
    if case.client not in BACKENDS or case.address not in _other_nodes(BACKENDS[case.client].node):
        return False
    only_theirs = difference.theirs.outcomes - difference.ours.outcomes
    only_ours = difference.ours.outcomes - difference.theirs.outcomes
    backends = {who.partition(":")[0] for who, _ in only_theirs}
    return only_ours <= {("dropped", "")} and backends == {case.client}


def _ranges_without_endpoints(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """A source that ranges leave out, at a VIP without endpoints: theirs refuses, ours drops."""
    case = difference.case
    return (
        service is not None
        and bool(service.ranges)
        and case.address in vips(service, case.family)
        and difference.ours == _LOST[0]
        and difference.theirs == _REFUSED
        and not any(map(usable, endpoints_of(service, case)))
    )


def _other_nodes(node: str) -> set[str]:
    return {
        address
        for name in NODES
        if name != node
        for place in (NODES[name], SECOND[name])
        for address in place.addresses.values()
    }


def _external(service: Wanted, case: Case) -> list[str]:
    own = service.addresses(case.family)
    return [
        *(own[kind] for kind in (EXTERNAL_IP, VIP) if kind in own),
        *service.shared_addresses(case.family),
    ]


def _has_port(service: Wanted, case: Case) -> bool:
    return (case.port, case.protocol) in [(port.port, port.protocol) for port in service.ports]


KNOWN: Mapping[str, Known] = {
    name: Known(row, explains, "iptables")
    for name, row, explains in (
        ("port without a service", "a port of a cluster IP that no Service has", _port_without_service),
        (
            "address without a service",
            "an address of the service CIDRs that no Service has",
            _address_without_service,
        ),
        (
            "own packets to an external address",
            "a node's own packets to an external address",
            _own_packets_to_external_addresses,
        ),
        ("node port at another address", "the node port of a Service without", _node_port_elsewhere),
        ("ranges of a VIP without endpoints", "a source that `loadBal", _ranges_without_endpoints),
        ("to itself through another node", "a pod that asks another node", _to_itself_through_another_node),
    )
}
