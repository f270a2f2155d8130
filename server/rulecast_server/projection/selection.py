"""Which endpoints serve one Service port, for each scope (kube-proxy's CategorizeEndpoints, KEP-1669,
KEP-2433 and KEP-3015).

The decision is taken once for the fleet, a zone or a node, not once per node that belongs to it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rulecast.model import FLEET, Endpoint, EndpointSet, Protocol, Scope, node_scope, zone_scope
from rulecast_server.projection.slices import (
    FALLBACK,
    READY,
    SERVING,
    PortRows,
    Row,
    rank,
)


class Endpoints(NamedTuple):
    """The union of a Service port's slices: sorted endpoints and, parallel to them, their rows."""

    members: Sequence[Endpoint] = ()
    rows: Sequence[Row] = ()


class Selection(NamedTuple):
    """All endpoint resources of one Service port."""

    cluster: dict[Scope, EndpointSet]
    local: dict[str, EndpointSet]
    """By node name."""
    serving: EndpointSet | None
    has_endpoints: bool
    zone_hinted: bool
    """The cluster sets depend on which zones exist."""
    hinted_nodes: frozenset[str]
    """The cluster sets depend on which of these nodes exist."""


def union(parts: Sequence[tuple[PortRows, tuple[Row, ...]]]) -> Endpoints:
    """Join the parts that slices contribute, given in the order of the slices' names.

    An endpoint that several slices name counts once: as ready if any says so, else as serving, else as the
    first slice has it, so that no order of arrival matters (kubernetes/kubernetes#121556).
    """
    if len(parts) == 1:
        return Endpoints(parts[0][0].members, parts[0][1])
    best: dict[Endpoint, Row] = {}
    for port, rows in parts:
        part = dict(zip(port.members, rows, strict=True))
        if not best.keys().isdisjoint(part):
            for endpoint in best.keys() & part.keys():
                if rank(best[endpoint]) <= rank(part[endpoint]):
                    del part[endpoint]
        best.update(part)
    members = sorted(best)
    return Endpoints(members, [best[member] for member in members])


def select(
    endpoints: Endpoints,
    *,
    protocol: Protocol,
    uses_cluster: bool,
    zones: Iterable[str],
    node_exists: Callable[[str], bool],
) -> Selection:
    """Resolve the decision table for one Service port.

    `zones` are those that nodes have. The union of scopes (node over zone over fleet) gives each node what
    kube-proxy would compute there.
    """
    members, rows = endpoints
    ready = [index for index, row in enumerate(rows) if row.conditions & READY]
    usable = ready or [index for index, row in enumerate(rows) if row.conditions & FALLBACK == FALLBACK]
    cluster: dict[Scope, EndpointSet] = {}
    by_zone = by_node = False
    hinted: Mapping[str, list[Endpoint]] = {}
    if uses_cluster and usable:
        by_zone = bool(ready) and all(rows[index].zone_hints for index in ready)
        by_node = bool(ready) and all(rows[index].node_hints for index in ready)
        everywhere = EndpointSet(members=_pick(members, usable))
        if by_zone:
            in_zone = _by_hint(endpoints, ready, lambda row: row.zone_hints)
            for zone in zones:
                near = in_zone.get(zone)
                cluster[zone_scope(zone)] = EndpointSet(members=tuple(near)) if near else everywhere
        else:
            cluster[FLEET] = everywhere
        if by_node:
            hinted = _by_hint(endpoints, ready, lambda row: row.node_hints)
            for node, near in hinted.items():
                if node_exists(node):
                    cluster[node_scope(node)] = EndpointSet(members=tuple(near))
    serving: EndpointSet | None = None
    if protocol is Protocol.UDP:
        indices = [index for index, row in enumerate(rows) if row.conditions & SERVING]
        serving = EndpointSet(members=_pick(members, indices))
        # With topology a narrower set could be taken for it, so it is spelled out even when empty.
        fleet = cluster.get(FLEET, EndpointSet())
        if not (by_zone or by_node) and serving == fleet:
            serving = None
    return Selection(cluster, _local(members, rows), serving, bool(usable), by_zone, frozenset(hinted))


def _pick(members: Sequence[Endpoint], indices: list[int]) -> tuple[Endpoint, ...]:
    if len(indices) == len(members):
        return tuple(members)
    return tuple([members[index] for index in indices])


def _by_hint(
    endpoints: Endpoints, indices: list[int], hints: Callable[[Row], tuple[str, ...]]
) -> Mapping[str, list[Endpoint]]:
    grouped: dict[str, list[Endpoint]] = {}
    for index in indices:
        for name in hints(endpoints.rows[index]):
            grouped.setdefault(name, []).append(endpoints.members[index])
    return grouped


def _local(members: Sequence[Endpoint], rows: Sequence[Row]) -> dict[str, EndpointSet]:
    ready: dict[str, list[Endpoint]] = {}
    draining: dict[str, list[Endpoint]] = {}
    for member, row in zip(members, rows, strict=True):
        if row.node:
            if row.conditions & READY:
                ready.setdefault(row.node, []).append(member)
            elif row.conditions & FALLBACK == FALLBACK:
                draining.setdefault(row.node, []).append(member)
    local = {node: EndpointSet(members=tuple(near)) for node, near in draining.items() if node not in ready}
    for node, near in ready.items():
        count = 1 if len(near) == 1 else len({endpoint.ip for endpoint in near})
        local[node] = EndpointSet(members=tuple(near), ready=count)
    return local
