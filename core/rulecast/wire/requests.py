"""The agent's messages, both ways."""

from google.protobuf.message import DecodeError

from rulecast.digest import digest_text, parse_digest
from rulecast.model import Scope
from rulecast.v1 import rules_pb2 as pb
from rulecast.wire.messages import (
    MAX_ERRORS,
    Ack,
    Hello,
    Position,
    Request,
    Resync,
    ScopePosition,
    Slot,
    WireError,
    slot_of,
)

_MAX_TEXT = 300
"""Characters of an error message that are worth sending; nft's can be long."""
_FIELDS = ((Slot.FLEET, "fleet"), (Slot.ZONE, "zone"), (Slot.NODE, "node"))


def encode_request(request: Request) -> bytes:
    """Serialize a WatchRequest."""
    if isinstance(request, Hello):
        hello = pb.Hello(
            node_name=request.node_name,
            agent_version=request.agent_version,
            mode=request.mode,
            instance=request.instance,
            compressions=("zstd",) if request.zstd else (),
        )
        if request.position:
            hello.position.CopyFrom(_position(request.position))
        return pb.WatchRequest(hello=hello).SerializeToString()
    if isinstance(request, Resync):
        resync = pb.Resync(id=request.id, position=_position(request.position))
        return pb.WatchRequest(resync=resync).SerializeToString()
    ack = pb.Ack(
        revision=request.revision,
        apply_ms=min(request.apply_ms, 0xFFFFFFFF),
        errors=[
            pb.ServiceError(key=key, message=text[:_MAX_TEXT]) for key, text in request.errors[:MAX_ERRORS]
        ],
        error_count=request.error_count,
        node_error=request.node_error[:_MAX_TEXT],
    )
    return pb.WatchRequest(ack=ack).SerializeToString()


def decode_request(data: bytes) -> Request | None:
    """Parse a WatchRequest; None for a kind that this version does not know.

    Raises WireError.
    """
    try:
        message = pb.WatchRequest.FromString(data)
    except DecodeError:
        raise WireError("not a WatchRequest") from None
    kind = message.WhichOneof("request")
    if kind == "hello":
        hello = message.hello
        return Hello(
            node_name=_node_name(hello.node_name),
            agent_version=hello.agent_version[:_MAX_TEXT],
            mode=hello.mode[:_MAX_TEXT],
            instance=hello.instance[:_MAX_TEXT],
            zstd="zstd" in hello.compressions,
            position=_parse_position(hello.position),
        )
    if kind == "resync":
        return Resync(id=message.resync.id, position=_parse_position(message.resync.position))
    if kind == "ack":
        ack = message.ack
        return Ack(
            revision=ack.revision,
            apply_ms=ack.apply_ms,
            errors=tuple((each.key, each.message[:_MAX_TEXT]) for each in ack.errors[:MAX_ERRORS]),
            error_count=max(ack.error_count, len(ack.errors)),
            node_error=ack.node_error[:_MAX_TEXT],
        )
    return None


def _node_name(name: str) -> str:
    # A DNS subdomain, as Kubernetes names nodes; "/" would make another scope of it.
    if not name:
        raise WireError("hello without node_name")
    if len(name) > 253:
        raise WireError(f"node_name of {len(name)} characters; at most 253 are allowed")
    if not (name.isascii() and name.isprintable()) or set(name) & set(" /"):
        raise WireError(f"node_name is not a node's name: {name!r}")
    return name


def _position(position: Position) -> pb.Position:
    fields = {name: _scope_position(position[slot]) for slot, name in _FIELDS if slot in position}
    return pb.Position(**fields)


def _scope_position(held: ScopePosition) -> pb.ScopePosition:
    return pb.ScopePosition(scope=held.scope, digest=digest_text(held.digest), buckets=held.buckets)


def _parse_position(message: pb.Position) -> Position:
    position: Position = {}
    for slot, name in _FIELDS:
        if not message.HasField(name):
            continue
        held: pb.ScopePosition = getattr(message, name)
        if not held.digest:
            continue
        scope = Scope(held.scope)
        if slot_of(scope) is not slot:
            raise WireError(f"position of {scope!r} given as the {name} scope")
        try:
            digest = parse_digest(held.digest)
        except ValueError as error:
            raise WireError(str(error)) from None
        position[slot] = ScopePosition(scope=scope, digest=digest, buckets=tuple(held.buckets))
    return position
