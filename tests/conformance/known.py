"""The differences that docs/differences.md gives reasons for, each as narrow as it can be told."""

from collections.abc import Mapping

from rulecast.model import Family, Protocol
from tests.conformance import known_iptables
from tests.conformance.cases import serves
from tests.conformance.compare import STAYS, Difference, Known
from tests.conformance.wanted import CONDITIONS, Endpoint, Wanted
from tests.netns.objects import VIP


def _ranges_of_the_other_family(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """Ours drops, theirs lets pass, at a VIP whose family no range is of."""
    if service is None:
        return False
    family = difference.case.family
    of_family = [each for each in service.ranges if (":" in each) == (family is Family.IPV6)]
    return (
        difference.case.address == service.addresses(family).get(VIP)
        and bool(service.ranges)
        and not of_family
        and difference.ours.outcomes == {("dropped", "")}
    )


def _said_twice(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """An endpoint that is in two slices, with another state or other hints in each."""
    entries: dict[tuple[str, int], set[Endpoint]] = {}
    for each in service.slices if service is not None else ():
        if each.family == difference.case.family:
            for endpoint in each.endpoints:
                for _name, target, _protocol in each.ports:
                    entries.setdefault((endpoint.who, target), set()).add(endpoint)
    return any(len(each) > 1 for each in entries.values())


def _frontend_gone(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """A UDP flow that kube-proxy keeps and we remove, to a destination that no Service has any more."""
    case = difference.case
    return _removed_by_us_alone(difference) and not (service is not None and serves(service, case))


def _last_endpoint_gone(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """The same, to a destination that has no endpoint any more."""
    return (
        _removed_by_us_alone(difference)
        and service is not None
        and not any(
            CONDITIONS[endpoint.state].get("serving", CONDITIONS[endpoint.state].get("ready", True))
            for endpoint in _endpoints(difference, service)
        )
    )


def _renamed(difference: Difference, service: Wanted | None, before: Wanted | None) -> bool:
    """The same, when the port got another name: its slices came a moment later, until then it had none."""
    return (
        _removed_by_us_alone(difference)
        and service is not None
        and before is not None
        and _names(difference, service) != _names(difference, before)
    )


def _ready_but_not_serving(difference: Difference, service: Wanted | None, before: Wanted | None) -> bool:
    """A UDP flow that kube-proxy moves and we do not, of a Service with such endpoints, or that had such."""
    return (
        difference.case.protocol is Protocol.UDP
        and difference.ours == STAYS
        and any(
            endpoint.state == "published"
            for each in (service, before)
            if each is not None
            for endpoint in _endpoints(difference, each)
        )
    )


def _health_of_other_ports(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """A health-check node port that counts endpoints of ports that the Service does not have."""
    if service is None or difference.case.port != service.health_port:
        return False
    ports = {(port.name, port.protocol) for port in service.ports}
    said = {(name, protocol) for each in service.slices for name, _, protocol in each.ports}
    return bool(said - ports) or any(not each.ports for each in service.slices)


def _removed_by_us_alone(difference: Difference) -> bool:
    return (
        difference.case.protocol is Protocol.UDP
        and difference.theirs == STAYS
        and difference.ours.outcomes <= {("refused", ""), ("dropped", ""), ("moved", "")}
    )


def _endpoints(difference: Difference, service: Wanted) -> list[Endpoint]:
    """Those of the question's family, for one of the service's ports that it may be about."""
    case = difference.case
    names = _names(difference, service)
    return [
        endpoint
        for each in service.slices
        if each.family == case.family
        and any(name in names and protocol == case.protocol for name, _, protocol in each.ports)
        for endpoint in each.endpoints
    ]


def _names(difference: Difference, service: Wanted) -> set[str]:
    case = difference.case
    return {
        port.name
        for port in service.ports
        if port.protocol == case.protocol and case.port in (port.port, port.node_port)
    }


KNOWN: Mapping[str, Known] = {
    "ranges of the other family": Known(
        "`loadBalancerSourceRanges` that name only the other family", _ranges_of_the_other_family
    ),
    "endpoint said twice": Known("an endpoint that is ready in one slice and not in another", _said_twice),
    "flow to a frontend that is gone": Known(
        "UDP flows to an address or port that no Service has any more", _frontend_gone
    ),
    "flow of a service without endpoints": Known(
        "UDP flows of a Service that has lost its last endpoint", _last_endpoint_gone
    ),
    "flow of a port renamed": Known("UDP flows of a Service that has lost its last endpoint", _renamed),
    "flow to what is ready but not serving": Known(
        "UDP flows to an endpoint that is ready but not serving", _ready_but_not_serving
    ),
    "health of other ports": Known("health-check node port of a Service", _health_of_other_ports),
    **known_iptables.KNOWN,
}


def known(difference: Difference, service: Wanted | None, before: Wanted | None, mode: str) -> str | None:
    """The name of what explains a difference about a service as it is and as it was; None: it was not."""
    for name, each in KNOWN.items():
        if mode.startswith(each.mode) and each.explains(difference, service, before):
            return name
    return None
