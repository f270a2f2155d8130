"""The feed over gRPC: connect, resume, notice silence, and start again.

Only the transport; what frames mean is in `session` and `desired`, which outlive every stream.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import grpc
import msgspec

from rulecast.backoff import Backoff
from rulecast.errors import UsageError
from rulecast.view import Receipt, Update
from rulecast.wire.messages import WireError
from rulecast_agent.feed.base import FeedStatus
from rulecast_agent.feed.candidates import Candidates
from rulecast_agent.feed.channels import Channels, ChannelSettings
from rulecast_agent.feed.discovery import Discovery
from rulecast_agent.feed.session import AgentSession
from rulecast_agent.feed.tokens import TokenFile

_log = logging.getLogger(__name__)

_WATCH = "/rulecast.v1.Rules/Watch"
_SILENT_INTERVALS = 3
"""Mark intervals without any frame after which a stream counts as dead."""

_Call = grpc.aio.StreamStreamCall[bytes, bytes]


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which servers, and how patient to be. Seconds."""

    servers: Sequence[str] = ()
    """HOST:PORT of each replica."""
    discovery: Discovery | None = None
    """Tells them instead, before each stream."""
    channel: ChannelSettings = ChannelSettings()
    token: TokenFile | None = None
    """Sent with each stream; only over TLS."""
    token_check: float = 10.0
    """How often to look whether the token was replaced; a stream goes on with the new one."""
    first_frame_timeout: float = 20.0
    """Connecting, TLS, hello and the first frame."""
    retry_initial: float = 1.0
    retry_maximum: float = 15.0


class GrpcFeed:
    """Streams from one of several servers. A `Feed`."""

    def __init__(
        self,
        session: AgentSession,
        settings: ClientSettings,
    ) -> None:
        self._session = session
        self._settings = settings
        self._channels = Channels(settings.channel)
        self._candidates = Candidates(settings.servers)
        self._backoff = Backoff(first=settings.retry_initial, limit=settings.retry_maximum)
        self._outgoing = asyncio.Event()
        self._logged: str | None = None
        self._holding = False
        self._went_back = 0
        self._counters: Counter[str] = Counter()

    @property
    def status(self) -> FeedStatus:
        """See `Feed`."""
        status = self._session.status
        problems, counters = status.problems, {**status.counters, **self._counters}
        if (discovery := self._settings.discovery) is not None:
            counters |= {"lookups": discovery.lookups, "lookup_failures": discovery.failures}
            if discovery.problem:
                problems += (discovery.problem,)
        return msgspec.structs.replace(status, counters=counters, problems=problems)

    def ack(self, receipt: Receipt) -> None:
        """See `Feed`."""
        self._session.ack(receipt)
        self._outgoing.set()

    def report(self, node_error: str) -> None:
        """See `Feed`."""
        self._session.report(node_error)
        self._outgoing.set()

    async def run(self, on_update: Callable[[Update], None]) -> None:
        """See `Feed`."""
        try:
            await self._stream_for_ever(on_update)
        finally:
            await self._channels.close()

    async def _stream_for_ever(self, on_update: Callable[[Update], None]) -> None:
        while True:
            server = await self._next()
            if server is None:
                self._lost("no server", "none is known")
                await asyncio.sleep(self._backoff.next())
                continue
            connects = self._session.counters["connects"]
            silent = False
            try:
                await self._stream(server, on_update)
            except grpc.aio.AioRpcError as error:
                self._lost(server, f"{error.code().name}: {error.details()}")
            except (WireError, UsageError) as error:
                self._lost(server, str(error))
            except _RenewedError:
                # Nothing is wrong: the next stream begins where this one ended.
                self._session.lost("")
                self._counters["renewals"] += 1
                continue
            except _SilentError as error:
                self._lost(server, str(error))
                silent = True
                # The next stream must not be opened on the same dead connection.
                await self._channels.drop(server)
            worked = self._session.counters["connects"] > connects
            if worked:
                self._backoff.reset()
            if silent or not worked:
                self._candidates.failed()
            await asyncio.sleep(self._backoff.next())

    async def _next(self) -> str | None:
        if self._settings.discovery is not None:
            for server in self._candidates.update(await self._settings.discovery.servers()):
                await self._channels.drop(server)
        return self._candidates.first

    def _lost(self, server: str, error: str) -> None:
        self._session.lost(error)
        # Once for each kind of trouble, not for each attempt.
        kind = error.partition(":")[0]
        if kind != self._logged:
            _log.warning("%s: %s; rules stay, trying again", server, error)
            self._logged = kind

    async def _stream(self, server: str, on_update: Callable[[Update], None]) -> None:
        token = await self._token()
        channel = await self._channels.get(server)
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        call: _Call = channel.stream_stream(_WATCH)(metadata=metadata)
        watchdog = _Watchdog(call, self._settings.first_frame_timeout)
        renewal = _Renewal(call, self._token, token, self._settings.token_check)
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(self._session.hello(server))
            writer = asyncio.create_task(self._write(call), name=f"requests to {server}")
            # A stream on which nothing can be acknowledged is of no use, though rules would still come.
            writer.add_done_callback(lambda task: call.cancel() if _failure(task) else None)
            # EOF is the one thing read that is not bytes.
            while isinstance(data := await call.read(), bytes):
                self._take(data, on_update)
                watchdog.feed(self._session.mark_interval * _SILENT_INTERVALS)
            raise WireError("the server ended the stream without a reason")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # A call that the watchdog cancelled raises the same as a task that is.
            if task is not None and task.cancelling():
                raise
            if renewal.due:
                raise _RenewedError from None
            if writer is not None and (failure := _failure(writer)):
                raise WireError(f"requests to the server failed: {failure!r}") from failure
            if not watchdog.barked:
                raise
            raise self._silence(watchdog) from None
        except asyncio.InvalidStateError:
            # A write after the call ended; its status says why it did, unless that was us.
            if renewal.due:
                raise _RenewedError from None
            if watchdog.barked:
                raise self._silence(watchdog) from None
            raise grpc.aio.AioRpcError(
                await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details()
            ) from None
        finally:
            watchdog.stop()
            renewal.stop()
            # An abandoned call is never collected (grpc/grpc#43462).
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.wait((writer,))

    async def _token(self) -> str:
        return await self._settings.token.read() if self._settings.token is not None else ""

    def _silence(self, watchdog: "_Watchdog") -> "_SilentError":
        self._counters["silences"] += 1
        return _SilentError(f"silent: nothing came for {watchdog.patience:.0f} s")

    def _take(self, data: bytes, on_update: Callable[[Update], None]) -> None:
        try:
            update = self._session.frame(data)
        except WireError:
            self._counters["invalid_frames"] += 1
            raise
        if self._session.connected and self._logged is not None:
            self._logged = None
            _log.info("%s: connected", self._session.status.server)
        self._tell_of_older_state()
        if update is not None:
            on_update(update)
        self._outgoing.set()

    def _tell_of_older_state(self) -> None:
        desired = self._session.desired
        if desired.holding is not self._holding:
            self._holding = desired.holding
            if self._holding:
                _log.warning("%s: %s", self._session.status.server, desired.held_because)
        if (went_back := desired.counters["went_back"]) != self._went_back:
            self._went_back = went_back
            _log.warning(
                "%s: its state stays older than this node's; it is used: has the cluster gone back?",
                self._session.status.server,
            )

    async def _write(self, call: _Call) -> None:
        try:
            while True:
                await self._outgoing.wait()
                self._outgoing.clear()
                while (request := self._session.request()) is not None:
                    await call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The call ended; the reader hears why.
            return


def _failure(task: "asyncio.Task[None]") -> BaseException | None:
    """What a task ended with, if it did so by itself."""
    return task.exception() if task.done() and not task.cancelled() else None


class _SilentError(Exception):
    """Nothing came for too long."""


class _RenewedError(Exception):
    """The stream was ended for one with a newer token."""


class _Renewal:
    """Cancels a call whose token has been replaced.

    Before the old one runs out, so that the server never has to end the stream.
    """

    def __init__(self, call: _Call, read: Callable[[], Awaitable[str]], token: str, interval: float) -> None:
        self.due = False
        self._task = asyncio.create_task(self._look(call, read, token, interval)) if token else None

    def stop(self) -> None:
        """The call is over."""
        if self._task is not None:
            self._task.cancel()

    async def _look(
        self, call: _Call, read: Callable[[], Awaitable[str]], token: str, interval: float
    ) -> None:
        while True:
            await asyncio.sleep(interval * random.uniform(0.8, 1.2))  # noqa: S311  (spreads agents)
            if await read() != token:
                break
        self.due = True
        call.cancel()


class _Watchdog:
    """Cancels a call from which nothing comes.

    A timeout around each read would cancel reads, which leaks their operations (grpc/grpc#43360).
    """

    def __init__(self, call: _Call, patience: float) -> None:
        self.barked = False
        self.patience = patience
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._fed = self._loop.time()
        self._timer = self._loop.call_later(patience, self._look)

    def feed(self, patience: float) -> None:
        """Something came."""
        self._fed = self._loop.time()
        if patience < self.patience:
            self._timer.cancel()
            self._timer = self._loop.call_later(patience, self._look)
        self.patience = patience

    def stop(self) -> None:
        """The call is over."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._fed + self.patience - self._loop.time()
        if left <= 0:
            self.barked = True
            self._call.cancel()
        else:
            self._timer = self._loop.call_later(left, self._look)
