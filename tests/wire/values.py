"""Small universes of resources, and what a node should make of them."""

from collections.abc import Iterable, Mapping

from hypothesis import strategies as st

from rulecast.model import (
    FLEET,
    Change,
    Changes,
    ClusterInfo,
    Endpoint,
    EndpointSet,
    Kind,
    NodeInfo,
    ResourceId,
    Scope,
    ServiceKey,
    ServicePort,
    Value,
    node_scope,
    zone_scope,
)
from rulecast.view import ServiceView

Contents = dict[Scope, dict[ResourceId, Value]]

NODE = ResourceId(Kind.NODE, "")
CLUSTER = ResourceId(Kind.CLUSTER, "")


def key(name: object = "web", *, protocol: str = "TCP", family: int = 4) -> ServiceKey:
    return ServiceKey(f"default/{name}:http/{protocol}/ipv{family}")


def port(name: object = "web", **fields: object) -> ServicePort:
    return ServicePort(**{"key": key(name), "cluster_ip": "10.96.0.1", "port": 80, **fields})  # type: ignore[arg-type]


def endpoints(*addresses: str, ready: int = 0) -> EndpointSet:
    """`endpoints("10.0.0.1:80")`"""
    members = sorted(Endpoint(text.rpartition(":")[0], int(text.rpartition(":")[2])) for text in addresses)
    return EndpointSet(members=tuple(members), ready=ready)


def many(count: int, *, port: int = 8080) -> EndpointSet:
    """So many IPv6 endpoints, with the longest text that addresses have."""
    return EndpointSet(
        members=tuple(
            sorted(
                Endpoint(f"2001:db80:1234:5678:9abc:def0:{0x1000 | i >> 12:x}:{0x1000 | i & 0xFFF:x}", port)
                for i in range(count)
            )
        )
    )


def service(name: object) -> ResourceId:
    return ResourceId(Kind.SERVICE, key(name))


def cluster_set(name: object) -> ResourceId:
    return ResourceId(Kind.CLUSTER_ENDPOINTS, key(name))


def local_set(name: object) -> ResourceId:
    return ResourceId(Kind.LOCAL_ENDPOINTS, key(name))


def fleet_of(count: int, members: int = 3) -> dict[ResourceId, Value]:
    """A fleet scope of so many services."""
    contents: dict[ResourceId, Value] = {CLUSTER: ClusterInfo(service_cidrs=("10.96.0.0/12",))}
    for i in range(count):
        contents[service(i)] = port(i, cluster_ip=f"10.96.{i >> 8}.{i & 255}", has_endpoints=True)
        contents[cluster_set(i)] = endpoints(
            *(f"10.{i >> 8 & 255}.{i & 255}.{j}:8080" for j in range(members))
        )
    return contents


def changes(
    contents: Mapping[Scope, Mapping[ResourceId, Value | None]], before: Contents | None = None
) -> Changes:
    """The step that makes these values of what was before."""
    step: Changes = {}
    for scope, resources in contents.items():
        for resource, value in resources.items():
            old = (before or {}).get(scope, {}).get(resource)
            if old != value:
                step.setdefault(scope, {})[resource] = Change(old, value)
    return step


def apply(contents: Contents, step: Changes) -> None:
    for scope, resources in step.items():
        table = contents.setdefault(scope, {})
        for resource, change in resources.items():
            assert table.get(resource) == change.old
            if change.new is None:
                del table[resource]
            else:
                table[resource] = change.new


def node_view(contents: Contents, node: str) -> dict[ServiceKey, ServiceView]:
    """The union of a node's scopes, the most specific first: written down the slow way."""
    own = contents.get(node_scope(node), {})
    info = own.get(NODE)
    zone = contents.get(zone_scope(info.zone if isinstance(info, NodeInfo) else ""), {})
    merged = {**contents.get(FLEET, {}), **zone, **own}
    views = {}
    for (kind, name), value in merged.items():
        if kind is not Kind.SERVICE:
            continue
        sets = {
            each: merged.get(ResourceId(each, name), EndpointSet())
            for each in (Kind.CLUSTER_ENDPOINTS, Kind.LOCAL_ENDPOINTS, Kind.SERVING_ENDPOINTS)
        }
        local = sets[Kind.LOCAL_ENDPOINTS]
        views[ServiceKey(name)] = ServiceView(
            service=value,
            cluster=sets[Kind.CLUSTER_ENDPOINTS].members,
            local=local.members,
            serving=sets[Kind.SERVING_ENDPOINTS].members,
            local_ready=local.ready,
        )
    return views


def copy(contents: Contents) -> Contents:
    return {scope: dict(table) for scope, table in contents.items()}


NAMES = ("a", "b", "c", "d", "e", "f")
ZONES = ("", "x", "y")
NODES = ("n1", "n2")

_texts = st.sampled_from(("10.0.0.1", "10.0.0.2", "192.168.7.1", "fd00::1"))
addresses = st.lists(_texts, unique=True, max_size=3).map(tuple)
members = st.sets(st.builds(Endpoint, _texts, st.sampled_from((53, 80, 65535))), max_size=8).map(
    lambda each: tuple(sorted(each))
)
sets = st.builds(EndpointSet, members=members, ready=st.integers(0, 3))
nodes = st.builds(
    NodeInfo,
    name=st.just("n1"),
    zone=st.sampled_from(ZONES),
    addresses=addresses,
    pod_cidrs=st.sampled_from(((), ("10.1.0.0/24",))),
    eligible=st.booleans(),
)
clusters = st.builds(ClusterInfo, service_cidrs=st.sampled_from(((), ("10.96.0.0/12", "fd00::/108"))))


def ports_of(name: str) -> st.SearchStrategy[ServicePort]:
    return st.builds(
        ServicePort,
        key=st.just(key(name)),
        cluster_ip=_texts,
        port=st.integers(1, 65535),
        node_port=st.sampled_from((0, 30000)),
        external_ips=addresses,
        load_balancer_ips=addresses,
        source_ranges=st.sampled_from(((), ("10.0.0.0/8",))),
        restrict_sources=st.booleans(),
        external_local=st.booleans(),
        internal_local=st.booleans(),
        affinity_seconds=st.sampled_from((0, 10800)),
        health_check_node_port=st.sampled_from((0, 31000)),
        has_endpoints=st.booleans(),
    )


def resource_values(resource: ResourceId) -> st.SearchStrategy[Value | None]:
    """Any value of a resource, or its absence."""
    if resource.kind is Kind.CLUSTER:
        return clusters
    if resource.kind is Kind.NODE:
        return st.none() | nodes
    if resource.kind is Kind.SERVICE:
        name = resource.key.partition("/")[2].partition(":")[0]
        return st.none() | ports_of(name)
    return st.none() | sets


SLOTS: tuple[tuple[Scope, ResourceId], ...] = (
    (FLEET, CLUSTER),
    *(
        (FLEET, ResourceId(kind, key(name)))
        for name in NAMES
        for kind in Kind
        if kind >= Kind.SERVICE and kind != 5
    ),
    *((zone_scope(zone), cluster_set(name)) for zone in ZONES for name in NAMES[:3]),
    *((node_scope(node), resource) for node in NODES for resource in (NODE, *map(cluster_set, NAMES[:2]))),
    *((node_scope(node), local_set(name)) for node in NODES for name in NAMES[:3]),
)
"""Where resources may be."""


def slots() -> st.SearchStrategy[tuple[Scope, ResourceId]]:
    return st.sampled_from(SLOTS)


@st.composite
def assignments(draw: st.DrawFn, most: int = 4) -> dict[Scope, dict[ResourceId, Value | None]]:
    """New values for some resources."""
    chosen: dict[Scope, dict[ResourceId, Value | None]] = {}
    for scope, resource in draw(st.lists(slots(), min_size=1, max_size=most, unique=True)):
        chosen.setdefault(scope, {})[resource] = draw(resource_values(resource))
    return chosen


def merged(steps: Iterable[Changes]) -> Changes:
    """Several steps as one."""
    total: dict[Scope, dict[ResourceId, Change]] = {}
    for step in steps:
        for scope, resources in step.items():
            table = total.setdefault(scope, {})
            for resource, change in resources.items():
                old = table[resource].old if resource in table else change.old
                table[resource] = Change(old, change.new)
    result: Changes = {}
    for scope, resources in total.items():
        kept = {resource: change for resource, change in resources.items() if change.old != change.new}
        if kept:
            result[scope] = kept
    return result
