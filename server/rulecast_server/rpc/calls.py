"""The open streams: how many of agents there may be, and an end to all whose peer does not read."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import grpc

from rulecast_server.rpc.connections import end_connection, end_excess, open_files, parse_peer, peer_host
from rulecast_server.rpc.counters import RpcCounters, SparseLog
from rulecast_server.rpc.limits import Limits
from rulecast_server.rpc.reading import End


class Call:
    """One stream."""

    __slots__ = ("cut", "host", "name", "node", "peer", "writing_since")

    def __init__(self, peer: str, name: str) -> None:
        """`name`: what is streamed, for the log."""
        self.peer = peer
        self.name = name
        self.host = peer_host(peer)
        self.node: str | None = None
        """None until it is known and allowed."""
        self.writing_since: float | None = None
        """Loop time at which the write of now began; None between writes."""
        self.cut = False


class Calls:
    """All of them, on one event loop."""

    def __init__(self, limits: Limits, counters: RpcCounters) -> None:
        self._limits = limits
        self._counters = counters
        self._calls: dict[Call, None] = {}
        self._inspections: dict[Call, None] = {}
        self._greeting = 0
        self._by_host: Counter[str] = Counter()
        self._by_node: Counter[str] = Counter()
        self._log = SparseLog()
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def greeting(self) -> int:
        """Calls whose node is not established yet."""
        return self._greeting

    def enter(self, call: Call) -> End | None:
        """A call begins; an End when there is no room for it, and it is not entered then."""
        limits = self._limits
        if len(self._calls) >= limits.streams:
            return _full(f"{limits.streams} streams are open already")
        if self._greeting >= limits.greetings:
            return _full(f"{limits.greetings} streams wait to be let in already")
        if self._by_host[call.host] >= limits.greetings_per_host:
            return _full(f"{limits.greetings_per_host} streams of this address wait to be let in already")
        self._calls[call] = None
        self._greeting += 1
        self._by_host[call.host] += 1
        return None

    def admit(self, call: Call, node: str) -> End | None:
        """The call is for this node and may be; an End when the node has too many."""
        if self._by_node[node] >= self._limits.streams_per_node:
            return _full(f"node {node} has {self._limits.streams_per_node} streams already")
        self._greeted(call)
        call.node = node
        call.name = f"node {node}"
        self._by_node[node] += 1
        return None

    def leave(self, call: Call) -> None:
        """The call ended; harmless for one that was not entered."""
        if call not in self._calls:
            return
        del self._calls[call]
        if call.node is None:
            self._greeted(call)
        else:
            _less(self._by_node, call.node)

    @contextlib.contextmanager
    def inspection(self, call: Call) -> Iterator[None]:
        """Look after another stream's writes while the block runs."""
        self._inspections[call] = None
        try:
            yield
        finally:
            del self._inspections[call]

    def start(self, port: int) -> None:
        """Begin to look for peers that do not read, and for too many connections to this port."""
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep(port), name="sweep of streams")

    async def stop(self) -> None:
        """Look no longer."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait((self._sweeper,))
            self._sweeper = None

    async def _sweep(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(5.0, self._limits.unread / 4))
            before = loop.time() - self._limits.unread
            stuck = [
                call
                for call in (*self._calls, *self._inspections)
                if call.writing_since is not None and call.writing_since < before
            ]
            for call in stuck:
                self._cut(call)
            await self._end_excess(port)

    async def _end_excess(self, port: int) -> None:
        known = {parse_peer(call.peer) for call in self._calls if call.node is not None}
        allowed = self._limits.strangers_per_host
        if open_files() - len(known) <= allowed:
            return
        peers = {peer for peer in known if peer is not None}
        ended = await asyncio.to_thread(end_excess, peers, local_port=port, allowed=allowed)
        for host, count in ended.items():
            self._counters.excess_cuts += count
            text = "%s had more than %d connections without an agent that was let in: %d are ended"
            self._log.warning(text, host, allowed, count)

    def _cut(self, call: Call) -> None:
        ended = end_connection(call.peer)
        if call.cut:
            return
        call.cut = True
        self._counters.unread_cuts += 1
        how = "its connection is ended" if ended else "its connection was not found"
        unread = self._limits.unread
        self._log.warning("%s, %s, took nothing for %g s: %s", call.peer, call.name, unread, how)

    def _greeted(self, call: Call) -> None:
        self._greeting -= 1
        _less(self._by_host, call.host)


def _less(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _full(why: str) -> End:
    return End(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
