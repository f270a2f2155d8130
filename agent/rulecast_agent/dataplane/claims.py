"""Who has an address and port that several services want: the same one on every node, in every mode. Pure."""

import enum
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from rulecast.model import ServiceKey

K = TypeVar("K", bound=Hashable)


class Role(enum.IntEnum):
    """Why a service answers at an address. Where two want the same one, the lower role has it."""

    CLUSTER_IP = 0
    NODE_PORT = 1
    LOAD_BALANCER = 2
    EXTERNAL_IP = 3


Claim = tuple[Role, ServiceKey]


class Claims(Generic[K]):
    """Every claim; the lowest one to a place has it."""

    def __init__(self) -> None:
        self._claims: dict[K, tuple[Claim, ...]] = {}

    def change(
        self, key: ServiceKey, *, before: Mapping[K, Role], after: Mapping[K, Role]
    ) -> Iterator[ServiceKey]:
        """Replace the claims of a service; gives others whose ownership may change by it."""
        for place in {**before, **after}:
            if before.get(place) == after.get(place):
                continue
            others = tuple(claim for claim in self._claims.get(place, ()) if claim[1] != key)
            if place in after:
                self._claims[place] = tuple(sorted((*others, (after[place], key))))
            elif others:
                self._claims[place] = others
            else:
                del self._claims[place]
            yield from (claim[1] for claim in others)

    def owner(self, place: K) -> ServiceKey | None:
        """Who has it; None when nobody wants it."""
        claims = self._claims.get(place)
        return claims[0][1] if claims else None
