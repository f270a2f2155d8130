"""Hashes of model values; `rulecast.digest` says what they are made of."""

from rulecast.digest import exists_hash, members_hash, payload_hash, seed_of
from rulecast.model import EndpointSet, ResourceId, Value
from rulecast.wire.encode import members_difference, payload


def resource_hash(resource: ResourceId, value: Value) -> int:
    """The hash of one resource, not reduced modulo 2**64."""
    seed = seed_of(resource.kind, resource.key)
    if isinstance(value, EndpointSet):
        return exists_hash(seed, value.ready) + members_hash(seed, value.members)
    return payload_hash(seed, payload(value))


def hash_difference(resource: ResourceId, old: Value | None, new: Value | None) -> int:
    """How much a change shifts a digest. Of a set, only the members that changed are hashed."""
    if isinstance(old, EndpointSet) and isinstance(new, EndpointSet):
        seed = seed_of(resource.kind, resource.key)
        add, remove = members_difference(old.members, new.members)
        by = members_hash(seed, add) - members_hash(seed, remove)
        if old.ready != new.ready:
            by += exists_hash(seed, new.ready) - exists_hash(seed, old.ready)
        return by
    return (resource_hash(resource, new) if new is not None else 0) - (
        resource_hash(resource, old) if old is not None else 0
    )
