"""API objects to resources, incrementally: only what an event touched is computed again."""

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import msgspec

from rulecast.model import (
    FLEET,
    Change,
    Changes,
    ClusterInfo,
    EndpointSet,
    Kind,
    NodeInfo,
    ResourceId,
    Scope,
    ServiceKey,
    ServicePort,
    Value,
    node_scope,
)
from rulecast_server.kube.objects import ApiObject, EndpointSlice, Node, ObjectEvent, Service, ServiceCIDR
from rulecast_server.projection.frontends import Frontends, without
from rulecast_server.projection.nodes import Problems, cluster_info, parse_node, parse_service_cidr
from rulecast_server.projection.problems import ObjectRef, Problem, ProblemBook, Reason
from rulecast_server.projection.selection import Endpoints, Selection, select, union
from rulecast_server.projection.services import ParsedService, parse_service
from rulecast_server.projection.slices import PortRows, ReducedSlice, Row, ServiceName, parse_slice
from rulecast_server.projection.topology import Topology

_KINDS: Mapping[str, type[ApiObject]] = {
    "endpointslices": EndpointSlice,
    "nodes": Node,
    "servicecidrs": ServiceCIDR,
    "services": Service,
}
_NODE = ResourceId(Kind.NODE, "")
_CLUSTER = ResourceId(Kind.CLUSTER, "")


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the projection."""

    changes: Changes
    trigger_times: Mapping[ServiceKey, float]
    """For Service ports whose endpoints changed: the earliest unix seconds at which the EndpointSlice
    controller was triggered (annotation last-change-trigger-time). Absent when unknown, and in the first
    step, where the times are those of changes long past."""
    problems: tuple[Problem, ...]
    """Those first seen in this step."""


class _Emitted:
    """What stands for one Service port."""

    __slots__ = ("port", "selection")

    def __init__(self, port: ServicePort, selection: Selection) -> None:
        self.port = port
        self.selection = selection


class Projector:
    """Holds what of the API objects matters, and what was emitted. Pure and synchronous."""

    def __init__(self) -> None:
        self._pending: dict[ObjectRef, ApiObject | None] = {}
        self._first = True
        self._problems = ProblemBook()
        self._topology = Topology()
        self._service_cidrs: dict[str, tuple[str, ...]] = {}
        self._cluster: ClusterInfo | None = None
        self._services: dict[ServiceName, ParsedService] = {}
        self._frontends = Frontends()
        self._slices: dict[tuple[str, str], ReducedSlice] = {}
        self._slices_of: dict[ServiceName, dict[str, ReducedSlice]] = {}
        self._trigger_times: dict[tuple[str, str], float] = {}
        self._emitted: dict[ServiceName, dict[ServiceKey, _Emitted]] = {}

    @property
    def problems(self) -> Iterator[Problem]:
        """The problems that stand, in no particular order."""
        return iter(self._problems)

    def zone_of(self, node: str) -> str | None:
        """The zone of a node as of the last flush, "" when it has none; None: no such Node."""
        return self._topology.zone_of(node)

    def apply(self, events: Iterable[ObjectEvent]) -> None:
        """Take note of events; only the newest of each object counts at the next flush.

        Raises TypeError for an object that is not of the named resource.
        """
        for event in events:
            kind = _KINDS.get(event.resource)
            if kind is None or not (event.object is None or isinstance(event.object, kind)):
                raise TypeError(f"not one of {event.resource}: {type(event.object).__name__}")
            self._pending[ObjectRef(event.resource, event.namespace, event.name)] = event.object

    def flush(self) -> Projection:
        """Compute what the events since the last flush changed."""
        pending, self._pending = self._pending, {}
        changes: Changes = {}
        dirty: set[ServiceName] = set()
        triggers: dict[ServiceName, float] = {}
        cidrs_changed = self._first
        for ref, item in pending.items():
            # The types were checked by `apply`.
            if ref.resource == "endpointslices":
                self._slice(dirty, triggers, ref, cast(EndpointSlice | None, item))
            elif ref.resource == "services":
                self._service(dirty, ref, cast(Service | None, item))
            elif ref.resource == "nodes":
                self._node(changes, ref, cast(Node | None, item))
            else:
                cidrs_changed |= self._service_cidr(ref, cast(ServiceCIDR | None, item))
        if cidrs_changed:
            # Always present, so that empty needs no removal on the wire.
            cluster = cluster_info(self._service_cidrs.values())
            _record(changes, FLEET, _CLUSTER, self._cluster, cluster)
            self._cluster = cluster
        for key in self._frontends.take_affected():
            dirty.add(_service_of(key))
        dirty |= self._topology.take_affected()
        times: dict[ServiceKey, float] = {}
        for service in dirty:
            moved = self._recompute(changes, service)
            if service in triggers and not self._first:
                times.update(dict.fromkeys(moved, triggers[service]))
        self._first = False
        return Projection(changes=changes, trigger_times=times, problems=self._problems.take_new())

    def _node(self, changes: Changes, ref: ObjectRef, node: Node | None) -> None:
        info: NodeInfo | None = None
        problems: Problems = ()
        if node is not None:
            info, problems = parse_node(ref.name, node)
        self._problems.put(ref, problems)
        old = self._topology.put(ref.name, info)
        _record(changes, node_scope(ref.name), _NODE, old, info)

    def _service_cidr(self, ref: ObjectRef, service_cidr: ServiceCIDR | None) -> bool:
        if service_cidr is None:
            self._problems.put(ref, ())
            return self._service_cidrs.pop(ref.name, None) is not None
        cidrs, problems = parse_service_cidr(service_cidr)
        self._problems.put(ref, problems)
        old = self._service_cidrs.get(ref.name)
        self._service_cidrs[ref.name] = cidrs
        return old != cidrs

    def _slice(
        self,
        dirty: set[ServiceName],
        triggers: dict[ServiceName, float],
        ref: ObjectRef,
        piece: EndpointSlice | None,
    ) -> None:
        slice_key = (ref.namespace, ref.name)
        old = self._slices.get(slice_key)
        new: ReducedSlice | None = None
        if piece is None:
            self._problems.put(ref, ())
            self._trigger_times.pop(slice_key, None)
        else:
            new, problems, trigger = parse_slice(ref.namespace, ref.name, piece)
            self._problems.put(ref, problems)
            if trigger is None or new is None:
                self._trigger_times.pop(slice_key, None)
            elif self._trigger_times.get(slice_key) != trigger:
                self._trigger_times[slice_key] = trigger
                triggers[new.service] = min(trigger, triggers.get(new.service, trigger))
        if old == new:
            return
        if old is not None:
            dirty.add(old.service)
            siblings = self._slices_of[old.service]
            del siblings[ref.name], self._slices[slice_key]
            if not siblings:
                del self._slices_of[old.service]
        if new is not None:
            dirty.add(new.service)
            self._slices[slice_key] = new
            self._slices_of.setdefault(new.service, {})[ref.name] = new

    def _service(self, dirty: set[ServiceName], ref: ObjectRef, service: Service | None) -> None:
        name = ServiceName(ref.namespace, ref.name)
        old = self._services.get(name)
        new = None if service is None else parse_service(name.namespace, name.name, service)
        if old == new:
            return
        dirty.add(name)
        keys = {port.key for port in new.ports} if new is not None else set()
        for port in old.ports if old is not None else ():
            if port.key not in keys:
                self._frontends.remove(port.key)
        if new is None:
            del self._services[name]
            return
        self._services[name] = new
        for port in new.ports:
            self._frontends.put(port, new.created)

    def _recompute(self, changes: Changes, name: ServiceName) -> list[ServiceKey]:
        """Compute one Service's resources and record what differs; returns ports whose endpoints moved."""
        before = self._emitted.get(name, {})
        after = self._project(name)
        moved = [
            key
            for key in before.keys() | after.keys()
            if _record_port(changes, key, before.get(key), after.get(key))
        ]
        if after:
            self._emitted[name] = after
        else:
            self._emitted.pop(name, None)
        selections = [emitted.selection for emitted in after.values()]
        self._topology.depend(
            name,
            on_zones=any(selection.zone_hinted for selection in selections),
            on_nodes=frozenset().union(*(selection.hinted_nodes for selection in selections)),
        )
        return moved

    def _project(self, name: ServiceName) -> dict[ServiceKey, _Emitted]:
        parsed = self._services.get(name)
        ref = ObjectRef("services", name.namespace, name.name)
        if parsed is None:
            self._problems.put(ref, ())
            return {}
        problems = list(parsed.problems)
        parts: dict[tuple[str, str, int], list[tuple[PortRows, tuple[Row, ...]]]] = {}
        slices = self._slices_of.get(name, {})
        for slice_name in sorted(slices):
            piece = slices[slice_name]
            for rows in piece.ports:
                parts.setdefault((rows.name, rows.protocol, piece.family), []).append((rows, piece.rows))
        emitted: dict[ServiceKey, _Emitted] = {}
        for wanted in parsed.ports:
            lost = self._frontends.lost(wanted)
            for frontend in lost:
                holder = self._frontends.winner(frontend)
                problems.append((Reason.FRONTEND_TAKEN, f"{frontend} of {wanted.key} is held by {holder}"))
            fields = without(wanted, lost) if lost else {}
            if fields is None:
                continue
            port = msgspec.structs.replace(wanted, **fields) if fields else wanted
            _, _, port_name, protocol, family = port.name
            own = parts.get((port_name, protocol, family))
            selection = select(
                union(own) if own else Endpoints(),
                protocol=protocol,
                uses_cluster=port.uses_cluster_endpoints,
                zones=self._topology.zones,
                node_exists=self._topology.has_node,
            )
            external_local = port.external_local and port.externally_reachable
            if selection.has_endpoints or external_local != port.external_local:
                port = msgspec.structs.replace(
                    port, has_endpoints=selection.has_endpoints, external_local=external_local
                )
            emitted[port.key] = _Emitted(port, selection)
        self._problems.put(ref, problems)
        return emitted


def _record(
    changes: Changes, scope: Scope, resource: ResourceId, old: Value | None, new: Value | None
) -> None:
    if old != new:
        changes.setdefault(scope, {})[resource] = Change(old, new)


def _record_port(changes: Changes, key: ServiceKey, old: _Emitted | None, new: _Emitted | None) -> bool:
    """Record what differs of one Service port; True when an endpoint set does."""
    _record(
        changes, FLEET, ResourceId(Kind.SERVICE, key), old.port if old else None, new.port if new else None
    )
    old_sets = old.selection if old else _NOTHING
    new_sets = new.selection if new else _NOTHING
    moved = False
    if old_sets.cluster != new_sets.cluster:
        moved = True
        resource = ResourceId(Kind.CLUSTER_ENDPOINTS, key)
        for scope in old_sets.cluster.keys() | new_sets.cluster.keys():
            _record(changes, scope, resource, old_sets.cluster.get(scope), new_sets.cluster.get(scope))
    if old_sets.local != new_sets.local:
        moved = True
        resource = ResourceId(Kind.LOCAL_ENDPOINTS, key)
        for node, was, now in _differences(old_sets.local, new_sets.local):
            scope = node_scope(node)
            held = changes.get(scope)
            if held is None:
                held = changes[scope] = {}
            held[resource] = Change(was, now)
    if old_sets.serving != new_sets.serving:
        moved = True
        _record(changes, FLEET, ResourceId(Kind.SERVING_ENDPOINTS, key), old_sets.serving, new_sets.serving)
    return moved


def _differences(
    old: Mapping[str, EndpointSet], new: Mapping[str, EndpointSet]
) -> Iterator[tuple[str, EndpointSet | None, EndpointSet | None]]:
    for node, now in new.items():
        was = old.get(node)
        if was != now:
            yield node, was, now
    for node, was in old.items():
        if node not in new:
            yield node, was, None


_NOTHING = Selection({}, {}, None, False, False, frozenset())


def _service_of(key: ServiceKey) -> ServiceName:
    namespace, _, rest = key.partition("/")
    return ServiceName(namespace, rest.partition(":")[0])
