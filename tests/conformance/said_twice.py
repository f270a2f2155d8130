"""An endpoint that two slices name in different ways: kube-proxy and we may go by different entries.

What may differ then is that endpoint, and those whose use depends on whether it is ready or hinted.
"""

from rulecast.model import Protocol
from tests.conformance.cases import Case, endpoints_of, names_of
from tests.conformance.compare import STAYS, Difference, Seen
from tests.conformance.wanted import CONDITIONS, Endpoint, Wanted


def said_twice(difference: Difference, service: Wanted | None, before: Wanted | None) -> bool:
    """Whether a difference is about such an endpoint of the question's Service port."""
    case, ours, theirs = difference
    if service is None:
        return False
    if case.port == service.health_port:
        return any(_ambiguous(service, each) for each in _ports(service))
    twice = _ambiguous(service, case)
    if STAYS in (ours, theirs):
        # Whether a flow had to go may have been decided by the state before.
        return bool(twice or (before is not None and _ambiguous(before, case)))
    if not twice:
        return False
    sources = {who: source for who, source in ours.outcomes if source}
    if any(sources.get(who, source) != source for who, source in theirs.outcomes if source):
        return False
    differing = _backends(ours) ^ _backends(theirs)
    return differing <= twice.keys() | _dependent(service, case, twice)


def _ports(service: Wanted) -> list[Case]:
    return [
        Case(service.number, "", service.cluster_ip(family), port.port, Protocol(port.protocol))
        for port in service.ports
        for family in service.families
    ]


def _ambiguous(service: Wanted, case: Case) -> dict[str, set[Endpoint]]:
    """The entries of each endpoint and target of a Service port that has several."""
    names = names_of(service, case)
    entries: dict[str, set[Endpoint]] = {}
    for each in service.slices:
        if each.family == case.family:
            for name, target, protocol in each.ports:
                if name in names and protocol == case.protocol:
                    for endpoint in each.endpoints:
                        entries.setdefault(f"{endpoint.who}:{target}", set()).add(
                            endpoint._replace(written="")
                        )
    return {who: said for who, said in entries.items() if len(said) > 1}


def _dependent(service: Wanted, case: Case, twice: dict[str, set[Endpoint]]) -> set[str]:
    """Who else is used or not by which entry counts."""
    targets = {target for each in service.slices for _, target, _ in each.ports}
    endpoints = endpoints_of(service, case)
    if any(each.zones or each.nodes for each in endpoints):
        # Hints count if all that is ready has them.
        return {f"{each.who}:{target}" for each in endpoints for target in targets}
    if all(len({_ready(each) for each in said}) == 1 for said in twice.values()):
        return set()
    # What ends serves while nothing is ready.
    return {f"{each.who}:{target}" for each in endpoints if not _ready(each) for target in targets}


def _ready(endpoint: Endpoint) -> bool:
    return bool(CONDITIONS[endpoint.state].get("ready", True))


def _backends(seen: Seen) -> set[str]:
    return {who for who, source in seen.outcomes if source}
