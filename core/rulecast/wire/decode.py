"""From the server's bytes to values."""

import sys
from collections.abc import Iterable

import zstandard
from google.protobuf.message import DecodeError

from rulecast.digest import parse_digest
from rulecast.model import ClusterInfo, Endpoint, Kind, NodeInfo, ResourceId, Scope, ServiceKey, ServicePort
from rulecast.v1 import rules_pb2 as pb
from rulecast.wire.messages import (
    Frame,
    Mark,
    Operation,
    Removal,
    ScopeStep,
    SetChange,
    Slot,
    Upsert,
    WireError,
)
from rulecast.wire.validate import check_endpoints, check_key, check_value

_MAX_DECOMPRESSED = 16 << 20
_SETS = {
    "cluster_endpoints": Kind.CLUSTER_ENDPOINTS,
    "local_endpoints": Kind.LOCAL_ENDPOINTS,
    "serving_endpoints": Kind.SERVING_ENDPOINTS,
}
_NODE = ResourceId(Kind.NODE, "")
_CLUSTER = ResourceId(Kind.CLUSTER, "")


def decode_frame(data: bytes) -> Frame:
    """Decode one message of Watch, compressed or not.

    Fields that this version does not know are ignored. Raises WireError.
    """
    message = _parse(data)
    if message.zstd:
        message = _parse(_decompress(message.zstd))
        if message.zstd:
            raise WireError("a compressed frame within a compressed frame")
    steps: list[ScopeStep] = []
    if message.HasField("fleet"):
        steps.append(_step(Slot.FLEET, message.fleet))
    if message.HasField("zone"):
        steps.append(_step(Slot.ZONE, message.zone))
    if message.HasField("node"):
        steps.append(_step(Slot.NODE, message.node))
    return Frame(steps=steps, mark=_mark(message.mark) if message.HasField("mark") else None)


def _decompress(packed: bytes) -> bytes:
    try:
        # The size that a frame declares is allocated before anything is read.
        declared = zstandard.frame_content_size(packed)
        if declared > _MAX_DECOMPRESSED:
            raise WireError(f"a compressed frame of {declared} bytes")
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=_MAX_DECOMPRESSED)
    except zstandard.ZstdError as error:
        raise WireError(f"a compressed frame is damaged: {error}") from None


def _parse(data: bytes) -> pb.Frame:
    try:
        return pb.Frame.FromString(data)
    except DecodeError:
        raise WireError(f"not a Frame ({len(data)} bytes)") from None


def _mark(mark: pb.Mark) -> Mark:
    return Mark(
        revision=mark.revision,
        time_ms=mark.time_ms,
        resource_versions=dict(mark.resource_versions),
        changed_versions=dict(mark.changed_versions),
        interval_ms=mark.interval_ms,
        resync=mark.resync,
    )


def _step(slot: Slot, message: pb.ScopeFrame) -> ScopeStep:
    operations: list[Operation] = []
    unknown = 0
    for change in message.changes:
        operation = _operation(change)
        if operation is None:
            unknown += 1
        else:
            operations.append(operation)
    try:
        digest = parse_digest(message.digest) if message.digest else None
    except ValueError as error:
        raise WireError(str(error)) from None
    return ScopeStep(
        slot=slot,
        scope=Scope(message.scope) if message.scope else None,
        reset=tuple(message.reset.buckets) if message.HasField("reset") else None,
        operations=operations,
        unknown=unknown,
        digest=digest,
    )


def _operation(change: pb.Change) -> Operation | None:
    field = change.WhichOneof("change")
    if field is None:
        return None
    kind = _SETS.get(field)
    if kind is not None:
        message: pb.Endpoints = getattr(change, field)
        resource = ResourceId(kind, sys.intern(message.key))
        if message.removed:
            return Removal(resource)
        check_key(message.key)
        add, remove = _members(message.add), _members(message.remove)
        check_endpoints(add)
        return SetChange(resource, add, remove, message.ready, message.trigger_time_ms)
    if field == "service":
        return _service(change.service)
    if field == "service_removed":
        return Removal(ResourceId(Kind.SERVICE, sys.intern(change.service_removed)))
    if field == "node":
        return _node(change.node)
    if field == "node_removed":
        return Removal(_NODE)
    cluster = ClusterInfo(service_cidrs=tuple(change.cluster.service_cidrs))
    check_value(cluster)
    return Upsert(_CLUSTER, cluster, _payload(change.cluster))


def _payload(message: pb.Service | pb.Node | pb.Cluster) -> bytes:
    # Fields that this version does not know are kept by the parser and written again, behind those that it
    # knows: the bytes are the server's as long as new fields get higher numbers.
    return message.SerializeToString(deterministic=True)


def _members(groups: Iterable[pb.Addresses]) -> list[Endpoint]:
    return [Endpoint(ip, group.port) for group in groups for ip in group.ips]


def _service(message: pb.Service) -> Upsert:
    # Interned: three or four tables per scope have the same keys.
    key = ServiceKey(sys.intern(message.key))
    port = ServicePort(
        key=key,
        cluster_ip=message.cluster_ip,
        port=message.port,
        node_port=message.node_port,
        external_ips=tuple(message.external_ips),
        load_balancer_ips=tuple(message.load_balancer_ips),
        source_ranges=tuple(message.source_ranges),
        restrict_sources=message.restrict_sources,
        external_local=message.external_local,
        internal_local=message.internal_local,
        affinity_seconds=message.affinity_seconds,
        health_check_node_port=message.health_check_node_port,
        has_endpoints=message.has_endpoints,
    )
    check_value(port)
    return Upsert(ResourceId(Kind.SERVICE, key), port, _payload(message))


def _node(message: pb.Node) -> Upsert:
    node = NodeInfo(
        name=message.name,
        zone=message.zone,
        addresses=tuple(message.addresses),
        pod_cidrs=tuple(message.pod_cidrs),
        eligible=message.eligible,
    )
    check_value(node)
    return Upsert(_NODE, node, _payload(message))
