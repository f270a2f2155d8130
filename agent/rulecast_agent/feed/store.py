"""One scope as the agent holds it, with the digest of what it holds."""

from collections.abc import Iterator

from rulecast.digest import (
    ScopeDigest,
    bucket_count,
    bucket_of,
    exists_hash,
    members_hash,
    payload_hash,
    seed_of,
)
from rulecast.model import Endpoint, EndpointSet, Kind, ResourceId, Scope, Value
from rulecast.wire.hashes import resource_hash
from rulecast.wire.messages import Operation, ScopePosition, SetChange, Upsert


class ScopeStore:
    """Resources by kind and key."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._tables: dict[Kind, dict[str, Value]] = {kind: {} for kind in Kind}
        self._hashes: dict[Kind, dict[str, int]] = {kind: {} for kind in Kind}
        """Of resources that are one message: it may hold more than the value that we made of it."""
        self._digest = ScopeDigest(bucket_count(scope))

    @property
    def digest(self) -> int:
        """Of all that the store holds."""
        return self._digest.total

    @property
    def position(self) -> ScopePosition:
        """What to tell a server that is to build upon it."""
        return ScopePosition(scope=self.scope, digest=self._digest.total, buckets=tuple(self._digest.buckets))

    def table(self, kind: Kind) -> dict[str, Value]:
        """The resources of one kind. Not to be changed by the caller."""
        return self._tables[kind]

    def resources(self) -> Iterator[tuple[ResourceId, Value]]:
        """All of them, by kind."""
        for kind, table in self._tables.items():
            for key, value in table.items():
                yield ResourceId(kind, key), value

    def load(self, resource: ResourceId, value: Value) -> None:
        """Put a value that does not come from the wire; the resource must be absent."""
        self._tables[resource.kind][resource.key] = value
        hashed = resource_hash(resource, value)
        if not isinstance(value, EndpointSet):
            self._hashes[resource.kind][resource.key] = hashed
        self._shift(resource.key, hashed)

    def apply(self, operation: Operation) -> None:
        """Carry out one change; adding what is there, or removing what is not, changes nothing."""
        if isinstance(operation, SetChange):
            self._change_set(operation)
        elif isinstance(operation, Upsert):
            kind, key = operation.resource
            new = payload_hash(seed_of(kind, key), operation.payload)
            old = self._hashes[kind].get(key, 0)
            self._tables[kind][key] = operation.value
            self._hashes[kind][key] = new
            self._shift(key, new - old)
        else:
            self._remove(operation.resource)

    def clear(self, buckets: tuple[int, ...]) -> set[str]:
        """Remove what is in these buckets (none given: everything); returns the keys of what there was."""
        count = len(self._digest.buckets)
        wanted = frozenset(buckets)
        gone: set[str] = set()
        for kind, table in self._tables.items():
            keys = [key for key in table if not wanted or bucket_of(key, count) in wanted]
            gone.update(keys)
            for key in keys:
                del table[key]
                self._hashes[kind].pop(key, None)
        for index in wanted or range(count):
            if index < count:
                self._digest.clear(index)
        return gone

    def _change_set(self, change: SetChange) -> None:
        kind, key = change.resource
        seed = seed_of(kind, key)
        table = self._tables[kind]
        old = table.get(key)
        if isinstance(old, EndpointSet):
            held = frozenset(old.members)
            remove = held.intersection(change.remove)
            add = frozenset(change.add) - (held - remove)
            by = members_hash(seed, add) - members_hash(seed, remove)
            if old.ready != change.ready:
                by += exists_hash(seed, change.ready) - exists_hash(seed, old.ready)
            members = tuple(sorted((held - remove) | add)) if add or remove else old.members
        else:
            members = _sorted(change.add)
            by = exists_hash(seed, change.ready) + members_hash(seed, members)
        table[key] = EndpointSet(members=members, ready=change.ready)
        self._shift(key, by)

    def _remove(self, resource: ResourceId) -> None:
        kind, key = resource
        old = self._tables[kind].pop(key, None)
        if old is None:
            return
        if isinstance(old, EndpointSet):
            self._shift(key, -resource_hash(resource, old))
        else:
            self._shift(key, -self._hashes[kind].pop(key))

    def _shift(self, key: str, by: int) -> None:
        self._digest.shift(bucket_of(key, len(self._digest.buckets)), by)


def _sorted(members: list[Endpoint]) -> tuple[Endpoint, ...]:
    if len(members) < 2:
        return tuple(members)
    return tuple(sorted(frozenset(members)))
