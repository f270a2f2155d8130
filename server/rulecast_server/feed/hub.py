"""Fan-out: which streams a step concerns, when they are woken, and what their agents told.

The only asynchronous part of the feed. One task per stream writes; the hub wakes it. A first change after
quiet wakes at once, under load wake-ups are spaced so that changes merge; a stream that is still writing is
not disturbed and merges by itself.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from rulecast.model import FLEET, Changes, Scope, ServiceKey
from rulecast.wire.messages import Ack, Hello, Resync
from rulecast_server.feed.log import DeltaLog
from rulecast_server.feed.registry import AckTracker, AgentState
from rulecast_server.feed.session import Frames, Session


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timing. Seconds."""

    mark_interval: float = 10.0
    """A stream without a mark for so long gets one."""
    spacing_per_stream: float = 120e-6
    """A wake-up of all streams is this many times their number apart from the next. Writing a frame costs
    some 40 us, so that fan-out takes a third of a core."""
    max_spacing: float = 0.06


class HubCounters(msgspec.Struct, kw_only=True):
    """Monotone, but for `streams`."""

    streams: int = 0
    connects: int = 0
    superseded: int = 0
    wakeups: int = 0
    """Times that streams were woken for changes."""
    steps: int = 0
    """Steps handed out to streams."""
    frames: int = 0
    bytes: int = 0
    acks: int = 0
    resyncs: int = 0


class Hub:
    """All streams of one server. Must be used on one event loop."""

    def __init__(
        self,
        log: DeltaLog,
        settings: HubSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
        seen: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """`seen`: the newest resourceVersion that has come of each collection, whether it changed a rule or
        not; without it, those of the last step."""
        self.log = log
        self.refresh: Callable[[], None] = _nothing
        """Called before a mark that tells all versions, for whoever knows of newer ones to publish them."""
        self.seen = seen or (lambda: self.log.resource_versions)
        self.settings = settings or HubSettings()
        self.clock = clock
        self.counters = HubCounters()
        self._streams: dict[Stream, None] = {}
        self._by_scope: dict[Scope, dict[Stream, None]] = {}
        self._by_instance: dict[tuple[str, str], Stream] = {}
        self._dirty: set[Scope] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_wake = 0.0
        self._closed: str | None = None
        self._synced = asyncio.Event()

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def publish(
        self,
        changes: Changes,
        *,
        trigger_times: Mapping[ServiceKey, float] | None = None,
        resource_versions: Mapping[str, int] | None = None,
        changed_versions: Mapping[str, int] | None = None,
    ) -> None:
        """Append a projection to the log and have the streams that it concerns send it."""
        scopes = self.log.apply(
            changes,
            trigger_times=trigger_times,
            resource_versions=resource_versions,
            changed_versions=changed_versions,
        )
        self._synced.set()
        if not scopes or not self._streams:
            return
        self._dirty |= scopes
        if self._timer is None:
            loop = asyncio.get_running_loop()
            # Even without spacing not in this call: a caller that publishes in a loop makes one wake-up.
            self._timer = loop.call_at(max(self._next_wake, loop.time()), self._wake)

    async def synced(self, within: float) -> bool:
        """Wait so many seconds for the first projection, if need be; whether it is in."""
        if not self.log.synced:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._synced.wait(), within)
        return self.log.synced

    def attach(self, hello: Hello, *, peer: str) -> "Stream":
        """Begin a stream. It replaces an older one of the same node and instance: that one is half-open."""
        stream = Stream(self, hello, peer)
        self.counters.connects += 1
        self._streams[stream] = None
        self.counters.streams = len(self._streams)
        if hello.instance:
            key = (hello.node_name, hello.instance)
            older = self._by_instance.pop(key, None)
            self._by_instance[key] = stream
            if older is not None:
                self.counters.superseded += 1
                older.close("a newer stream of the same agent took over")
        if self._closed is not None:
            stream.close(self._closed)
        return stream

    def detach(self, stream: "Stream") -> None:
        """End a stream; harmless when it has ended."""
        if self._streams.pop(stream, _ABSENT) is _ABSENT:
            return
        self.counters.streams = len(self._streams)
        stream.ended()
        self.subscribe(stream, ())
        key = (stream.hello.node_name, stream.hello.instance)
        if self._by_instance.get(key) is stream:
            del self._by_instance[key]

    def subscribe(self, stream: "Stream", scopes: tuple[Scope, ...]) -> None:
        """Wake a stream for these scopes only, beside the fleet's changes, which wake every stream."""
        for scope in stream.subscribed:
            streams = self._by_scope[scope]
            del streams[stream]
            if not streams:
                del self._by_scope[scope]
        for scope in scopes:
            self._by_scope.setdefault(scope, {})[stream] = None
        stream.subscribed = scopes

    def close(self, reason: str) -> None:
        """End all streams, and those to come, with a reason; agents go to another replica or come back."""
        self._closed = reason
        for stream in list(self._streams):
            stream.close(reason)

    def open_streams(self) -> list["Stream"]:
        """All streams of this moment."""
        return list(self._streams)

    def agents(self) -> list[AgentState]:
        """What is known of each stream, by node name; a node may have several."""
        now = self.clock()
        return sorted((stream.state(now) for stream in self._streams), key=lambda state: state.node)

    def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        dirty, self._dirty = self._dirty, set()
        concerned: Iterable[Stream]
        if FLEET in dirty:
            concerned = list(self._streams)
        else:
            concerned = {stream for scope in dirty for stream in self._by_scope.get(scope, ())}
        count = 0
        for stream in concerned:
            stream.wake()
            count += 1
        self.counters.wakeups += 1
        spacing = min(self.settings.max_spacing, count * self.settings.spacing_per_stream)
        self._next_wake = loop.time() + spacing


_ABSENT = object()


def _nothing() -> None:
    pass


class Stream:
    """One open stream: a session, what its agent acknowledged, and the writer's alarm clock."""

    def __init__(self, hub: Hub, hello: Hello, peer: str) -> None:
        self.hello = hello
        self.subscribed: tuple[Scope, ...] = ()
        self.closed: str | None = None
        """Why the stream is to be ended; None while it is not."""
        self._hub = hub
        self._peer = peer
        self._session = Session(
            hub.log,
            node=hello.node_name,
            zstd=hello.zstd,
            position=hello.position,
            mark_interval=hub.settings.mark_interval,
        )
        self._acks = AckTracker()
        self._since = hub.clock()
        self._sent_revision = 0
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = True
        self._idle = False
        """A mark is due."""
        self._last_mark = self._loop.time()
        self._timer = self._loop.call_later(hub.settings.mark_interval, self._tick)

    async def frames(self) -> Frames:
        """Wait for the next step and return its frames; none when the stream is to be ended.

        To be called by one task, once the frames before are written.
        """
        while self.closed is None:
            # Only when woken: a stream that looked by itself after each write would undo the spacing.
            if self._woken:
                self._woken = False
                frames = self._next()
                if frames:
                    return frames
            else:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
        return ()

    def receive(self, request: Ack | Resync) -> None:
        """Take what the agent sent."""
        if isinstance(request, Ack):
            self._hub.counters.acks += 1
            self._acks.received(request, at_most=self._sent_revision)
        else:
            self._hub.counters.resyncs += 1
            self._session.resync(request)
            self.wake()

    def wake(self) -> None:
        """There may be something to send."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, reason: str) -> None:
        """Have the writer end the stream."""
        if self.closed is None:
            self.closed = reason
        self.wake()

    def ended(self) -> None:
        """The stream is no longer the hub's."""
        self._timer.cancel()

    @property
    def acked_revision(self) -> int:
        """What the node's kernel holds; see AgentState."""
        # While no mark waits for its acknowledgment, the node has what the head says.
        if not self._acks.waits() and self._acks.acked > 0:
            return max(self._acks.acked, self._session.revision)
        return self._acks.acked

    @property
    def last_ack(self) -> Ack | None:
        """The newest acknowledgment."""
        return self._acks.last

    def state(self, now: float) -> AgentState:
        """What is known of the agent."""
        revision = self._session.revision
        return AgentState(
            node=self.hello.node_name,
            zone=self._session.zone.removeprefix("zone/"),
            peer=self._peer,
            agent_version=self.hello.agent_version,
            mode=self.hello.mode,
            connected_since=self._since,
            sent_revision=max(self._sent_revision, revision),
            acked_revision=self.acked_revision,
            lag=self._acks.lag(now),
            ack=self._acks.last,
        )

    def _next(self) -> Frames:
        hub = self._hub
        now = hub.clock()
        if self._idle or not self._sent_revision:
            hub.refresh()
        frames = self._session.idle_step(now) if self._idle else self._session.next_step(now)
        if frames:
            self._idle = False
            self._last_mark = self._loop.time()
            self._sent_revision = hub.log.revision
            self._acks.sent(self._sent_revision, now)
            counters = hub.counters
            counters.steps += 1
            counters.frames += len(frames)
            counters.bytes += sum(map(len, frames))
            scopes = self._session.scopes[1:]
            if scopes != self.subscribed:
                hub.subscribe(self, scopes)
        return frames

    def _tick(self) -> None:
        interval = self._hub.settings.mark_interval
        due = self._last_mark + interval - self._loop.time()
        if due <= 0.001:
            self._idle = True
            self.wake()
            due = interval
        self._timer = self._loop.call_later(due, self._tick)
