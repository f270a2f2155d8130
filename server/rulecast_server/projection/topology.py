"""The nodes, their zones, and which Services depend on either."""

from collections import Counter

from rulecast.model import NodeInfo
from rulecast_server.projection.slices import ServiceName


class Topology:
    """Nodes by name, with indexes from zones and nodes to the Services whose hints make them matter."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeInfo] = {}
        # The unzoned scope always exists: an agent whose Node is not registered yet belongs to it.
        self._zones: Counter[str] = Counter({"": 1})
        self._on_zones: set[ServiceName] = set()
        self._on_nodes: dict[str, set[ServiceName]] = {}
        self._nodes_of: dict[ServiceName, frozenset[str]] = {}
        self._zones_before: set[str] = {""}
        self._changed_nodes: set[str] = set()

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones that nodes have, and "" for none."""
        return tuple(self._zones)

    def has_node(self, node: str) -> bool:
        """Whether there is a Node of that name."""
        return node in self._nodes

    def zone_of(self, node: str) -> str | None:
        """The node's zone, "" when it has none; None: no such node."""
        info = self._nodes.get(node)
        return None if info is None else info.zone

    def put(self, node: str, info: NodeInfo | None) -> NodeInfo | None:
        """Enter, replace or remove (None) a node; returns what was there."""
        old = self._nodes.pop(node, None)
        if info is not None:
            self._nodes[node] = info
            self._zones[info.zone] += 1
        if old is not None:
            self._zones[old.zone] -= 1
            if not self._zones[old.zone]:
                del self._zones[old.zone]
        if (old is None) is not (info is None):
            self._changed_nodes.add(node)
        return old

    def depend(self, service: ServiceName, *, on_zones: bool, on_nodes: frozenset[str]) -> None:
        """Say which nodes' existence, and whether the set of zones, matters to a Service."""
        if on_zones:
            self._on_zones.add(service)
        else:
            self._on_zones.discard(service)
        before = self._nodes_of.pop(service, frozenset())
        if on_nodes:
            self._nodes_of[service] = on_nodes
        for node in before - on_nodes:
            self._on_nodes[node].discard(service)
            if not self._on_nodes[node]:
                del self._on_nodes[node]
        for node in on_nodes - before:
            self._on_nodes.setdefault(node, set()).add(service)

    def take_affected(self) -> set[ServiceName]:
        """The Services to compute again for the nodes that changed since the last call."""
        affected: set[ServiceName] = set()
        zones = set(self._zones)
        if zones != self._zones_before:
            affected |= self._on_zones
            self._zones_before = zones
        for node in self._changed_nodes:
            affected |= self._on_nodes.get(node, set())
        self._changed_nodes.clear()
        return affected
