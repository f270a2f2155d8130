"""Whether a stream's peer is still who it was: asked again each time that the last answer has run out."""

import asyncio
from collections.abc import Callable

import grpc

from rulecast_server.rpc.authorize import Authorizer, Peer, Refused
from rulecast_server.rpc.counters import RpcCounters


class Standing:
    """One stream's. A timer rather than a task while there is nothing to ask: there are thousands."""

    def __init__(
        self,
        authorizer: Authorizer,
        peer: Peer,
        node: str,
        counters: RpcCounters,
        fail: Callable[[grpc.StatusCode, str], None],
    ) -> None:
        self._authorizer = authorizer
        self._peer = peer
        self._node = node
        self._counters = counters
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._stopped = False

    def holds(self, seconds: float | None) -> None:
        """The peer is good for so long; None: for ever."""
        if seconds is not None and not self._stopped:
            self._timer = self._loop.call_later(seconds, self._due)

    def stop(self) -> None:
        """The stream ended."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _due(self) -> None:
        self._asking = asyncio.create_task(self._ask(), name=f"identity of {self._node}")

    async def _ask(self) -> None:
        try:
            self.holds(await self._authorizer.watch(self._peer, self._node))
        except Refused as refused:
            self._counters.revoked += 1
            self._fail(grpc.StatusCode[refused.denial.name], str(refused))
