"""Every method but an agent's stream and the health check needs the right to inspect.

An interceptor, so that a method which is added later is closed until somebody opens it; channelz tells
addresses of all peers, and reflection costs work for whoever asks.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from rulecast_server.rpc.authorize import Authorizer, Refused
from rulecast_server.rpc.calls import Call, Calls
from rulecast_server.rpc.counters import RefusalLog
from rulecast_server.rpc.limits import Limits
from rulecast_server.rpc.peers import AnyContext, peer_of

_OPEN = ("/rulecast.v1.Rules/Watch", "/grpc.health.v1.Health/Check")

if TYPE_CHECKING:
    # Generic in the stubs only.
    _Handler = grpc.RpcMethodHandler[Any, Any]


class InspectionGuard(grpc.aio.ServerInterceptor):
    """Asks the authorizer before the method runs, and bounds how many run."""

    def __init__(self, authorizer: Authorizer, limits: Limits, refusals: RefusalLog, calls: Calls) -> None:
        self._authorizer = authorizer
        self._calls = calls
        self._limits = limits
        self._refusals = refusals
        self._running = 0

    async def admit(self, context: AnyContext, method: str) -> None:
        """End the call unless its peer may inspect. For streams: again and again."""
        try:
            await self._authorizer.inspect(peer_of(context), method)
        except Refused as refused:
            await self._refuse(context, method, grpc.StatusCode[refused.denial.name], str(refused))

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method in _OPEN:
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._single(handler.unary_unary, method),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, method),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(handler.stream_stream, method),
                handler.request_deserializer,
                handler.response_serializer,
            )
        raise NotImplementedError(method)

    def _single(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def run(request: object, context: AnyContext) -> object:
            await self._enter(context, method)
            try:
                answer = behavior(request, context)
                return await answer if inspect.isawaitable(answer) else answer
            finally:
                self._running -= 1

        return run

    def _stream(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def run(request: object, context: AnyContext) -> AsyncIterator[object]:
            await self._enter(context, method)
            call = Call(context.peer(), method)
            try:
                with self._calls.inspection(call):
                    async for answer in behavior(request, context):
                        call.writing_since = asyncio.get_running_loop().time()
                        yield answer
                        call.writing_since = None
            finally:
                self._running -= 1

        return run

    async def _enter(self, context: AnyContext, method: str) -> None:
        await self.admit(context, method)
        if self._running >= self._limits.inspections:
            why = f"{self._running} inspection calls are running already"
            await self._refuse(context, method, grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._running += 1

    async def _refuse(self, context: AnyContext, method: str, code: grpc.StatusCode, why: str) -> NoReturn:
        self._refusals.refused(code, context.peer(), method, why)
        await context.abort(code, why)
        raise AssertionError
