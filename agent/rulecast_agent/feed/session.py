"""The agent's side of a stream, without I/O: bytes in, updates and bytes out.

It outlives streams. Revisions on the wire are the server's own, and another replica counts differently. What
the dataplane hears and confirms are our own counts; the two are matched here, for the stream of the moment.
"""

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from rulecast.view import Receipt, Update
from rulecast.wire.decode import decode_frame
from rulecast.wire.messages import MAX_ERRORS, Ack, Hello
from rulecast.wire.requests import encode_request
from rulecast_agent.feed.base import FeedStatus
from rulecast_agent.feed.desired import Desired

_MAX_MARKS = 256
_LONGEST_MARK_INTERVAL = 60.0
"""Seconds. What a server promises beyond is not waited for: silence has to be noticed."""


class AgentIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who we are, for the server."""

    node_name: str
    version: str = ""
    mode: str = ""


class _Owed(msgspec.Struct):
    """A mark that can be acknowledged once our update `needs` is in the kernel."""

    needs: int
    server_revision: int


class AgentSession:
    """Protocol state of one agent."""

    def __init__(
        self,
        identity: AgentIdentity,
        desired: Desired | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.identity = identity
        self.desired = desired or Desired(identity.node_name)
        self.counters: Counter[str] = Counter()
        self.mark_interval = 10.0
        """Seconds; the server's word."""
        self._clock = clock
        self._instance = secrets.token_hex(8)
        self._resync: bytes | None = None
        self._owed: deque[_Owed] = deque()
        self._applied = 0
        """Our newest update that the kernel holds."""
        self._receipt: Receipt | None = None
        self._node_error = ""
        self._acked = 0
        self._ack_due = False
        self._connected = False
        self._server = ""
        self._server_revision = 0
        self._last_mark: float | None = None
        self._from_checkpoint: float | None = None
        self._last_error = ""

    @property
    def connected(self) -> bool:
        """The stream of the moment has had a mark."""
        return self._connected

    @property
    def status(self) -> FeedStatus:
        """For health, metrics and people."""
        held_since = self._last_mark if self._last_mark is not None else self._from_checkpoint
        return FeedStatus(
            connected=self._connected,
            server=self._server,
            server_revision=self._server_revision,
            acked_revision=self._acked,
            last_mark=self._last_mark,
            stale_since=None if self._connected else held_since,
            from_checkpoint=self._last_mark is None and self._from_checkpoint is not None,
            resource_versions=dict(self.desired.resource_versions),
            last_error=self._last_error,
            problems=self.desired.problems,
            counters=self.counters | self.desired.counters,
        )

    def restored(self, saved_at: float) -> None:
        """What `desired` holds comes from disk."""
        self._from_checkpoint = saved_at

    def hello(self, server: str) -> bytes:
        """Begin a stream to a server; returns the first request."""
        self.desired.begin()
        self._server = server
        self._resync = None
        self._owed.clear()
        self._acked = 0
        self._ack_due = bool(self._node_error)
        hello = Hello(
            node_name=self.identity.node_name,
            agent_version=self.identity.version,
            mode=self.identity.mode,
            instance=self._instance,
            zstd=True,
            position=self.desired.position(),
        )
        return encode_request(hello)

    def lost(self, error: str) -> None:
        """The stream ended."""
        if self._connected:
            self.counters["disconnects"] += 1
        self._connected = False
        self._last_error = error

    def frame(self, data: bytes) -> Update | None:
        """Take one message from the server; an update when it completed one.

        Raises WireError; the stream is then to be ended.
        """
        self.counters["frames"] += 1
        self.counters["bytes_received"] += len(data)
        commit = self.desired.frame(decode_frame(data))
        if commit is None:
            return None
        if not self._connected:
            self._connected = True
            self._last_error = ""
            self.counters["connects"] += 1
        if commit.mark.interval_ms:
            self.mark_interval = min(commit.mark.interval_ms / 1000, _LONGEST_MARK_INTERVAL)
        if commit.resync is not None:
            self._resync = encode_request(commit.resync)
        if not commit.committed:
            return None
        self._last_mark = self._clock()
        self._server_revision = commit.mark.revision
        self._owe(self.desired.revision, commit.mark.revision)
        return commit.update

    def ack(self, receipt: Receipt) -> None:
        """The kernel holds our update `receipt.revision`."""
        self._receipt = receipt
        self._applied = max(self._applied, receipt.revision)
        self._ack_due = True

    def report(self, node_error: str) -> None:
        """What is wrong with the node as a whole."""
        if node_error != self._node_error:
            self._node_error = node_error
            self._ack_due = True

    def request(self) -> bytes | None:
        """The next request to write, if any: the newest state of things, whatever happened in between."""
        if self._resync is not None:
            resync, self._resync = self._resync, None
            return resync
        while self._owed and self._owed[0].needs <= self._applied:
            revision = self._owed.popleft().server_revision
            self._ack_due |= revision != self._acked
            self._acked = revision
        if not self._ack_due or not self._connected:
            return None
        self._ack_due = False
        receipt = self._receipt
        errors = receipt.errors if receipt is not None else {}
        ack = Ack(
            revision=self._acked,
            apply_ms=int(receipt.seconds * 1000) if receipt is not None else 0,
            errors=tuple(sorted(errors.items())[:MAX_ERRORS]),
            error_count=len(errors),
            node_error=self._node_error,
        )
        return encode_request(ack)

    def _owe(self, needs: int, server_revision: int) -> None:
        if self._owed and (self._owed[-1].needs == needs or len(self._owed) >= _MAX_MARKS):
            # With a kernel that takes nothing for long, marks are no longer told apart.
            self._owed[-1] = _Owed(needs, server_revision)
        else:
            self._owed.append(_Owed(needs, server_revision))
