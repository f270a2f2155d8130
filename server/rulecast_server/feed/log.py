"""The delta log: every scope's contents at the head, and what recent revisions changed.

Pure and synchronous. It is bounded by one budget over all scopes, so that thousands of nodes' scopes cannot
add up: a busy fleet shortens everyone's history, and a scope that does not change needs none.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rulecast.model import FLEET, Changes, EndpointSet, Revision, Scope, ServiceKey, node_scope
from rulecast.wire.frames import mark_frame
from rulecast_server.feed.scope import Before, ScopeState

_MAX_MARKS = 256


class LogLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How far back deltas reach. At 100 changes a second, the defaults are some minutes and 20 MB."""

    revisions: int = 10_000
    weight: int = 50_000
    """Replaced values kept; a large endpoint set counts for one more every 8 members."""


class _Revision(NamedTuple):
    scopes: tuple[ScopeState, ...]
    weight: int
    resource_versions: Mapping[str, int]


class DeltaLog:
    """Takes the projector's changes; sessions read from it."""

    def __init__(self, limits: LogLimits | None = None) -> None:
        self._limits = limits or LogLimits()
        self.revision = Revision(0)
        """This replica's count of steps that changed something. 0: nothing is known, and nothing served."""
        self.horizon = Revision(0)
        """The oldest revision from which deltas can be made."""
        self.resource_versions: Mapping[str, int] = {}
        """Up to where each collection is in the head."""
        self.changed_versions: Mapping[str, int] = {}
        """Of the newest object or deletion of each."""
        self._scopes: dict[Scope, ScopeState] = {}
        self._revisions: deque[_Revision] = deque()
        self._weight = 0
        self._marks: dict[tuple[int, int], bytes] = {}

    @property
    def synced(self) -> bool:
        """The first projection is in."""
        return self.revision > 0

    @property
    def retained(self) -> tuple[int, int]:
        """Revisions in the log and their weight."""
        return len(self._revisions), self._weight

    @property
    def scopes(self) -> Mapping[Scope, ScopeState]:
        """All scopes that hold or recently held something."""
        return self._scopes

    def apply(
        self,
        changes: Changes,
        *,
        trigger_times: Mapping[ServiceKey, float] | None = None,
        resource_versions: Mapping[str, int] | None = None,
        changed_versions: Mapping[str, int] | None = None,
    ) -> frozenset[Scope]:
        """Append one step; returns the scopes that it changed.

        `changed_versions`: those of the newest objects; None: the same as `resource_versions`.

        The first call makes revision 1 even when there is nothing at all. Later ones without changes make
        none: resource versions alone travel with the next mark.
        """
        if resource_versions is not None and resource_versions != self.resource_versions:
            self.resource_versions = dict(resource_versions)
            self._marks.clear()
        if resource_versions is not None:
            self.changed_versions = dict(resource_versions if changed_versions is None else changed_versions)
        if not changes and self.synced:
            return frozenset()
        self.revision = Revision(self.revision + 1)
        self._marks.clear()
        states: list[ScopeState] = []
        weight = 0
        for scope, resources in changes.items():
            state = self._scopes.get(scope)
            if state is None:
                state = self._scopes[scope] = ScopeState(scope)
            weight += _weight(state.advance(self.revision, resources, trigger_times or {}))
            states.append(state)
        self._revisions.append(_Revision(tuple(states), weight, self.resource_versions))
        self._weight += weight
        self._trim()
        return frozenset(changes) | {FLEET} if self.revision == 1 else frozenset(changes)

    def scope(self, name: Scope) -> ScopeState:
        """A scope's state; an empty one for a scope in which nothing is."""
        state = self._scopes.get(name)
        return ScopeState(name) if state is None else state

    def zone_of(self, node: str) -> str:
        """The zone of a node, "" when it has none or is not known."""
        state = self._scopes.get(node_scope(node))
        info = state.node if state is not None else None
        return info.zone if info is not None else ""

    def knows(self, node: str) -> bool:
        """There is a Node of this name."""
        state = self._scopes.get(node_scope(node))
        return state is not None and state.node is not None

    def mark(self, since: int, time_ms: int, interval_ms: int) -> bytes:
        """The mark that takes a holder of revision `since` to the head.

        `time_ms` is rounded down to a tenth of a second, so that sessions share it. A holder without history
        (0) is told every resource version and the interval.
        """
        key = (since, time_ms // 100)
        frame = self._marks.get(key)
        if frame is None:
            if len(self._marks) >= _MAX_MARKS:
                self._marks.clear()
            known: Mapping[str, int] = {}
            if self.horizon < since < self.revision:
                known = self._revisions[since - self.horizon - 1].resource_versions
            moved = {
                name: version
                for name, version in self.resource_versions.items()
                if known.get(name) != version
            }
            frame = self._marks[key] = mark_frame(
                revision=self.revision,
                time_ms=key[1] * 100,
                resource_versions=moved,
                changed_versions={
                    name: self.changed_versions.get(name, 0)
                    for name, version in moved.items()
                    if self.changed_versions.get(name, 0) != version
                },
                interval_ms=0 if since else interval_ms,
            )
        return frame

    def _trim(self) -> None:
        # The first revision is everything there is: no agent resumes from before it.
        limits = self._limits
        while self._revisions and (
            self.horizon == 0 or len(self._revisions) > limits.revisions or self._weight > limits.weight
        ):
            oldest = self._revisions.popleft()
            self._weight -= oldest.weight
            self.horizon = Revision(self.horizon + 1)
            for state in oldest.scopes:
                state.forget_oldest()
                if state.forgettable and state.name != FLEET:
                    del self._scopes[state.name]


def _weight(before: Before) -> int:
    return sum(
        1 + (len(value.members) >> 3 if isinstance(value, EndpointSet) else 0) for value in before.values()
    )
