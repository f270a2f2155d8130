"""Objects cut down to what can change a rule, so that equality means "nothing to do"."""

import sys

from msgspec.structs import force_setattr

from rulecast_server.kube.objects import (
    ApiObject,
    EndpointConditions,
    EndpointSlice,
    Meta,
    Node,
    NodeSpec,
    Service,
    ServiceCIDR,
    SliceEndpoint,
    Taint,
)
from rulecast_server.kube.selectors import HEADLESS_LABEL, PROXY_NAME_LABEL

TRIGGER_ANNOTATION = "endpoints.kubernetes.io/last-change-trigger-time"

_LABELS = frozenset(
    {
        "kubernetes.io/service-name",
        PROXY_NAME_LABEL,
        HEADLESS_LABEL,
        "topology.kubernetes.io/zone",
    }
)
# Not-ready and pressure taints come and go with every hiccup of a node; only this one matters (KEP-3836).
_TAINTS = frozenset({"ToBeDeletedByClusterAutoscaler"})

_conditions: dict[EndpointConditions, EndpointConditions] = {}


def reduce_object(item: ApiObject) -> ApiObject:
    """The object without the fields that change no rule.

    uid and resourceVersion are blank in the result (the store keeps them beside it); labels and annotations
    are those that the projection reads. Strings that many objects repeat are interned.
    """
    if isinstance(item, EndpointSlice):
        return _slice(item)
    if isinstance(item, Service):
        return Service(metadata=_meta(item, created=True), spec=item.spec, status=item.status)
    if isinstance(item, Node):
        return _node(item)
    return ServiceCIDR(metadata=_meta(item), spec=item.spec)


def same_rules(old: ApiObject, new: ApiObject) -> bool:
    """Whether two reduced objects mean the same; the trigger time alone is no change."""
    if old == new:
        return True
    if not (isinstance(old, EndpointSlice) and isinstance(new, EndpointSlice)):
        return False
    return (
        old.endpoints == new.endpoints
        and old.ports == new.ports
        and old.address_type == new.address_type
        and old.metadata.labels == new.metadata.labels
    )


def _meta(item: ApiObject, *, created: bool = False) -> Meta:
    meta = item.metadata
    labels = meta.labels
    return Meta(
        name=meta.name,
        namespace=sys.intern(meta.namespace),
        creation_timestamp=meta.creation_timestamp if created else None,
        labels={key: sys.intern(labels[key]) for key in labels.keys() & _LABELS} or None if labels else None,
    )


def _slice(item: EndpointSlice) -> EndpointSlice:
    meta = item.metadata
    reduced = _meta(item)
    trigger = meta.annotations.get(TRIGGER_ANNOTATION) if meta.annotations else None
    if trigger is not None:
        force_setattr(reduced, "annotations", {TRIGGER_ANNOTATION: trigger})
    for endpoint in item.endpoints or ():
        _share(endpoint)
    return EndpointSlice(
        metadata=reduced,
        address_type=sys.intern(item.address_type),
        endpoints=item.endpoints,
        ports=item.ports,
    )


def _share(endpoint: SliceEndpoint) -> None:
    """Let endpoints share node names and conditions; the object is fresh from the decoder, nobody else's."""
    if endpoint.node_name is not None:
        force_setattr(endpoint, "node_name", sys.intern(endpoint.node_name))
    if endpoint.conditions is not None:
        # At most 27 values: three fields of true, false and null.
        shared = _conditions.setdefault(endpoint.conditions, endpoint.conditions)
        force_setattr(endpoint, "conditions", shared)


def _node(item: Node) -> Node:
    meta = _meta(item)
    if item.metadata.deletion_timestamp is not None:
        force_setattr(meta, "deletion_timestamp", item.metadata.deletion_timestamp)
    spec = item.spec
    if spec is not None:
        taints: list[Taint] = [taint for taint in spec.taints or () if taint.key in _TAINTS]
        spec = NodeSpec(pod_cidr=spec.pod_cidr, pod_cidrs=spec.pod_cidrs, taints=taints or None)
    return Node(metadata=meta, spec=spec, status=item.status)
