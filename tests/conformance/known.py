"""The differences that docs/differences.md gives reasons for, each as narrow as it can be told."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rulecast.model import Family
from tests.conformance.compare import Difference
from tests.conformance.wanted import Endpoint, Wanted
from tests.netns.objects import VIP


class Known(NamedTuple):
    """One of them; `row` is how its row in the document begins."""

    row: str
    explains: Callable[[Difference, Wanted], bool]


def _ranges_of_the_other_family(difference: Difference, service: Wanted) -> bool:
    """Ours drops, theirs lets pass, at a VIP whose family no range is of."""
    family = difference.case.family
    of_family = [each for each in service.ranges if (":" in each) == (family is Family.IPV6)]
    return (
        difference.case.address == service.addresses(family).get(VIP)
        and bool(service.ranges)
        and not of_family
        and difference.ours.outcomes == {("dropped", "")}
    )


def _said_twice(difference: Difference, service: Wanted) -> bool:
    """An endpoint that is in two slices, with another state or other hints in each."""
    entries: dict[tuple[str, int], set[Endpoint]] = {}
    for each in service.slices:
        if each.family == difference.case.family:
            for endpoint in each.endpoints:
                for _, target, _ in each.ports:
                    entries.setdefault((endpoint.who, target), set()).add(endpoint)
    return any(len(each) > 1 for each in entries.values())


KNOWN: Mapping[str, Known] = {
    "ranges of the other family": Known(
        "`loadBalancerSourceRanges` that name only the other family", _ranges_of_the_other_family
    ),
    "endpoint said twice": Known("an endpoint that is ready in one slice and not in another", _said_twice),
}


def known(difference: Difference, service: Wanted | None) -> str | None:
    """The name of what explains a difference."""
    if service is None:
        return None
    return next((name for name, each in KNOWN.items() if each.explains(difference, service)), None)
