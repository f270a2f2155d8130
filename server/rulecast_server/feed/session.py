"""One agent's stream, without I/O: what to write next, given what was written before.

A session keeps positions, never changes: what happens while a write is pending is merged by asking the log
for the difference once the write is done. Nothing that was written counts when the stream dies; the agent's
next position says what it holds.
"""

from rulecast.digest import FLEET_BUCKETS, OTHER_BUCKETS
from rulecast.model import FLEET, Digest, Scope, node_scope, zone_scope
from rulecast.wire.frames import NOTHING, Encoded, answer_frame, assemble
from rulecast.wire.messages import Position, Resync, ScopePosition, Slot
from rulecast_server.feed.log import DeltaLog
from rulecast_server.feed.scope import ScopeState

Frames = tuple[bytes, ...]


# Buckets of a scope in which nothing is.
_EMPTY = ((0,) * FLEET_BUCKETS, (0,) * OTHER_BUCKETS, (0,) * OTHER_BUCKETS)


class Session:
    """The frames for one node's agent."""

    def __init__(
        self,
        log: DeltaLog,
        *,
        node: str,
        zstd: bool = False,
        position: Position | None = None,
        mark_interval: float = 10.0,
    ) -> None:
        self._log = log
        self._node = node
        self._node_scope = node_scope(node)
        self._zone_scope = zone_scope("")
        self._zstd = zstd
        self._interval_ms = int(mark_interval * 1000)
        self._at = 0
        """The revision of the last step handed out; 0: none yet."""
        self._buckets = _EMPTY
        """Digests of what the agent has of each scope once it has read all that was handed out."""
        self._claimed: Position | None = position or {}
        """What the agent says it holds, to be answered with the next step; None: nothing to answer."""
        self._trusted = True
        """The claim may be a revision in the log: no frame of ours is on its way to the agent."""
        self._resync = 0
        """The resync that the next step answers."""

    @property
    def revision(self) -> int:
        """The revision up to which the agent's view is what was handed out."""
        if self._claimed is None and not self._concerned():
            return self._log.revision
        return self._at

    @property
    def zone(self) -> Scope:
        """The zone scope as of the last step."""
        return self._zone_scope

    @property
    def scopes(self) -> tuple[Scope, Scope, Scope]:
        """The scopes whose changes concern this agent. A node's zone changes in the node's own scope."""
        return FLEET, self._zone_scope, self._node_scope

    def resync(self, request: Resync) -> None:
        """The agent's digests are not ours: with the next step, send it what differs by content."""
        self._claimed = request.position
        self._resync = request.id
        # What was written since is still to be applied on top of that position.
        self._trusted = False

    def next_step(self, now: float) -> Frames:
        """The frames that bring the agent to the head, ending with a mark; none when nothing concerns it.

        Taken as sent. Not to be called before the frames of the last step were written. `now` is unix
        seconds.
        """
        log = self._log
        if not log.synced:
            return ()
        if self._claimed is not None:
            return self._answer(self._claimed, now)
        since = self._at
        if since == log.revision:
            return ()
        if since < log.horizon:
            # The log does not reach back; what we sent is known by its digests.
            self._trusted = False
            return self._answer(self._remembered(), now)
        node = log.scopes.get(self._node_scope)
        if node is not None and node.head > since:
            zone = zone_scope(log.zone_of(self._node))
            if zone != self._zone_scope:
                return self._move(zone, node, now)
        fleet = log.scopes.get(FLEET)
        zone_state = log.scopes.get(self._zone_scope)
        parts = [
            state.delta(since)
            for state in (fleet, zone_state, node)
            if state is not None and state.head > since
        ]
        if not any(part is not NOTHING for part in parts):
            self._at = log.revision
            return ()
        return self._hand_out(parts, since, now)

    def idle_step(self, now: float) -> Frames:
        """A step that is never empty: when nothing changed, a mark with the digests."""
        frames = self.next_step(now)
        log = self._log
        if frames or not log.synced:
            return frames
        parts = [log.scope(scope).proof() for scope in self.scopes]
        return assemble(parts, log.mark(log.revision, int(now * 1000), self._interval_ms), zstd=self._zstd)

    def _concerned(self) -> bool:
        scopes = self._log.scopes
        return any(name in scopes and scopes[name].head > self._at for name in self.scopes)

    def _remembered(self) -> Position:
        return {
            slot: ScopePosition(scope=scope, digest=Digest(0), buckets=buckets)
            for slot, scope, buckets in zip(Slot, self.scopes, self._buckets, strict=True)
        }

    def _answer(self, claimed: Position, now: float) -> Frames:
        self._zone_scope = zone_scope(self._log.zone_of(self._node))
        parts: list[Encoded] = []
        for slot, scope, sent in zip(Slot, self.scopes, self._buckets, strict=True):
            parts += self._resume(self._log.scope(scope), claimed.get(slot), sent)
        self._claimed = None
        self._trusted = True
        return self._hand_out(parts, 0, now)

    def _resume(self, state: ScopeState, claim: ScopePosition | None, sent: tuple[int, ...]) -> list[Encoded]:
        if claim is not None and claim.scope == state.name:
            if self._trusted:
                since = state.revision_of(claim.digest)
                if since is not None:
                    # Named first, then the difference; its digest is the same.
                    return [state.confirmation(), state.delta(since)]
            encoded = state.catch_up(claim.buckets, None if self._trusted else sent)
            if encoded is not None:
                return [encoded]
        return self._whole(state)

    def _whole(self, state: ScopeState) -> list[Encoded]:
        snapshot = state.snapshot(self._log.horizon)
        return [snapshot.encoded, state.delta(snapshot.revision)]

    def _move(self, zone: Scope, node: ScopeState, now: float) -> Frames:
        since = self._at
        self._zone_scope = zone
        parts = [self._log.scope(FLEET).delta(since), *self._whole(self._log.scope(zone)), node.delta(since)]
        return self._hand_out(parts, since, now)

    def _hand_out(self, parts: list[Encoded], since: int, now: float) -> Frames:
        log = self._log
        fleet, zone, node = map(log.scopes.get, self.scopes)
        self._buckets = (
            fleet.buckets if fleet is not None else _EMPTY[0],
            zone.buckets if zone is not None else _EMPTY[1],
            node.buckets if node is not None else _EMPTY[2],
        )
        self._at = log.revision
        mark = log.mark(since, int(now * 1000), self._interval_ms)
        if self._resync:
            mark += answer_frame(self._resync)
            self._resync = 0
        return assemble(parts, mark, zstd=self._zstd)
