"""What travels, as values: the decoded form of the messages in `rules.proto`."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rulecast.model import ClusterInfo, Digest, Endpoint, NodeInfo, ResourceId, Scope, ServicePort


class WireError(Exception):
    """The other side sent what the protocol does not allow. `str()` says what, in one line."""


class Slot(enum.IntEnum):
    """The three scopes of a node's view, by their field numbers in Frame."""

    FLEET = 1
    ZONE = 2
    NODE = 3


def slot_of(scope: Scope) -> Slot:
    """The field in which a scope travels."""
    if scope.startswith("node/"):
        return Slot.NODE
    return Slot.ZONE if scope.startswith("zone/") else Slot.FLEET


class Upsert(NamedTuple):
    """A resource as a whole."""

    resource: ResourceId
    value: ServicePort | NodeInfo | ClusterInfo
    payload: bytes
    """The serialized message, with what of it this version does not know: what the digest covers."""


class SetChange(NamedTuple):
    """A part of an endpoint set's change."""

    resource: ResourceId
    add: list[Endpoint]
    remove: list[Endpoint]
    ready: int
    trigger_time_ms: int


class Removal(NamedTuple):
    """A resource is gone."""

    resource: ResourceId


Operation = Upsert | SetChange | Removal


class ScopeStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a frame says about one scope."""

    slot: Slot
    scope: Scope | None = None
    reset: tuple[int, ...] | None = None
    """Buckets to replace; empty: the whole scope; None: nothing."""
    operations: list[Operation] = []
    unknown: int = 0
    """Changes of a kind that this version does not know."""
    digest: Digest | None = None


class Mark(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of a step."""

    revision: int
    time_ms: int
    resource_versions: Mapping[str, int] = {}
    """Up to where each collection is in the content."""
    changed_versions: Mapping[str, int] = {}
    """Of the newest object or deletion in each; as in `resource_versions`, where it is not here."""
    interval_ms: int = 0
    resync: int = 0
    """The id of the newest resync that the step answers; 0: none."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message from the server, decompressed."""

    steps: list[ScopeStep]
    mark: Mark | None


class ScopePosition(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an agent holds of one scope."""

    scope: Scope
    digest: Digest
    buckets: tuple[int, ...] = ()


Position = dict[Slot, ScopePosition]
"""What an agent holds. A slot that is absent offers nothing to build upon."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's first message."""

    node_name: str
    agent_version: str = ""
    mode: str = ""
    instance: str = ""
    zstd: bool = False
    position: Position = {}


class Resync(msgspec.Struct, frozen=True, kw_only=True):
    """An agent found that its digests are not the server's."""

    id: int
    position: Position


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """What the node's kernel holds."""

    revision: int
    apply_ms: int = 0
    errors: tuple[tuple[str, str], ...] = ()
    """Service key and the kernel's words; at most MAX_ERRORS of them."""
    error_count: int = 0
    node_error: str = ""


Request = Hello | Resync | Ack

MAX_ERRORS = 100
