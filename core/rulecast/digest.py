"""Digests of content: how two replicas, or a server and an agent, tell that they hold the same.

A resource's hash is a sum, so that one endpoint more or less in a set of thousands costs one hash. A scope's
digest is the sum of its resources' hashes modulo 2**64, kept in buckets that the resource's key alone
chooses, so that two sides which differ can find out where. The same content gives the same digest in every
process: nothing here depends on order, on Python's hash seed or on the machine. These are checksums against
mistakes, not signatures.

With h = XXH3 64 of UTF-8 text and seed = h("KIND KEY"), KIND the decimal `Kind`:

    Service, Node, Cluster   h(serialized protobuf message, seed)
    endpoint set             h("exists READY", seed) + the sum over its members of h("IP PORT", seed)
    bucket of a resource     h(KEY) modulo the number of buckets
"""

from collections.abc import Iterable

import xxhash

from rulecast.model import FLEET, Digest, Endpoint, Kind, Scope

_MASK = (1 << 64) - 1
_h = xxhash.xxh3_64_intdigest

FLEET_BUCKETS = 256
# 10,000 services in 256 buckets: a reconnect after few changes costs some forty services a change, and naming
# its buckets costs the agent 2 KiB.
OTHER_BUCKETS = 16


def bucket_count(scope: Scope) -> int:
    """How many buckets a scope has."""
    return FLEET_BUCKETS if scope == FLEET else OTHER_BUCKETS


def bucket_of(key: str, buckets: int) -> int:
    """The bucket of all resources that have this key."""
    return int(_h(key.encode()) % buckets)


def seed_of(kind: Kind, key: str) -> int:
    """The seed with which a resource's parts are hashed."""
    return int(_h(b"%d %b" % (kind, key.encode())))


def payload_hash(seed: int, payload: bytes) -> int:
    """The hash of a resource that is one serialized message."""
    return int(_h(payload, seed))


def exists_hash(seed: int, ready: int) -> int:
    """The part of an endpoint set's hash that does not depend on its members."""
    return int(_h(b"exists %d" % ready, seed))


def members_hash(seed: int, members: Iterable[Endpoint]) -> int:
    """The part of an endpoint set's hash that its members, or some of them, make. May exceed 64 bits."""
    return sum([_h(f"{ip} {port}".encode(), seed) for ip, port in members])


def digest_text(digest: int) -> str:
    """The digest as it is written on the wire and in logs: 16 hexadecimal digits."""
    return f"{digest:016x}"


def parse_digest(text: str) -> Digest:
    """Read a digest back.

    Raises ValueError when `text` is not one.
    """
    if len(text) != 16:
        raise ValueError(f"not a digest: {text!r}")
    return Digest(int(text, 16))


class ScopeDigest:
    """The running digest of one scope."""

    __slots__ = ("buckets", "total")

    def __init__(self, count: int) -> None:
        self.total = Digest(0)
        self.buckets = [0] * count

    def shift(self, bucket: int, by: int) -> None:
        """Account for a difference of hashes, new minus old, in a bucket."""
        self.buckets[bucket] = (self.buckets[bucket] + by) & _MASK
        self.total = Digest((self.total + by) & _MASK)

    def clear(self, bucket: int) -> None:
        """The bucket holds nothing any more."""
        self.shift(bucket, -self.buckets[bucket])
