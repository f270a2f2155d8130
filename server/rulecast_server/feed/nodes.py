"""What nodes have, from what their agents acknowledged to this replica."""

from collections.abc import Collection, Iterable, Iterator

import msgspec

from rulecast.model import FLEET, Kind, node_scope
from rulecast.wire.messages import MAX_ERRORS
from rulecast_server.feed.hub import Hub, Stream
from rulecast_server.feed.log import DeltaLog
from rulecast_server.feed.registry import AgentState

_NODE = node_scope("")


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    name: str
    registered: bool
    """There is a Node of this name."""
    current: bool
    """Its kernel holds all that concerns it, without an error."""
    zone: str
    agents: tuple[AgentState, ...]
    """Its streams to this replica; none: nothing is known of its kernel."""


def registered_nodes(log: DeltaLog) -> Iterator[str]:
    """The names of the cluster's Nodes."""
    for scope, state in log.scopes.items():
        if scope.startswith(_NODE) and state.node is not None:
            yield scope.removeprefix(_NODE)


def streams_by_node(hub: Hub) -> dict[str, list[Stream]]:
    """The open streams."""
    found: dict[str, list[Stream]] = {}
    for stream in hub.open_streams():
        found.setdefault(stream.hello.node_name, []).append(stream)
    return found


def node_state(hub: Hub, name: str, streams: Iterable[Stream]) -> NodeState:
    """One node's state; `streams` are its own."""
    now = hub.clock()
    agents = tuple(stream.state(now) for stream in streams)
    head = hub.log.revision
    return NodeState(
        name=name,
        registered=hub.log.knows(name),
        current=any(agent.acked_revision >= head and not _errors(agent) for agent in agents),
        zone=hub.log.zone_of(name),
        agents=agents,
    )


def service_ports(log: DeltaLog, service: str) -> int:
    """How many ports, by family, a Service NAMESPACE/NAME has; 0: there is no such Service."""
    prefix = f"{service}:"
    return sum(
        resource.kind is Kind.SERVICE and resource.key.startswith(prefix)
        for resource, _ in log.scope(FLEET).resources()
    )


class Applied:
    """Follows which nodes' kernels have a Service as it is in a revision of the log."""

    def __init__(self, hub: Hub, service: str, *, connected_only: bool) -> None:
        """The revision is the head of this moment, which includes the Service's last change."""
        self.revision = hub.log.revision
        self.nodes = 0
        """As of the last look."""
        self.missing: Collection[str] = ()
        """Those of the nodes that do not have it."""
        self._hub = hub
        self._prefix = f"{service}:"
        self._connected_only = connected_only
        self._done: set[str] = set()
        """A kernel goes on to have what it had when the stream ends."""
        self._looked: object = None

    def look(self) -> None:
        """Bring `nodes` and `missing` up to date; cheap when nothing came since the last look."""
        counters = self._hub.counters
        moment = (counters.acks, counters.connects, counters.streams, counters.steps, self._hub.log.revision)
        if moment == self._looked:
            return
        self._looked = moment
        streams = streams_by_node(self._hub)
        names = set(streams) if self._connected_only else set(registered_nodes(self._hub.log))
        self._done |= {name for name in names - self._done if any(map(self._has, streams.get(name, ())))}
        if self._connected_only:
            names |= self._done
        self.nodes = len(names)
        self.missing = names - self._done

    def reached(self, percent: int) -> bool:
        """At least this share of the nodes has it, and there is one."""
        return self.nodes > 0 and (self.nodes - len(self.missing)) * 100 >= self.nodes * percent

    def _has(self, stream: Stream) -> bool:
        ack = stream.last_ack
        if ack is None or stream.acked_revision < self.revision:
            return False
        # Beyond so many, errors are counted and not named: it may be one of those.
        return ack.error_count <= MAX_ERRORS and not any(
            key.startswith(self._prefix) for key, _ in ack.errors
        )


def _errors(agent: AgentState) -> bool:
    return agent.ack is not None and bool(agent.ack.error_count or agent.ack.node_error)
