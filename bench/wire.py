"""Bytes on the wire at one size: no sockets, the sessions of both sides joined by a list."""

from collections.abc import Iterable, Sequence

import msgspec

from bench import objects
from rulecast_agent.feed.session import AgentIdentity, AgentSession
from rulecast_server.feed import DeltaLog, Session
from rulecast_server.kube.objects import EndpointSlice, Node, ObjectEvent, Service
from rulecast_server.projection import Projector

_TYPES = {
    "Service": ("services", Service),
    "EndpointSlice": ("endpointslices", EndpointSlice),
    "Node": ("nodes", Node),
}


def event(item: objects.Object) -> ObjectEvent:
    """An object as the reflector gives it."""
    resource, kind = _TYPES[item["kind"]]
    meta = item["metadata"]
    return ObjectEvent(
        resource=resource,
        namespace=meta.get("namespace", ""),
        name=meta["name"],
        object=msgspec.convert(item, kind),
    )


class _Line:
    """A projector, its log, and one agent."""

    def __init__(self, items: Iterable[objects.Object]) -> None:
        self._projector, self.log = Projector(), DeltaLog()
        self.agent = AgentSession(AgentIdentity(node_name="node-0"))
        self.change(items)

    def change(self, items: Iterable[objects.Object]) -> None:
        self._projector.apply(event(item) for item in items)
        self.log.apply(self._projector.flush().changes)

    def session(self, *, zstd: bool) -> Session:
        position = self.agent.desired.position()
        return Session(self.log, node="node-0", zstd=zstd, position=position, mark_interval=10)

    def receive(self, frames: Sequence[bytes]) -> int:
        for frame in frames:
            self.agent.frame(frame)
        return sum(map(len, frames))


def measure(services: int, *, endpoints: int) -> dict[str, float]:
    """Bytes of a snapshot, of one change, and of a reconnect after nothing and after one change."""
    line = _Line(objects.cluster(services, endpoints))
    number = services // 2
    found: dict[str, float] = {}
    found["snapshot plain B"] = sum(map(len, line.session(zstd=False).next_step(0.0)))
    line.agent.hello("server")
    session = line.session(zstd=True)
    found["snapshot zstd B"] = line.receive(session.next_step(0.0))
    line.change([objects.endpoint_slice(number, endpoints, shift=1)])
    found["one endpoint replaced B"] = line.receive(session.next_step(0.0))
    for name, change in (("nothing changed", False), ("one endpoint replaced", True)):
        line.agent.lost("cut")
        if change:
            line.change([objects.endpoint_slice(number, endpoints, shift=2)])
        hello = line.agent.hello("server")
        frames = line.session(zstd=True).next_step(0.0)
        found[f"reconnect, {name} B"] = len(hello) + line.receive(frames)
    return found
