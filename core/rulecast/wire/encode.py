"""From model values to protobuf bytes.

The result is always the body of a ScopeFrame with some changes in it. Bodies concatenate: that is protobuf's
rule for merging messages, and what makes it possible to encode a change once and send it to everyone.
"""

from collections.abc import Iterable, Iterator

from rulecast.model import (
    ClusterInfo,
    Endpoint,
    EndpointSet,
    Kind,
    NodeInfo,
    ResourceId,
    ServicePort,
    Value,
)
from rulecast.v1 import rules_pb2 as pb

MAX_MEMBERS = 4096
"""Endpoints in one Change. An IPv6 address is at most 41 bytes on the wire: 164 KiB."""

_SETS = frozenset((Kind.CLUSTER_ENDPOINTS, Kind.LOCAL_ENDPOINTS, Kind.SERVING_ENDPOINTS))


def payload(value: ServicePort | NodeInfo | ClusterInfo) -> bytes:
    """The serialized Service, Node or Cluster message: what digests cover."""
    return _message(value).SerializeToString(deterministic=True)


def encode_change(
    resource: ResourceId, old: Value | None, new: Value | None, *, trigger_time_ms: int = 0
) -> Iterator[bytes]:
    """The ScopeFrame bodies that take a holder of `old` to `new`, each far below a frame's limit.

    Nothing when the two are equal. Raises ValueError for the removal of a ClusterInfo, which always exists.
    """
    if old == new:
        return
    if resource.kind in _SETS:
        assert not isinstance(old, ServicePort | NodeInfo | ClusterInfo)
        assert not isinstance(new, ServicePort | NodeInfo | ClusterInfo)
        for message in _endpoints(resource.key, old, new, trigger_time_ms):
            yield pb.ScopeFrame(changes=(_set_change(resource.kind, message),)).SerializeToString()
        return
    yield pb.ScopeFrame(changes=(_change(resource, new),)).SerializeToString()


def _set_change(kind: Kind, message: pb.Endpoints) -> pb.Change:
    if kind is Kind.CLUSTER_ENDPOINTS:
        return pb.Change(cluster_endpoints=message)
    if kind is Kind.LOCAL_ENDPOINTS:
        return pb.Change(local_endpoints=message)
    return pb.Change(serving_endpoints=message)


def _change(resource: ResourceId, new: Value | None) -> pb.Change:
    if isinstance(new, ServicePort):
        return pb.Change(service=_service(new))
    if isinstance(new, NodeInfo):
        return pb.Change(node=_node(new))
    if isinstance(new, ClusterInfo):
        return pb.Change(cluster=pb.Cluster(service_cidrs=new.service_cidrs))
    if resource.kind is Kind.SERVICE:
        return pb.Change(service_removed=resource.key)
    if resource.kind is Kind.NODE:
        return pb.Change(node_removed=True)
    raise ValueError(f"cannot be removed: {resource}")


def _message(value: ServicePort | NodeInfo | ClusterInfo) -> pb.Service | pb.Node | pb.Cluster:
    if isinstance(value, ServicePort):
        return _service(value)
    if isinstance(value, NodeInfo):
        return _node(value)
    return pb.Cluster(service_cidrs=value.service_cidrs)


def _service(port: ServicePort) -> pb.Service:
    return pb.Service(
        key=port.key,
        cluster_ip=port.cluster_ip,
        port=port.port,
        node_port=port.node_port,
        external_ips=port.external_ips,
        load_balancer_ips=port.load_balancer_ips,
        source_ranges=port.source_ranges,
        restrict_sources=port.restrict_sources,
        external_local=port.external_local,
        internal_local=port.internal_local,
        affinity_seconds=port.affinity_seconds,
        health_check_node_port=port.health_check_node_port,
        has_endpoints=port.has_endpoints,
    )


def _node(node: NodeInfo) -> pb.Node:
    return pb.Node(
        name=node.name,
        zone=node.zone,
        addresses=node.addresses,
        pod_cidrs=node.pod_cidrs,
        eligible=node.eligible,
    )


def _endpoints(
    key: str, old: EndpointSet | None, new: EndpointSet | None, trigger_time_ms: int
) -> Iterator[pb.Endpoints]:
    if new is None:
        yield pb.Endpoints(key=key, removed=True)
        return
    add: list[Endpoint]
    remove: list[Endpoint]
    if old is None:
        add, remove = list(new.members), []
    else:
        add, remove = members_difference(old.members, new.members)
    if len(add) + len(remove) <= MAX_MEMBERS:
        yield pb.Endpoints(
            key=key,
            add=_grouped(add),
            remove=_grouped(remove),
            ready=new.ready,
            trigger_time_ms=trigger_time_ms,
        )
        return
    for start in range(0, len(remove), MAX_MEMBERS):
        part = _grouped(remove[start : start + MAX_MEMBERS])
        yield pb.Endpoints(key=key, remove=part, ready=new.ready, trigger_time_ms=trigger_time_ms)
    for start in range(0, len(add), MAX_MEMBERS):
        part = _grouped(add[start : start + MAX_MEMBERS])
        yield pb.Endpoints(key=key, add=part, ready=new.ready, trigger_time_ms=trigger_time_ms)


def members_difference(
    old: tuple[Endpoint, ...], new: tuple[Endpoint, ...]
) -> tuple[list[Endpoint], list[Endpoint]]:
    """What was added and what removed, in the order of the tuples."""
    before = frozenset(old)
    after = frozenset(new)
    return [each for each in new if each not in before], [each for each in old if each not in after]


def _grouped(members: Iterable[Endpoint]) -> list[pb.Addresses]:
    ports: dict[int, list[str]] = {}
    for ip, port in members:
        ports.setdefault(port, []).append(ip)
    return [pb.Addresses(port=port, ips=ips) for port, ips in ports.items()]
