"""Agents without a kernel, as a process: `python -m bench.load HOST:PORT AGENTS`.

Every agent has a connection of its own, takes whatever comes, and acknowledges as a real one does: at once
after quiet, and no more often than it writes to its kernel. They share the decoding of equal frames, so that
the clients' own CPU does not become the limit that is measured.
"""

import asyncio
import functools
import json
import resource
import sys
import time

import grpc
import uvloop

from rulecast.wire.decode import decode_frame
from rulecast.wire.messages import Ack, Hello, SetChange
from rulecast.wire.requests import encode_request
from rulecast_agent.feed.channels import Channels, ChannelSettings

_Call = grpc.aio.StreamStreamCall[bytes, bytes]
_WATCH = "/rulecast.v1.Rules/Watch"
_ACK_INTERVAL = 0.1
"""Seconds; `--min-sync-period` of the agent."""
_SAMPLED = 20
"""Agents whose receipts are timed."""


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
    return ack, tuple(changed)


class Load:
    """All agents."""

    def __init__(self, server: str, count: int) -> None:
        self._server, self._count = server, count
        self._waiting = count
        self.synced = asyncio.Event()
        self.frames = self.bytes = 0
        self.received: list[tuple[str, float]] = []

    async def agent(self, number: int) -> None:
        channel = await Channels(ChannelSettings()).get(self._server)
        call: _Call = channel.stream_stream(_WATCH)()
        await call.write(encode_request(Hello(node_name=f"node-{number}", zstd=True)))
        acks = _Acks(call)
        writer = asyncio.create_task(acks.run())
        try:
            await self._read(call, acks, sampled=number % max(1, self._count // _SAMPLED) == 0)
        finally:
            writer.cancel()

    async def _read(self, call: _Call, acks: "_Acks", *, sampled: bool) -> None:
        in_sync = False
        while isinstance(data := await call.read(), bytes):
            self.frames += 1
            self.bytes += len(data)
            ack, changed = _parse(data)
            if sampled and in_sync:
                now = time.monotonic()
                self.received += ((name, now) for name in changed)
            if ack:
                acks.put(ack)
                if not in_sync:
                    in_sync = True
                    self._waiting -= 1
                    if not self._waiting:
                        self.synced.set()


class _Acks:
    """The newest acknowledgement of one agent, written with pauses."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._newest = b""
        self._there = asyncio.Event()

    def put(self, ack: bytes) -> None:
        self._newest = ack
        self._there.set()

    async def run(self) -> None:
        while True:
            await self._there.wait()
            self._there.clear()
            await self._call.write(self._newest)
            await asyncio.sleep(_ACK_INTERVAL)


async def _main(server: str, count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = Load(server, count)
    begin = time.monotonic()
    agents = [asyncio.create_task(load.agent(number)) for number in range(count)]
    await asyncio.wait((asyncio.create_task(load.synced.wait()), *agents), return_when="FIRST_COMPLETED")
    print(json.dumps({"seconds": time.monotonic() - begin, "bytes": load.bytes}), flush=True)
    load.frames = load.bytes = 0
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(json.dumps({"frames": load.frames, "bytes": load.bytes, "received": load.received}), flush=True)
    for agent in agents:
        agent.cancel()
    await asyncio.gather(*agents, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2])))
