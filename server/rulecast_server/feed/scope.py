"""One scope's contents and recent history, and what a session needs of it, encoded once."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rulecast.digest import ScopeDigest, bucket_count, bucket_of
from rulecast.model import Change, Digest, Kind, NodeInfo, ResourceId, Scope, ServiceKey, Value
from rulecast.wire.encode import encode_change
from rulecast.wire.frames import NOTHING, Encoded, lay_out, scope_body
from rulecast.wire.hashes import hash_difference
from rulecast.wire.messages import Slot, slot_of

Before = Mapping[ResourceId, Value | None]

_NODE = ResourceId(Kind.NODE, "")
_MAX_CATCH_UPS = 64
_MAX_DELTAS = 256
# Encode a new snapshot once the delta that must follow the old one exceeds an eighth of it (or 64 resources).
_SNAPSHOT_SHARE = 8


class Step(NamedTuple):
    """What one revision changed in a scope."""

    revision: int
    before: Before
    """The values that it replaced."""
    digest_before: int
    trigger_times: Mapping[ServiceKey, float]


class Snapshot(NamedTuple):
    """A whole scope as of a revision."""

    revision: int
    encoded: Encoded


class ScopeState:
    """A scope at the head, and the steps that led there as far back as the log goes."""

    def __init__(self, name: Scope) -> None:
        self.name = name
        self.slot: Slot = slot_of(name)
        self.head = 0
        """The revision of the last change; 0: never."""
        self._digest = ScopeDigest(bucket_count(name))
        self.buckets: tuple[int, ...] = tuple(self._digest.buckets)
        """Digests of the buckets. A new tuple for each revision, so that sessions may keep one."""
        self._contents: list[dict[ResourceId, Value]] = [{} for _ in self.buckets]
        self._size = 0
        self._steps: deque[Step] = deque()
        self._seen: dict[int, int] = {}
        """By digest: the last revision, before the head's, at which the scope had it."""
        self._deltas: dict[int, Encoded] = {}
        self._catch_ups: dict[tuple[tuple[int, ...], tuple[int, ...]], Encoded] = {}
        self._confirmation: Encoded | None = None
        self._proof: Encoded | None = None
        self._snapshot: Snapshot | None = None
        self._churn = 0
        """Resources changed since the snapshot was encoded."""

    @property
    def digest(self) -> Digest:
        """The digest of the whole scope."""
        return self._digest.total

    @property
    def size(self) -> int:
        """How many resources it holds."""
        return self._size

    @property
    def node(self) -> NodeInfo | None:
        """The Node whose scope this is."""
        node = self.get(_NODE)
        return node if isinstance(node, NodeInfo) else None

    @property
    def forgettable(self) -> bool:
        """Nothing in it, and no session can be waiting to hear of that."""
        return not self._size and not self._steps

    def get(self, resource: ResourceId) -> Value | None:
        """A resource's value at the head."""
        return self._contents[bucket_of(resource.key, len(self._contents))].get(resource)

    def resources(self) -> Iterator[tuple[ResourceId, Value]]:
        """All that the scope holds."""
        for bucket in self._contents:
            yield from bucket.items()

    def advance(
        self,
        revision: int,
        changes: Mapping[ResourceId, Change],
        trigger_times: Mapping[ServiceKey, float],
    ) -> Before:
        """Move the head; returns what was replaced. The step is kept until `forget_oldest`."""
        before: dict[ResourceId, Value | None] = {}
        digest_before = self.digest
        for resource, (_, new) in changes.items():
            index = bucket_of(resource.key, len(self._contents))
            bucket = self._contents[index]
            old = bucket.get(resource)
            before[resource] = old
            if new is None:
                bucket.pop(resource, None)
            else:
                bucket[resource] = new
            self._size += (new is not None) - (old is not None)
            self._digest.shift(index, hash_difference(resource, old, new))
        self.buckets = tuple(self._digest.buckets)
        self._seen[digest_before] = revision - 1
        self._steps.append(Step(revision, before, digest_before, trigger_times))
        self.head = revision
        self._churn += len(changes)
        self._deltas.clear()
        self._catch_ups.clear()
        self._confirmation = None
        self._proof = None
        return before

    def forget_oldest(self) -> None:
        """Drop the oldest step."""
        step = self._steps.popleft()
        if self._seen.get(step.digest_before) == step.revision - 1:
            del self._seen[step.digest_before]

    def revision_of(self, digest: int) -> int | None:
        """A revision at which the scope had this digest; None: not as far back as the log goes."""
        return self.head if digest == self.digest else self._seen.get(digest)

    def proof(self) -> Encoded:
        """The digest alone, for an idle mark. Without the name, which would be 20 bytes for nothing."""
        if self._proof is None:
            self._proof = lay_out(self.slot, (scope_body(digest=self.digest),))
        return self._proof

    def confirmation(self) -> Encoded:
        """The scope's name and digest, which answer an agent that holds the content already."""
        if self._confirmation is None:
            body = scope_body(scope=self.name, digest=self.digest)
            self._confirmation = lay_out(self.slot, (body,))
        return self._confirmation

    def delta(self, since: int) -> Encoded:
        """What takes a holder of revision `since` to the head; nothing when that is the same content.

        Changes that came after each other are merged: each key is compared then and now.
        """
        if self.head <= since:
            return NOTHING
        encoded = self._deltas.get(since)
        if encoded is None:
            bodies = list(self._difference(since))
            encoded = NOTHING
            if bodies:
                bodies.append(scope_body(digest=self.digest))
                encoded = lay_out(self.slot, bodies)
            if len(self._deltas) >= _MAX_DELTAS:
                self._deltas.clear()
            self._deltas[since] = encoded
        return encoded

    def catch_up(self, held: Sequence[int], sent: Sequence[int] | None = None) -> Encoded | None:
        """What takes a holder of content with these bucket digests to the head; None: send a snapshot.

        `sent`, if not the same, are the digests of what was written before and may still be on its way. A
        bucket is left alone only when both are the head's: what is on its way then changes nothing in it.
        """
        sent = held if sent is None else sent
        if len(held) != len(self.buckets):
            return None
        differing = [
            index
            for index, (theirs, coming, ours) in enumerate(zip(held, sent, self.buckets, strict=True))
            if theirs != ours or coming != ours
        ]
        if not differing:
            return self.confirmation()
        if len(differing) * 2 > len(self.buckets):
            # More is sent than needed, but it is encoded and compressed already.
            return None
        key = (tuple(held), tuple(sent))
        encoded = self._catch_ups.get(key)
        if encoded is None:
            bodies = [scope_body(scope=self.name, reset=differing, digest=self.digest)]
            for index in differing:
                bodies += _whole(sorted(self._contents[index].items()))
            encoded = lay_out(self.slot, bodies)
            if len(self._catch_ups) < _MAX_CATCH_UPS:
                self._catch_ups[key] = encoded
        return encoded

    def snapshot(self, horizon: int) -> Snapshot:
        """The whole scope as of a revision from which `delta` still leads to the head.

        Not always the head: while changes pour in and many agents connect, one encoded snapshot and a short
        delta serve all of them.
        """
        held = self._snapshot
        if (
            held is not None
            and held.revision >= horizon
            and self._churn * _SNAPSHOT_SHARE <= self._size + 512
        ):
            return held
        bodies: list[bytes] = [scope_body(scope=self.name, reset=(), digest=self.digest)]
        bodies += _whole(sorted(self.resources(), key=lambda item: item[0]))
        snapshot = Snapshot(self.head, lay_out(self.slot, bodies))
        if self.slot is not Slot.NODE:
            # Nobody shares a node's.
            self._snapshot = snapshot
            self._churn = 0
        return snapshot

    def _difference(self, since: int) -> Iterator[bytes]:
        before: dict[ResourceId, Value | None] = {}
        triggered: dict[str, float] = {}
        for step in reversed(self._steps):
            if step.revision <= since:
                break
            before.update(step.before)
            for key, when in step.trigger_times.items():
                triggered[key] = min(when, triggered.get(key, when))
        for resource, old in before.items():
            trigger_time_ms = int(triggered.get(resource.key, 0.0) * 1000)
            yield from encode_change(resource, old, self.get(resource), trigger_time_ms=trigger_time_ms)


def _whole(resources: Iterable[tuple[ResourceId, Value]]) -> Iterator[bytes]:
    for resource, value in resources:
        yield from encode_change(resource, None, value)
