"""What is known of each connected agent."""

from collections import deque

import msgspec

from rulecast.wire.messages import Ack

_MAX_WAITING = 64


class AgentState(msgspec.Struct, frozen=True, kw_only=True):
    """One stream, for people and metrics. Revisions are this replica's."""

    node: str
    zone: str
    peer: str
    agent_version: str
    mode: str
    connected_since: float
    """Unix seconds."""
    sent_revision: int
    acked_revision: int
    """What the node's kernel holds. The head, as long as nothing newer concerns the node; 0: never told."""
    lag: float
    """Seconds for which the oldest unacknowledged mark has waited; 0 when none does."""
    ack: Ack | None
    """The last one."""


class AckTracker:
    """Which marks wait for an acknowledgment, and since when."""

    __slots__ = ("_waiting", "acked", "last")

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, float]] = deque()
        self.acked = 0
        self.last: Ack | None = None

    def sent(self, revision: int, now: float) -> None:
        """A mark was handed out."""
        if revision <= self.acked or (self._waiting and self._waiting[-1][0] == revision):
            return
        if len(self._waiting) >= _MAX_WAITING:
            # Newer marks share the time of the last one that fits: bounded, and lag is never told too small.
            self._waiting[-1] = (revision, self._waiting[-1][1])
        else:
            self._waiting.append((revision, now))

    def received(self, ack: Ack, *, at_most: int) -> None:
        """The agent acknowledged a revision; a report of errors may repeat the last one."""
        self.last = ack
        self.acked = max(self.acked, min(ack.revision, at_most))
        while self._waiting and self._waiting[0][0] <= self.acked:
            self._waiting.popleft()

    def waits(self) -> bool:
        """Something is not acknowledged."""
        return bool(self._waiting)

    def lag(self, now: float) -> float:
        """Seconds since the oldest unacknowledged mark."""
        return max(0.0, now - self._waiting[0][1]) if self._waiting else 0.0
