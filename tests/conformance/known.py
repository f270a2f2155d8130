"""The differences that docs/differences.md gives reasons for, each as narrow as it can be told."""

from collections.abc import Mapping, Sequence

from rulecast.model import Protocol
from tests.conformance import known_iptables, known_ipvs
from tests.conformance.cases import Case, endpoints_of, names_of, serves, vips
from tests.conformance.compare import STAYS, Difference, Known
from tests.conformance.odd import family_of
from tests.conformance.said_twice import said_twice
from tests.conformance.wanted import CONDITIONS, Endpoint, Wanted
from tests.netns.objects import CLUSTER_IP


def _ranges_of_no_use(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """Ours drops, theirs lets pass, at a VIP whose family no range is of."""
    if service is None or service.type != "LoadBalancer":
        return False
    family = difference.case.family
    return (
        difference.case.address in vips(service, family)
        and bool(service.ranges)
        and family not in [family_of(each) for each in service.ranges]
        and difference.ours.outcomes == {("dropped", "")}
    )


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
            for endpoint in endpoints_of(service, difference.case)
        )
    )


def _renamed(difference: Difference, service: Wanted | None, before: Wanted | None) -> bool:
    """The same, when the port got another name: its slices came a moment later, until then it had none."""
    return (
        _removed_by_us_alone(difference)
        and service is not None
        and before is not None
        and names_of(service, difference.case) != names_of(before, difference.case)
    )


def _ready_but_not_serving(difference: Difference, service: Wanted | None, before: Wanted | None) -> bool:
    """A UDP flow that kube-proxy moves and we do not, of a Service with such endpoints, or that had such."""
    return (
        difference.case.protocol is Protocol.UDP
        and difference.ours == STAYS
        and any(
            _ready_alone(endpoint)
            for each in (service, before)
            if each is not None
            for endpoint in endpoints_of(each, difference.case)
        )
    )


def _health_of_other_ports(difference: Difference, service: Wanted | None, _: Wanted | None) -> bool:
    """A health-check node port that counts endpoints of ports that the Service does not have."""
    if service is None or difference.case.port != service.health_port:
        return False
    ports = {(port.name, port.protocol) for port in service.ports}
    said = {(name, protocol) for each in service.slices for name, _, protocol in each.ports}
    return bool(said - ports) or any(not each.ports for each in service.slices)


def _ready_alone(endpoint: Endpoint) -> bool:
    conditions = CONDITIONS[endpoint.state]
    return conditions.get("ready", True) and not conditions.get("serving", True)


def _removed_by_us_alone(difference: Difference) -> bool:
    return (
        difference.case.protocol is Protocol.UDP
        and difference.theirs == STAYS
        and difference.ours.outcomes <= {("refused", ""), ("dropped", ""), ("moved", "")}
    )


CONTESTED = "frontend of two services"
KNOWN: Mapping[str, Known] = {
    "ranges of the other family": Known(
        "`loadBalancerSourceRanges` that name only the other family", _ranges_of_no_use
    ),
    "endpoint said twice": Known("an endpoint that is ready in one slice and not in another", said_twice),
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
    CONTESTED: Known("two Services claim one external address", lambda *_: False),
    **known_iptables.KNOWN,
    **known_ipvs.KNOWN,
}


def contested(difference: Difference, states: Sequence[Sequence[Wanted]]) -> str | None:
    """The name of what explains a difference at a frontend that Services share now, or did a step before.

    A Service that names its own cluster IP as an external one shares it with itself.

    Ours is right only if who answers there is an endpoint of the Service that holds it.
    """
    case = difference.case
    claims = [[each for each in services if serves(each, case)] for services in states]
    if all(len(each) < 2 and not any(_names_its_own(one, case) for one in each) for each in claims):
        return None
    backends = {who.partition(":")[0] for who, source in difference.ours.outcomes if source}
    if backends and not (claims[-1] and backends <= _backends(_holder(claims[-1], case))):
        return None
    return CONTESTED


def _names_its_own(service: Wanted, case: Case) -> bool:
    own = service.addresses(case.family).get(CLUSTER_IP) == case.address
    return own and case.address in service.shared_addresses(case.family)


def _holder(claims: Sequence[Wanted], case: Case) -> Wanted:
    """Whose cluster IP it is, else the first by name: objects of the scenarios have no age."""
    return min(
        claims, key=lambda each: (each.addresses(case.family).get(CLUSTER_IP) != case.address, each.name)
    )


def _backends(service: Wanted) -> set[str]:
    return {endpoint.who for each in service.slices for endpoint in each.endpoints}


def known(
    difference: Difference, service: Wanted | None, before: Wanted | None, mode: str, *, ours: str = ""
) -> str | None:
    """The name of what explains a difference about a service as it is and as it was; None: it was not."""
    for name, each in KNOWN.items():
        if (
            mode.startswith(each.mode)
            and each.ours in ("", ours)
            and each.explains(difference, service, before)
        ):
            return name
    return None
