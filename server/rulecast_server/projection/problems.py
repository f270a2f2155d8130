"""What is wrong with API objects, said by name; the wrong part is left out and everything else goes on."""

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec


class Reason(enum.StrEnum):
    """Why an object, or a part of it, gives no rules. Values are metric labels."""

    BAD_ADDRESS = "bad-address"
    BAD_CIDR = "bad-cidr"
    WRONG_FAMILY = "wrong-family"
    """An address in whose family the Service has no cluster IP, or not of the slice's type."""
    NO_CLUSTER_IP = "no-cluster-ip"
    BAD_NAME = "bad-name"
    """No API server admits it, and it would not fit a resource's key."""
    BAD_PORT = "bad-port"
    BAD_PROTOCOL = "bad-protocol"
    DUPLICATE_PORT = "duplicate-port"
    """Two ports of one Service with the same name and protocol; the first counts."""
    BAD_TIMEOUT = "bad-affinity-timeout"
    NO_HEALTH_CHECK_PORT = "no-health-check-node-port"
    FRONTEND_TAKEN = "frontend-taken"
    """Another Service port holds the address and port; it is tried again when that one goes."""
    NO_SERVICE_LABEL = "no-service-label"
    NO_ADDRESS = "no-address"


class ObjectRef(NamedTuple):
    """An API object by the plural of its resource, as in ObjectEvent."""

    resource: str
    namespace: str
    name: str


class Problem(msgspec.Struct, frozen=True, order=True):
    """One thing wrong with one object."""

    object: ObjectRef
    reason: Reason
    detail: str
    """One line for people; names the value and the place."""


class ProblemBook:
    """The problems that stand, by object, and those that are new since last asked."""

    def __init__(self) -> None:
        self._standing: dict[ObjectRef, tuple[Problem, ...]] = {}
        self._new: dict[Problem, None] = {}

    def put(self, ref: ObjectRef, problems: Iterable[tuple[Reason, str]]) -> None:
        """Replace what stands against an object; an empty iterable clears it."""
        now = tuple(dict.fromkeys(Problem(ref, reason, detail) for reason, detail in problems))
        before = self._standing.get(ref, ())
        if now == before:
            return
        for problem in before:
            self._new.pop(problem, None)
        for problem in now:
            if problem not in before:
                self._new[problem] = None
        if now:
            self._standing[ref] = now
        else:
            del self._standing[ref]

    def take_new(self) -> tuple[Problem, ...]:
        """The problems that stand and were not returned before."""
        new, self._new = tuple(self._new), {}
        return new

    def __iter__(self) -> Iterator[Problem]:
        for problems in self._standing.values():
            yield from problems

    def __len__(self) -> int:
        return sum(map(len, self._standing.values()))
