"""What this node should have: frames in, committed updates out.

Pure and synchronous. Frames are staged and take effect with the mark that closes their step, all together;
a step whose mark never comes leaves no trace. After each step the digests must be the server's: while they
are not, nothing is handed on, and the server is asked for what differs, first by buckets, then as a whole.
Content that differs even from a whole scope's digest is something that this version cannot read: it is used,
since it is what the server sent, and reported as unverified.
"""

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rulecast.model import (
    ClusterInfo,
    EndpointSet,
    Kind,
    NodeInfo,
    ResourceId,
    Revision,
    Scope,
    ServiceKey,
    ServicePort,
    Value,
    node_scope,
)
from rulecast.view import ServiceView, Update
from rulecast.wire.messages import (
    Frame,
    Mark,
    Position,
    Resync,
    ScopeStep,
    SetChange,
    Slot,
    WireError,
    slot_of,
)
from rulecast_agent.feed.store import ScopeStore

_RETRY_MARKS = 10
"""A question that so many marks left unanswered is put again."""
_NOTHING = EndpointSet()
_PATIENCE = 30.0
"""Seconds for a server to reach what we have; then the cluster has gone back (restored from a backup)."""


class Commit(NamedTuple):
    """What a mark brought about."""

    mark: Mark
    update: Update | None
    """None: this node's rules stay as they are."""
    resync: Resync | None
    """To be asked of the server."""
    committed: bool
    """The step took effect. If not, its content waits to be mended, or to be as new as what we have."""


class _Doubt(enum.Enum):
    NONE = 0
    BUCKETS = 1
    """Asked for the buckets that differ."""
    WHOLE = 2
    """Asked for everything."""


class _Changes(NamedTuple):
    services: dict[ServiceKey, ServiceView | None]
    node: NodeInfo | None
    cluster: ClusterInfo


class Desired:
    """The content of this node's three scopes, and the views made of it."""

    def __init__(self, node_name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._node_name = node_name
        self._clock = clock
        self._stores = {
            Slot.FLEET: ScopeStore(Scope("fleet")),
            Slot.ZONE: ScopeStore(Scope("zone/")),
            Slot.NODE: ScopeStore(node_scope(node_name)),
        }
        self._filled: set[Slot] = set()
        """Slots of which we hold content that may be built upon."""
        self._staged: list[ScopeStep] = []
        self._expected: dict[Slot, int] = {}
        self._dirty: set[str] = set()
        self._triggers: dict[str, int] = {}
        self._views: dict[ServiceKey, ServiceView] = {}
        self._node: NodeInfo | None = None
        self._cluster = ClusterInfo()
        self._revision = 0
        self._doubt = _Doubt.NONE
        self._question_id = 0
        """Of the last question on this stream."""
        self._marks_unanswered = 0
        self._unverified: set[Slot] = set()
        self._unknown = 0
        self.resource_versions: dict[str, int] = {}
        """Up to where the server of this stream is, by collection."""
        self._changed_versions: dict[str, int] = {}
        """Of the newest object in the content of this stream."""
        self.reached: dict[str, int] = {}
        """Of the newest object in what was handed on: a server has to have seen it, to take us further."""
        self._held_since: float | None = None
        """When a step was first held back because the server is behind that."""
        self.counters: Counter[str] = Counter()

    @property
    def revision(self) -> Revision:
        """The count of updates handed on."""
        return Revision(self._revision)

    @property
    def views(self) -> Mapping[ServiceKey, ServiceView]:
        """What the updates so far add up to."""
        return self._views

    @property
    def waiting(self) -> bool:
        """The digests are not the server's, and it was asked; nothing is handed on meanwhile."""
        return self._doubt is not _Doubt.NONE

    @property
    def holding(self) -> bool:
        """What we hold is older than what was handed on."""
        return self._held_since is not None

    @property
    def held_because(self) -> str:
        """Why nothing is handed on while `holding`."""
        behind = (
            f"{name} at {self.resource_versions[name]}, not {self.reached[name]}" for name in self._behind()
        )
        return f"the server is behind what this node has ({', '.join(behind)}); its rules stay"

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a line each."""
        lines = [
            f"{self._stores[slot].scope}: content does not match the server's digest"
            for slot in self._unverified
        ]
        if self.waiting:
            lines.append("waiting for the server to mend what differs from its digest")
        if self.holding:
            lines.append(self.held_because)
        if self._unknown:
            lines.append(f"{self._unknown} changes are of kinds that this version does not know")
        return tuple(lines)

    def position(self) -> Position:
        """What we hold, by content."""
        return {slot: self._stores[slot].position for slot in sorted(self._filled)}

    def contents(self) -> list[tuple[Scope, list[tuple[ResourceId, Value]]]]:
        """Everything held, as a copy that stays as it is."""
        return [
            (self._stores[slot].scope, list(self._stores[slot].resources())) for slot in sorted(self._filled)
        ]

    def restore(
        self,
        contents: Iterable[tuple[Scope, Iterable[tuple[ResourceId, Value]]]],
        reached: Mapping[str, int] | None = None,
    ) -> Update:
        """Start from saved content; returns the first, full update. Only before any frame."""
        self.reached = dict(reached or {})
        for scope, resources in contents:
            store = ScopeStore(scope)
            for resource, value in resources:
                store.load(resource, value)
            self._stores[slot_of(scope)] = store
            self._filled.add(slot_of(scope))
        update = self._emit(self._changes())
        assert update is not None
        return update

    def begin(self) -> None:
        """A new stream: what was staged of the old one is void, and so are its questions."""
        self._staged.clear()
        self._expected.clear()
        self._doubt = _Doubt.NONE
        self._question_id = 0
        self._unverified.clear()
        self.resource_versions, self._changed_versions = {}, {}

    def frame(self, frame: Frame) -> Commit | None:
        """Take one frame; a Commit when it closed a step.

        Raises WireError for what no server of any version would send; the stream is then of no use.
        """
        for step in frame.steps:
            if step.scope is not None and slot_of(step.scope) is not step.slot:
                raise WireError(f"scope {step.scope!r} in the {step.slot.name.lower()} field")
        self._staged += frame.steps
        return self._commit(frame.mark) if frame.mark is not None else None

    def _commit(self, mark: Mark) -> Commit:
        staged, self._staged = self._staged, []
        for step in staged:
            self._apply(step)
        self.resource_versions.update(mark.resource_versions)
        self._changed_versions.update({**mark.resource_versions, **mark.changed_versions})
        self.counters["marks"] += 1
        if len(self._filled) < len(Slot):
            raise WireError("a mark before all scopes were sent")
        wrong = {slot for slot, digest in self._expected.items() if self._stores[slot].digest != digest}
        self._unverified &= wrong
        resync = self._question(wrong - self._unverified, answered=mark.resync == self._question_id)
        if self.waiting:
            return Commit(mark, None, resync, committed=False)
        changes = self._changes()
        if changes is not None and self._revision and self._behind():
            now = self._clock()
            if self._held_since is None:
                self._held_since = now
                self.counters["held"] += 1
            if now - self._held_since < _PATIENCE:
                return Commit(mark, None, None, committed=False)
            self.counters["went_back"] += 1
            self.reached = {}
        self._held_since = None
        for name, version in self._changed_versions.items():
            self.reached[name] = max(version, self.reached.get(name, 0))
        return Commit(mark, self._emit(changes), None, committed=True)

    def _behind(self) -> list[str]:
        """The collections in which the server has not seen all that we have.

        resourceVersions of one cluster are numbers that can be compared (KEP-5504).
        """
        return [
            name
            for name, version in sorted(self.reached.items())
            if self.resource_versions.get(name, version) < version
        ]

    def _apply(self, step: ScopeStep) -> None:
        store = self._stores[step.slot]
        if step.scope is not None:
            if step.reset == ():
                self.counters["resets"] += 1
                self._dirty |= store.clear(())
                store = self._stores[step.slot] = ScopeStore(step.scope)
            elif step.scope != store.scope:
                raise WireError(f"changes of {step.scope!r} upon {store.scope!r}")
            elif step.reset is not None:
                self.counters["bucket_resets"] += len(step.reset)
                self._dirty |= store.clear(step.reset)
            self._filled.add(step.slot)
        elif step.reset is not None:
            raise WireError("a reset without the scope's name")
        if step.slot not in self._filled:
            raise WireError(f"changes of a {step.slot.name.lower()} scope that was not sent")
        if step.unknown:
            self._unknown += step.unknown
            self.counters["unknown_changes"] += step.unknown
        for operation in step.operations:
            store.apply(operation)
            self._dirty.add(operation.resource.key)
            if isinstance(operation, SetChange) and operation.trigger_time_ms:
                key = operation.resource.key
                held = self._triggers.get(key, operation.trigger_time_ms)
                self._triggers[key] = min(held, operation.trigger_time_ms)
        if step.digest is not None:
            self._expected[step.slot] = step.digest

    def _question(self, wrong: set[Slot], *, answered: bool) -> Resync | None:
        """What to ask the server, given the slots whose digests are wrong."""
        if not wrong:
            self._doubt = _Doubt.NONE
            return None
        if self._doubt is _Doubt.NONE:
            self.counters["mismatches"] += 1
            return self._ask(_Doubt.BUCKETS)
        if not answered:
            self._marks_unanswered += 1
            return self._ask(self._doubt) if self._marks_unanswered >= _RETRY_MARKS else None
        if self._doubt is _Doubt.BUCKETS:
            return self._ask(_Doubt.WHOLE)
        self._doubt = _Doubt.NONE
        self._unverified |= wrong
        self.counters["unverified"] += 1
        return None

    def _ask(self, doubt: _Doubt) -> Resync:
        self._doubt = doubt
        self._marks_unanswered = 0
        self._question_id += 1
        return Resync(id=self._question_id, position=self.position() if doubt is _Doubt.BUCKETS else {})

    def _changes(self) -> _Changes | None:
        """How what we hold differs from what was handed on; None: not at all."""
        full = not self._revision
        dirty: Iterable[str] = self._dirty
        if full:
            dirty = {key for store in self._stores.values() for key in store.table(Kind.SERVICE)}
        services = {}
        for key in map(ServiceKey, dirty):
            view = self._view(key)
            if view != self._views.get(key):
                services[key] = view
        node = self._stores[Slot.NODE].table(Kind.NODE).get("")
        assert node is None or isinstance(node, NodeInfo)
        cluster = self._stores[Slot.FLEET].table(Kind.CLUSTER).get("", ClusterInfo())
        assert isinstance(cluster, ClusterInfo)
        if not (full or services or node != self._node or cluster != self._cluster):
            return None
        return _Changes(services, node, cluster)

    def _emit(self, changes: _Changes | None) -> Update | None:
        triggers, self._triggers = self._triggers, {}
        self._dirty.clear()
        if changes is None:
            return None
        for key, view in changes.services.items():
            if view is None:
                del self._views[key]
            else:
                self._views[key] = view
        self._node, self._cluster = changes.node, changes.cluster
        full = not self._revision
        self._revision += 1
        self.counters["updates"] += 1
        return Update(
            revision=self.revision,
            full=full,
            services=changes.services,
            node=changes.node,
            cluster=changes.cluster,
            trigger_times={
                ServiceKey(key): when / 1000
                for key, when in triggers.items()
                if ServiceKey(key) in changes.services
            },
        )

    def _view(self, key: ServiceKey) -> ServiceView | None:
        service = self._first(Kind.SERVICE, key)
        if not isinstance(service, ServicePort):
            return None
        local = self._set(Kind.LOCAL_ENDPOINTS, key)
        return ServiceView(
            service=service,
            cluster=self._set(Kind.CLUSTER_ENDPOINTS, key).members,
            local=local.members,
            serving=self._set(Kind.SERVING_ENDPOINTS, key).members,
            local_ready=local.ready,
        )

    def _set(self, kind: Kind, key: str) -> EndpointSet:
        value = self._first(kind, key)
        return value if isinstance(value, EndpointSet) else _NOTHING

    def _first(self, kind: Kind, key: str) -> Value | None:
        """The most specific scope's value."""
        for slot in (Slot.NODE, Slot.ZONE, Slot.FLEET):
            value = self._stores[slot].table(kind).get(key)
            if value is not None:
                return value
        return None
