"""Agents without a kernel, as a process: `python -m bench.load HOST:PORT AGENTS`.

Every agent has a connection of its own, takes whatever comes, and acknowledges as a real one does: at once
after quiet, and no more often than it writes to its kernel. The first few are whole: the agent's own
session keeps their state and verifies each digest. The others share the decoding of equal frames and resume
with the position of a whole one, so that the clients' own CPU does not become the limit that is measured.

Commands on stdin: `cut` ends all streams, `join` begins them again with what was held; anything else ends
the run.
"""

import asyncio
import functools
import json
import resource
import sys
import time

import grpc
import msgspec
import uvloop

from rulecast.model import Scope
from rulecast.view import Receipt
from rulecast.wire.decode import decode_frame
from rulecast.wire.messages import Ack, Hello, Position, SetChange, Slot
from rulecast.wire.requests import encode_request
from rulecast_agent.feed.channels import Channels, ChannelSettings
from rulecast_agent.feed.session import AgentIdentity, AgentSession

_Call = grpc.aio.StreamStreamCall[bytes, bytes]
_WATCH = "/rulecast.v1.Rules/Watch"
_ACK_INTERVAL = 0.1
"""Seconds; `--min-sync-period` of the agent."""
_SAMPLED = 20
"""Agents whose receipts are timed."""
_WHOLE = 2
"""Agents whose own sessions keep their state."""


@functools.lru_cache(maxsize=256)
def _parse(frame: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The acknowledgement that a frame asks for, and the services whose endpoints it changes."""
    decoded = decode_frame(frame)
    ack = encode_request(Ack(revision=decoded.mark.revision)) if decoded.mark else b""
    changed = (
        operation.resource.key
        for step in decoded.steps
        for operation in step.operations
        if isinstance(operation, SetChange)
    )
    # A service with endpoints on the agent's node is there twice.
    return ack, tuple(dict.fromkeys(changed))


def _hello(name: str, held: Position) -> bytes:
    """The first message of an agent that holds what another node does."""
    position = dict(held)
    if Slot.NODE in position:
        position[Slot.NODE] = msgspec.structs.replace(held[Slot.NODE], scope=Scope(f"node/{name}"))
    return encode_request(Hello(node_name=name, zstd=True, position=position))


class Load:
    """All agents."""

    def __init__(self, server: str, count: int) -> None:
        self._server, self._count = server, count
        self._whole = [AgentSession(AgentIdentity(node_name=f"node-{n}")) for n in range(_WHOLE)]
        self._sampled = range(0, count, max(1, count // _SAMPLED))
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting = 0
        self._in_sync = asyncio.Event()
        self.frames = self.bytes = 0
        self.received: list[tuple[str, float]] = []

    def seen(self) -> dict[str, object]:
        """What came since the last `join`, and how often a digest of a whole agent was not the server's."""
        return {
            "frames": self.frames,
            "bytes": self.bytes,
            "received": self.received,
            "sampled": len(self._sampled),
            "mismatches": sum(session.desired.counters["mismatches"] for session in self._whole),
        }

    async def join(self) -> dict[str, float]:
        """Connect all at once; the seconds and bytes until the last one is in sync. Raises what ended one."""
        begin, before = time.monotonic(), self.bytes
        # Once, and before it moves: all come back with the same.
        held = self._whole[0].desired.position()
        self._waiting = self._count
        self._in_sync.clear()
        self._tasks = [asyncio.create_task(self._agent(number, held)) for number in range(self._count)]
        waiter = asyncio.create_task(self._in_sync.wait())
        await asyncio.wait((waiter, *self._tasks), return_when="FIRST_COMPLETED")
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("a stream ended")
        found = {"seconds": time.monotonic() - begin, "bytes": self.bytes - before}
        self.frames = self.bytes = 0
        self.received.clear()
        return found

    async def cut(self) -> None:
        """End all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in self._whole:
            session.lost("cut")

    async def _agent(self, number: int, held: Position) -> None:
        session = self._whole[number] if number < _WHOLE else None
        channels = Channels(ChannelSettings())
        channel = await channels.get(self._server)
        call: _Call = channel.stream_stream(_WATCH)()
        try:
            hello = session.hello(self._server) if session else _hello(f"node-{number}", held)
            self.bytes += len(hello)
            await call.write(hello)
            acks = _Acks(call)
            writer = asyncio.create_task(acks.run())
            try:
                await self._read(call, acks, session, sampled=number in self._sampled)
            finally:
                writer.cancel()
        finally:
            call.cancel()
            await channels.close()

    async def _read(self, call: _Call, acks: "_Acks", session: AgentSession | None, *, sampled: bool) -> None:
        in_sync = False
        while isinstance(data := await call.read(), bytes):
            self.frames += 1
            self.bytes += len(data)
            ack, changed = _parse(data)
            if sampled and in_sync:
                now = time.monotonic()
                self.received += ((name, now) for name in changed)
            if session is not None:
                update = session.frame(data)
                if update is not None:
                    session.ack(Receipt(revision=update.revision, seconds=0.0, errors={}, operations=0))
                acks.put(session.request() or b"")
                arrived = session.connected
            else:
                acks.put(ack)
                arrived = bool(ack)
            if arrived and not in_sync:
                in_sync = True
                self._waiting -= 1
                if not self._waiting:
                    self._in_sync.set()


class _Acks:
    """The newest acknowledgement of one agent, written with pauses."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._newest = b""
        self._there = asyncio.Event()

    def put(self, ack: bytes) -> None:
        """`ack` is empty when there is nothing to say."""
        if ack:
            self._newest = ack
            self._there.set()

    async def run(self) -> None:
        while True:
            await self._there.wait()
            self._there.clear()
            await self._call.write(self._newest)
            await asyncio.sleep(_ACK_INTERVAL)


def _tell(what: dict[str, float] | dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


async def _main(server: str, count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = Load(server, count)
    _tell(await load.join())
    loop = asyncio.get_running_loop()
    while (command := (await loop.run_in_executor(None, sys.stdin.readline)).strip()) in ("cut", "join"):
        if command == "cut":
            await load.cut()
            _tell({})
        else:
            _tell(await load.join())
    _tell(load.seen())
    await load.cut()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2])))
