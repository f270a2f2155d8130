"""Reads one Watch call's requests, no faster than its limits allow."""

import asyncio
from typing import NamedTuple

import grpc

from rulecast.wire.messages import Hello, Resync, WireError
from rulecast.wire.requests import decode_request
from rulecast_server.feed import Stream
from rulecast_server.rpc.counters import RpcCounters
from rulecast_server.rpc.limits import Bucket, Limits

_REQUEST_COST_BYTES = 8 << 10
"""A request costs one, and one more for each so many bytes."""

Context = grpc.aio.ServicerContext[bytes, bytes]


class End(NamedTuple):
    """Why a call is to be ended, for its peer."""

    code: grpc.StatusCode
    why: str


class Reading:
    """The requests of one call.

    A handler must not cancel a pending read, or gRPC leaks the call's operations (grpc/grpc#43360); so each
    call has a reading task of its own that ends with the call.
    """

    def __init__(self, limits: Limits, counters: RpcCounters) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._counters = counters
        now = self._loop.time()
        self._requests = Bucket(burst=limits.requests_burst, rate=limits.requests_rate, now=now)
        self._resyncs = Bucket(burst=limits.resyncs_burst, rate=limits.resyncs_rate, now=now)
        self._held_since: float | None = None
        self._stream: Stream | None = None
        self.hello: asyncio.Future[Hello | None] = self._loop.create_future()
        """The first request; None when something else came, or nothing."""
        self.end: End | None = None

    def bind(self, stream: Stream) -> None:
        """Where requests after the first one go."""
        self._stream = stream
        if self.end is not None:
            stream.close(self.end.why)

    def fail(self, code: grpc.StatusCode, why: str) -> None:
        """Have the call ended; what it sends from now on is not looked at."""
        if self.end is None:
            self.end = End(code, why)
        if self._stream is not None:
            self._stream.close(self.end.why)

    async def run(self, context: Context) -> None:
        """Read until the client closes its side or the call ends."""
        try:
            # EOF is the one thing read that is not bytes.
            while isinstance(data := await context.read(), bytes) and self.end is None:
                pause = self._pause(data, self._take(data))
                if pause:
                    self._counters.throttled += 1
                    await asyncio.sleep(pause)
        except WireError as error:
            self.fail(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            # The call ended, which its handler hears in its own way.
            pass
        finally:
            if not self.hello.done():
                self.hello.set_result(None)

    def _take(self, data: bytes) -> bool:
        """Act on a request; whether it was a resync."""
        request = decode_request(data)
        if isinstance(request, Hello):
            if self.hello.done():
                raise WireError("a second hello")
            self.hello.set_result(request)
        elif not self.hello.done():
            raise WireError("the first request is not a hello")
        elif request is not None and self._stream is not None:
            self._stream.receive(request)
        return isinstance(request, Resync)

    def _pause(self, data: bytes, resync: bool) -> float:
        """Seconds to leave the next request with the transport, whose flow control holds the peer back."""
        now = self._loop.time()
        pause = self._requests.take(now, 1 + len(data) / _REQUEST_COST_BYTES)
        if resync:
            pause = max(pause, self._resyncs.take(now))
        if pause:
            if self._held_since is None:
                self._held_since = now
            elif now - self._held_since > self._limits.flood:
                rate = self._limits.requests_rate
                why = f"more than {rate:g} requests or {self._limits.resyncs_rate:g} resyncs a second came"
                self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{why} for {self._limits.flood:g} s")
        elif self._held_since is not None and self._requests.half(now) and self._resyncs.half(now):
            self._held_since = None
        return pause
