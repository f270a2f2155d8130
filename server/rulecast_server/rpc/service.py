"""The Rules service on grpc.aio: bytes in, bytes out; all meaning is in `feed`.

A handler must let CancelledError pass, or gRPC leaks the call's operations (grpc/grpc#43360), and must not
cancel a pending read; so each call has a reading task of its own that ends with the call.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import NoReturn, TypeVar

import grpc

from rulecast.v1 import rules_pb2 as pb
from rulecast.wire.messages import Hello, WireError
from rulecast.wire.requests import decode_request
from rulecast_server.feed import AgentState, Hub, Stream
from rulecast_server.rpc.authorize import Authorizer, Peer

_log = logging.getLogger(__name__)

SERVICE_NAME = "rulecast.v1.Rules"
HELLO_TIMEOUT = 10.0
"""Seconds in which a stream must say who it is for."""
SYNC_TIMEOUT = 5.0
"""Seconds for which an agent that comes during our start waits; then it is sent to look elsewhere."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[bytes, bytes]


class RulesService:
    """Serves Watch and ListAgents for one hub."""

    def __init__(self, hub: Hub, authorizer: Authorizer) -> None:
        self._hub = hub
        self._authorizer = authorizer
        self._readers: set[asyncio.Task[None]] = set()
        self.rejected = 0
        """Watch calls that were refused."""

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

    async def _watch(self, _requests: AsyncIterator[bytes], context: _Context) -> None:
        call = _Reading()
        reader = asyncio.create_task(call.run(context), name=f"requests of {context.peer()}")
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        hello = await self._hello(call, context)
        peer = _peer(context)
        if not await self._hub.synced(SYNC_TIMEOUT):
            await self._reject(context, grpc.StatusCode.UNAVAILABLE, "not synchronized with the cluster yet")
        refusal = await self._authorizer.watch(peer, hello.node_name)
        if refusal is not None:
            _log.warning("%s was refused node %s: %s", peer.address, hello.node_name, refusal)
            await self._reject(context, grpc.StatusCode.PERMISSION_DENIED, refusal)
        stream = self._hub.attach(hello, peer=peer.address)
        try:
            call.bind(stream)
            while frames := await stream.frames():
                for frame in frames:
                    await context.write(frame)
        finally:
            self._hub.detach(stream)
        if call.violation is not None:
            await self._reject(context, grpc.StatusCode.INVALID_ARGUMENT, call.violation)
        await context.abort(grpc.StatusCode.UNAVAILABLE, stream.closed or "closed")

    async def _hello(self, call: "_Reading", context: _Context) -> Hello:
        # Not wait_for: it would cancel what it waits for.
        await asyncio.wait((call.hello,), timeout=HELLO_TIMEOUT)
        if not call.hello.done():
            await self._reject(context, grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came")
        hello = call.hello.result()
        if hello is None:
            violation = call.violation or "the stream ended before a hello"
            await self._reject(context, grpc.StatusCode.INVALID_ARGUMENT, violation)
        return hello

    async def _reject(self, context: _Context, code: grpc.StatusCode, why: str) -> NoReturn:
        self.rejected += 1
        await context.abort(code, why)
        raise AssertionError

    async def _list_agents(
        self,
        _request: pb.ListAgentsRequest,
        context: grpc.aio.ServicerContext[pb.ListAgentsRequest, pb.ListAgentsResponse],
    ) -> pb.ListAgentsResponse:
        refusal = await self._authorizer.list_agents(_peer(context))
        if refusal is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
        now = self._hub.clock()
        return pb.ListAgentsResponse(
            revision=self._hub.log.revision, agents=[_status(state, now) for state in self._hub.agents()]
        )


class _Reading:
    """Reads one call's requests."""

    def __init__(self) -> None:
        self.hello: asyncio.Future[Hello | None] = asyncio.get_running_loop().create_future()
        """The first request; None when something else came, or nothing."""
        self.violation: str | None = None
        self._stream: Stream | None = None

    def bind(self, stream: Stream) -> None:
        """Where requests after the first one go."""
        self._stream = stream
        if self.violation is not None:
            stream.close(self.violation)

    async def run(self, context: _Context) -> None:
        """Read until the client closes its side or the call ends."""
        try:
            # EOF is the one thing read that is not bytes.
            while isinstance(data := await context.read(), bytes):
                self._take(data)
        except WireError as error:
            self.violation = str(error)
            if self._stream is not None:
                self._stream.close(self.violation)
        except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            # The call ended, which its handler hears in its own way.
            pass
        finally:
            if not self.hello.done():
                self.hello.set_result(None)

    def _take(self, data: bytes) -> None:
        request = decode_request(data)
        if isinstance(request, Hello):
            if self.hello.done():
                raise WireError("a second hello")
            self.hello.set_result(request)
        elif not self.hello.done():
            raise WireError("the first request is not a hello")
        elif request is not None and self._stream is not None:
            self._stream.receive(request)


def _peer(context: grpc.aio.ServicerContext[_Request, _Response]) -> Peer:
    auth = context.auth_context()
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    return Peer(
        address=context.peer(),
        common_name=next((name.decode() for name in auth.get("x509_common_name", ())), ""),
        alternative_names=tuple(name.decode() for name in auth.get("x509_subject_alternative_name", ())),
        metadata={key: value for key, value in metadata if isinstance(value, str)},
    )


def _status(state: AgentState, now: float) -> pb.AgentStatus:
    ack = state.ack
    status = pb.AgentStatus(
        node_name=state.node,
        zone=state.zone,
        peer=state.peer,
        agent_version=state.agent_version,
        mode=state.mode,
        sent_revision=state.sent_revision,
        acked_revision=state.acked_revision,
        lag_ms=int(state.lag * 1000),
        connected_seconds=max(0, int(now - state.connected_since)),
    )
    if ack is not None:
        status.apply_ms = ack.apply_ms
        status.errors.extend(pb.ServiceError(key=key, message=text) for key, text in ack.errors)
        status.error_count = ack.error_count
        status.node_error = ack.node_error
    return status
