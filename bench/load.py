"""Agents without a kernel, as a process: `python -m bench.load HOST:PORT AGENTS`.

Every agent has a connection of its own, takes whatever comes and acknowledges it at once. They share the
decoding of equal frames, so that the clients' own CPU does not become the limit that is measured.
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

_WATCH = "/rulecast.v1.Rules/Watch"
_SAMPLED = 20
"""Agents whose receipts are timed."""


@functools.lru_cache(maxsize=256)
def _read(frame: bytes) -> tuple[bytes, tuple[str, ...]]:
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
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(_WATCH)()
        await call.write(encode_request(Hello(node_name=f"node-{number}", zstd=True)))
        sampled = number % max(1, self._count // _SAMPLED) == 0
        in_sync = False
        while isinstance(data := await call.read(), bytes):
            self.frames += 1
            self.bytes += len(data)
            ack, changed = _read(data)
            if sampled and in_sync:
                now = time.monotonic()
                self.received += ((name, now) for name in changed)
            if ack:
                await call.write(ack)
                if not in_sync:
                    in_sync = True
                    self._waiting -= 1
                    if not self._waiting:
                        self.synced.set()


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
