"""The seam between where updates come from and who applies them."""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from rulecast.view import Receipt, Update


class FeedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a feed knows of itself at this moment. Times are unix seconds by this host's clock."""

    connected: bool = False
    """A stream is open and its first mark has come."""
    server: str = ""
    """The address of the stream, or of the last one."""
    server_revision: int = 0
    """The server's revision at the newest mark; each replica counts its own."""
    acked_revision: int = 0
    """The server's revision that was last acknowledged on this stream."""
    last_mark: float | None = None
    """When the newest mark came; what we hold is no older than this. None: none came yet."""
    stale_since: float | None = None
    """Set while not connected: up to when what we hold is known to be true. For state from a checkpoint, when
    that was saved; None also when we hold nothing."""
    from_checkpoint: bool = False
    """What we hold came from disk; no server has confirmed it yet."""
    resource_versions: Mapping[str, int] = {}
    last_error: str = ""
    """Why the last stream ended; empty while connected."""
    problems: tuple[str, ...] = ()
    """What is wrong now, a line each: unverified content, things that this version does not understand."""
    counters: Mapping[str, int] = {}
    """Monotone, by name: connects, disconnects, silences, frames, bytes_received, bytes_decompressed, marks,
    updates, resets, bucket_resets, mismatches, unverified, unknown_changes, invalid_frames, held,
    went_back."""


class Feed(Protocol):
    """Delivers one node's committed updates and takes back what became of them."""

    @property
    def status(self) -> FeedStatus:
        """A snapshot; cheap enough to be taken each second."""
        ...

    async def run(self, on_update: Callable[[Update], None]) -> None:
        """Deliver until cancelled. Never ends by itself: the errors of servers and networks are retried.

        `on_update` is called on the event loop, must not block, and must not raise. The first update is full,
        and each later one builds on the one before it. `Update.revision` is the feed's own count of updates,
        the same across reconnects and replicas; a Receipt for one settles all before it.
        """
        ...

    def ack(self, receipt: Receipt) -> None:
        """Tell the server that the kernel holds the update of `receipt.revision`, except for its errors.

        Cheap and never blocks: only the newest receipt is kept while a write is pending.
        """
        ...

    def report(self, node_error: str) -> None:
        """Tell the server what is wrong with the node as a whole ("": nothing), as DataplaneError has it."""
        ...
