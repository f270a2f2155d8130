"""The Rules service on grpc.aio: bytes in, bytes out; all meaning is in `feed`.

A handler must let CancelledError pass, or gRPC leaks the call's operations (grpc/grpc#43360), and must not
cancel a pending read; so each call has a reading task of its own that ends with the call.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import NoReturn

import grpc

from rulecast.v1 import rules_pb2 as pb
from rulecast.wire.messages import Hello
from rulecast_server.feed import Hub
from rulecast_server.rpc.authorize import Authorizer, Refused
from rulecast_server.rpc.calls import Call, Calls
from rulecast_server.rpc.counters import RefusalLog, RpcCounters
from rulecast_server.rpc.limits import Limits
from rulecast_server.rpc.peers import peer_of
from rulecast_server.rpc.reading import Context, End, Reading
from rulecast_server.rpc.standing import Standing
from rulecast_server.rpc.statuses import agent_status

SERVICE_NAME = "rulecast.v1.Rules"
SYNC_TIMEOUT = 5.0
"""Seconds for which an agent that comes during our start waits; then it is sent to look elsewhere."""
_CANCELLATION = 1.0
"""Seconds within which gRPC cancels the handler of a call whose peer is gone."""


class RulesService:
    """Serves Watch and ListAgents for one hub."""

    def __init__(
        self,
        hub: Hub,
        authorizer: Authorizer,
        *,
        limits: Limits,
        counters: RpcCounters,
        refusals: RefusalLog,
        calls: Calls,
    ) -> None:
        self._hub = hub
        self._authorizer = authorizer
        self._limits = limits
        self._counters = counters
        self._refusals = refusals
        self._calls = calls
        self._readers: set[asyncio.Task[None]] = set()

    @property
    def rejected(self) -> int:
        """Watch and inspection calls that were refused."""
        return sum(self._counters.refused.values())

    @property
    def readers(self) -> int:
        """Reading tasks alive: as many as there are calls."""
        return len(self._readers)

    def handler(self) -> grpc.GenericRpcHandler:
        """What to add to a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
                "ListAgents": grpc.unary_unary_rpc_method_handler(
                    self._list_agents,
                    request_deserializer=pb.ListAgentsRequest.FromString,
                    response_serializer=pb.ListAgentsResponse.SerializeToString,
                ),
            },
        )

    async def _watch(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        call = Call(context.peer(), "a stream without a hello yet")
        if (full := self._calls.enter(call)) is not None:
            await self._reject(context, call, full)
        try:
            with self._reading(context) as reading:
                await self._serve(reading, call, context)
        finally:
            self._calls.leave(call)

    @contextlib.contextmanager
    def _reading(self, context: Context) -> Iterator[Reading]:
        reading = Reading(self._limits, self._counters)
        reader = asyncio.create_task(reading.run(context), name=f"requests of {context.peer()}")
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        yield reading

    async def _serve(self, reading: Reading, call: Call, context: Context) -> None:
        hello = await self._hello(reading, call, context)
        node = hello.node_name
        call.name = f"node {node}"
        peer = peer_of(context)
        try:
            holds = await self._authorizer.watch(peer, node)
        except Refused as refused:
            await self._reject(context, call, End(grpc.StatusCode[refused.denial.name], str(refused)))
        if not await self._hub.synced(SYNC_TIMEOUT):
            why = "not synchronized with the cluster yet"
            await self._reject(context, call, End(grpc.StatusCode.UNAVAILABLE, why))
        if (full := self._calls.admit(call, node)) is not None:
            await self._reject(context, call, full)
        stream = self._hub.attach(hello, peer=peer.address)
        standing = Standing(self._authorizer, peer, node, self._counters, reading.fail)
        try:
            reading.bind(stream)
            standing.holds(holds)
            clock = asyncio.get_running_loop().time
            while frames := await stream.frames():
                for frame in frames:
                    call.writing_since = clock()
                    await context.write(frame)
                    call.writing_since = None
        except grpc.aio.InternalError:
            await self._cancellation()
            raise
        finally:
            standing.stop()
            self._hub.detach(stream)
        if reading.end is not None:
            await self._reject(context, call, reading.end)
        await context.abort(grpc.StatusCode.UNAVAILABLE, stream.closed or "closed")

    async def _hello(self, reading: Reading, call: Call, context: Context) -> Hello:
        # Not wait_for: it would cancel what it waits for.
        await asyncio.wait((reading.hello,), timeout=self._limits.hello)
        if not reading.hello.done():
            await self._reject(context, call, End(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came"))
        hello = reading.hello.result()
        if hello is None:
            why = "the stream ended before a hello"
            await self._reject(context, call, reading.end or End(grpc.StatusCode.INVALID_ARGUMENT, why))
        return hello

    async def _reject(self, context: Context, call: Call, end: End) -> NoReturn:
        self._refusals.refused(end.code, call.peer, call.name, end.why)
        try:
            await context.abort(end.code, end.why)
        except grpc.aio.InternalError:
            await self._cancellation()
            raise
        raise AssertionError

    @staticmethod
    async def _cancellation() -> None:
        """Wait for it: an operation failed, so the peer is gone, and gRPC is about to cancel the handler.

        It logs a traceback for an error that it sees before.
        """
        await asyncio.sleep(_CANCELLATION)

    async def _list_agents(
        self,
        _request: pb.ListAgentsRequest,
        _context: grpc.aio.ServicerContext[pb.ListAgentsRequest, pb.ListAgentsResponse],
    ) -> pb.ListAgentsResponse:
        now = self._hub.clock()
        return pb.ListAgentsResponse(
            revision=self._hub.log.revision, agents=[agent_status(state, now) for state in self._hub.agents()]
        )
