"""Short ways to write API objects, and the view that one node gets of what was projected."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rulecast.model import (
    FLEET,
    Change,
    Changes,
    Endpoint,
    EndpointSet,
    Kind,
    ResourceId,
    Scope,
    ServiceKey,
    ServicePort,
    Value,
    node_scope,
    zone_scope,
)
from rulecast_server.kube.objects import (
    ApiObject,
    ClientIPConfig,
    EndpointConditions,
    EndpointHints,
    EndpointSlice,
    HintFor,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Meta,
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectEvent,
    Service,
    ServiceCIDR,
    ServiceCIDRSpec,
    ServicePortSpec,
    ServiceSpec,
    ServiceStatus,
    SessionAffinityConfig,
    SliceEndpoint,
    SlicePort,
    Taint,
)
from rulecast_server.projection import Projection, Projector

OLD = "2024-01-01T00:00:00Z"
NEW = "2025-01-01T00:00:00Z"

ZONE = "topology.kubernetes.io/zone"
SERVICE_NAME = "kubernetes.io/service-name"
TRIGGER = "endpoints.kubernetes.io/last-change-trigger-time"

HTTP = ServicePortSpec(port=80, name="http", protocol="TCP")
DNS = ServicePortSpec(port=53, name="dns", protocol="UDP")


def port(
    number: int = 80, name: str | None = "http", protocol: str | None = "TCP", node_port: int = 0
) -> ServicePortSpec:
    return ServicePortSpec(port=number, name=name, protocol=protocol, node_port=node_port or None)


def service(
    name: str = "web",
    *,
    cluster_ips: Sequence[str] = ("10.96.0.20",),
    ports: Sequence[ServicePortSpec] = (HTTP,),
    type: str = "ClusterIP",
    external_ips: Sequence[str] = (),
    ingress: Sequence[str | LoadBalancerIngress] = (),
    ranges: Sequence[str] = (),
    etp: str | None = None,
    itp: str | None = None,
    affinity: str | None = None,
    timeout: int | None = None,
    health_check: int | None = None,
    labels: dict[str, str] | None = None,
    created: str | None = OLD,
    namespace: str = "default",
    annotations: dict[str, str] | None = None,
) -> Service:
    config = None
    if timeout is not None:
        config = SessionAffinityConfig(client_ip=ClientIPConfig(timeout_seconds=timeout))
    spec = ServiceSpec(
        type=type,
        cluster_ip=cluster_ips[0] if cluster_ips else "",
        cluster_ips=list(cluster_ips),
        ports=list(ports),
        external_ips=list(external_ips) or None,
        load_balancer_source_ranges=list(ranges) or None,
        external_traffic_policy=etp,
        internal_traffic_policy=itp,
        session_affinity=affinity,
        session_affinity_config=config,
        health_check_node_port=health_check,
    )
    points = [LoadBalancerIngress(ip=one) if isinstance(one, str) else one for one in ingress]
    status = ServiceStatus(load_balancer=LoadBalancerStatus(ingress=points)) if points else None
    meta = Meta(
        name=name, namespace=namespace, creation_timestamp=created, labels=labels, annotations=annotations
    )
    return Service(metadata=meta, spec=spec, status=status)


def endpoint(
    ip: str | None,
    node: str | None = None,
    *,
    ready: bool | None = True,
    serving: bool | None = True,
    terminating: bool | None = False,
    zones: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> SliceEndpoint:
    hints = EndpointHints(
        for_zones=[HintFor(name=zone) for zone in zones] or None,
        for_nodes=[HintFor(name=name) for name in nodes] or None,
    )
    return SliceEndpoint(
        addresses=None if ip is None else [ip],
        conditions=EndpointConditions(ready=ready, serving=serving, terminating=terminating),
        node_name=node,
        hints=hints if zones or nodes else None,
    )


def draining(ip: str, node: str | None = None) -> SliceEndpoint:
    """Not ready, still serving, terminating: the fallback."""
    return endpoint(ip, node, ready=False, terminating=True)


def dead(ip: str, node: str | None = None) -> SliceEndpoint:
    return endpoint(ip, node, ready=False, serving=False, terminating=True)


def slice_(
    name: str = "web-1",
    *endpoints: SliceEndpoint,
    of: str | None = "web",
    family: str = "IPv4",
    ports: Sequence[SlicePort] | None = (SlicePort(name="http", port=8080, protocol="TCP"),),
    namespace: str = "default",
    triggered: str | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> EndpointSlice:
    notes = dict(annotations or {})
    if triggered:
        notes[TRIGGER] = triggered
    marks = dict(labels or {})
    if of is not None:
        marks[SERVICE_NAME] = of
    return EndpointSlice(
        metadata=Meta(name=name, namespace=namespace, labels=marks or None, annotations=notes or None),
        address_type=family,
        endpoints=list(endpoints),
        ports=None if ports is None else list(ports),
    )


def node(
    name: str,
    zone: str | None = None,
    *,
    addresses: Sequence[tuple[str, str]] = (),
    pod_cidrs: Sequence[str] = (),
    taints: Sequence[str] = (),
    deleted: str | None = None,
    labels: dict[str, str] | None = None,
) -> Node:
    marks = dict(labels or {})
    if zone is not None:
        marks[ZONE] = zone
    return Node(
        metadata=Meta(name=name, labels=marks or None, deletion_timestamp=deleted),
        spec=NodeSpec(pod_cidrs=list(pod_cidrs) or None, taints=[Taint(key=key) for key in taints] or None),
        status=NodeStatus(addresses=[NodeAddress(type=kind, address=ip) for kind, ip in addresses]),
    )


def service_cidr(name: str, *cidrs: str) -> ServiceCIDR:
    return ServiceCIDR(metadata=Meta(name=name), spec=ServiceCIDRSpec(cidrs=list(cidrs)))


_RESOURCES: dict[type[ApiObject], str] = {
    Service: "services",
    EndpointSlice: "endpointslices",
    Node: "nodes",
    ServiceCIDR: "servicecidrs",
}


def added(item: ApiObject) -> ObjectEvent:
    return ObjectEvent(_RESOURCES[type(item)], item.metadata.namespace, item.metadata.name, item)


def gone(item: ApiObject) -> ObjectEvent:
    return ObjectEvent(_RESOURCES[type(item)], item.metadata.namespace, item.metadata.name, None)


State = dict[Scope, dict[ResourceId, Value]]


def accumulate(state: State, changes: Changes) -> None:
    """Apply changes as the feed does, and insist that every `old` is what stands."""
    for scope, resources in changes.items():
        assert resources, f"empty scope {scope}"
        held = state.setdefault(scope, {})
        for resource, change in resources.items():
            assert isinstance(change, Change)
            assert change.old != change.new, (scope, resource)
            assert held.get(resource) == change.old, (scope, resource)
            if change.new is None:
                del held[resource]
            else:
                held[resource] = change.new
        if not held:
            del state[scope]


class Backends(NamedTuple):
    """What one node would program for one Service port; addresses as IP:PORT."""

    cluster: list[str]
    local: list[str]
    local_ready: int
    serving: list[str] | None
    """None unless UDP."""


def texts(members: Iterable[Endpoint]) -> list[str]:
    return [f"{member.ip}:{member.port}" for member in members]


class Cluster:
    """A projector and the sum of what it said."""

    def __init__(self, *items: ApiObject) -> None:
        self.projector = Projector()
        self.state: State = {}
        self.step(*items)

    def step(self, *items: ApiObject, remove: Sequence[ApiObject] = ()) -> Projection:
        return self.feed([*map(gone, remove), *map(added, items)])

    def feed(self, events: Iterable[ObjectEvent]) -> Projection:
        self.projector.apply(events)
        projection = self.projector.flush()
        accumulate(self.state, projection.changes)
        return projection

    @property
    def ports(self) -> dict[ServiceKey, ServicePort]:
        fleet = self.state.get(FLEET, {})
        return {ServiceKey(rid.key): v for rid, v in fleet.items() if isinstance(v, ServicePort)}

    def port(self, key: str) -> ServicePort:
        return self.ports[ServiceKey(key)]

    def scopes(self, kind: Kind, key: str) -> dict[Scope, EndpointSet]:
        found = {}
        for scope, resources in self.state.items():
            value = resources.get(ResourceId(kind, key))
            if isinstance(value, EndpointSet):
                found[scope] = value
        return found

    def backends(self, key: str, node_name: str) -> Backends:
        """The merged view: node over zone over fleet."""
        scopes = (
            node_scope(node_name),
            zone_scope(self.projector.zone_of(node_name) or ""),
            FLEET,
        )

        def merged(kind: Kind) -> EndpointSet | None:
            for scope in scopes:
                value = self.state.get(scope, {}).get(ResourceId(kind, key))
                if isinstance(value, EndpointSet):
                    return value
            return None

        cluster = merged(Kind.CLUSTER_ENDPOINTS) or EndpointSet()
        local = merged(Kind.LOCAL_ENDPOINTS) or EndpointSet()
        serving = None
        if "/UDP/" in key:
            serving = texts((merged(Kind.SERVING_ENDPOINTS) or cluster).members)
        return Backends(texts(cluster.members), texts(local.members), local.ready, serving)

    def reasons(self) -> list[str]:
        return sorted(problem.reason.value for problem in self.projector.problems)
