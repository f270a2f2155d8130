"""The projected model: what a node should have, as frozen values.

Everything between the projector and the rule compilers is one of these types. Keys and addresses are
canonical text, so that equal content is equal bytes on every replica.

Scopes: a resource belongs to the whole fleet, to one zone or to one node. A node's view is the union of
its three scopes; where the same resource exists in more than one, the most specific scope wins
(node over zone over fleet).
"""

import enum
from typing import NamedTuple, NewType

import msgspec

NodeName = NewType("NodeName", str)
Revision = NewType("Revision", int)
Digest = NewType("Digest", int)
"""Sum modulo 2**64 of the hashes of all that a scope (or a bucket of it) holds; see `rulecast.digest`."""


class Family(enum.IntEnum):
    """An IP family. The two are projected, sent and programmed independently of each other."""

    IPV4 = 4
    IPV6 = 6


class Protocol(enum.StrEnum):
    """A transport protocol, spelled as in the Service API."""

    TCP = "TCP"
    UDP = "UDP"
    SCTP = "SCTP"


Scope = NewType("Scope", str)
"""`fleet`, `zone/NAME` (NAME may be empty: nodes without a zone label) or `node/NAME`."""

FLEET = Scope("fleet")


def zone_scope(zone: str) -> Scope:
    """The scope of the nodes whose `topology.kubernetes.io/zone` label is `zone` ("" for none)."""
    return Scope(f"zone/{zone}")


def node_scope(node: str) -> Scope:
    """The scope of one node."""
    return Scope(f"node/{node}")


ServiceKey = NewType("ServiceKey", str)
"""One port of one Service in one family: `NAMESPACE/NAME:PORTNAME/PROTOCOL/ipv4|ipv6`.

kube-proxy's ServicePortName plus the family. PORTNAME is empty for an unnamed port.
"""


class ServicePortName(NamedTuple):
    """The parts of a `ServiceKey`."""

    namespace: str
    name: str
    port_name: str
    protocol: Protocol
    family: Family


def service_key(name: ServicePortName) -> ServiceKey:
    """Render the textual key."""
    return ServiceKey(f"{name.namespace}/{name.name}:{name.port_name}/{name.protocol}/ipv{int(name.family)}")


def parse_service_key(key: str) -> ServicePortName:
    """Split a textual key.

    Raises ValueError when `key` is not one.
    """
    namespace, sep, rest = key.partition("/")
    name_port, _, tail = rest.partition("/")
    protocol, _, family = tail.partition("/")
    name, colon, port_name = name_port.partition(":")
    if not (sep and namespace and name and colon) or family not in ("ipv4", "ipv6"):
        raise ValueError(f"not a service key: {key!r}")
    return ServicePortName(namespace, name, port_name, Protocol(protocol), Family(int(family[3:])))


class Endpoint(NamedTuple):
    """One backend: canonical address text and a port, 1 to 65535."""

    ip: str
    port: int


class ServicePort(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The frontends and policies of one Service port in one family (kube-proxy's ServicePort)."""

    key: ServiceKey
    cluster_ip: str
    port: int
    node_port: int = 0
    """0: none."""
    external_ips: tuple[str, ...] = ()
    load_balancer_ips: tuple[str, ...] = ()
    """Ingress addresses of this family whose ipMode is VIP or absent."""
    source_ranges: tuple[str, ...] = ()
    """Canonical CIDRs of this family; they guard the load-balancer addresses only."""
    restrict_sources: bool = False
    """The Service names source ranges. With no `source_ranges` of this family, nobody may come."""
    external_local: bool = False
    """externalTrafficPolicy Local; never set on a Service that is not externally reachable."""
    internal_local: bool = False
    affinity_seconds: int = 0
    """Idle time after which a client may move; 0: no session affinity."""
    health_check_node_port: int = 0
    """0: none. Set only for type LoadBalancer with externalTrafficPolicy Local."""
    has_endpoints: bool = False
    """Some endpoint somewhere is ready, or serving and terminating (kube-proxy's hasAnyEndpoints)."""

    @property
    def name(self) -> ServicePortName:
        """The key's parts."""
        return parse_service_key(self.key)

    @property
    def externally_reachable(self) -> bool:
        """Has a node port, an external address or a load-balancer address."""
        return bool(self.node_port or self.external_ips or self.load_balancer_ips)

    @property
    def uses_cluster_endpoints(self) -> bool:
        """Some destination of it is served from the cluster-wide set."""
        return not self.internal_local or self.externally_reachable

    @property
    def uses_local_endpoints(self) -> bool:
        """Some destination of it is served from the node's own endpoints."""
        return self.internal_local or (self.external_local and self.externally_reachable)


class EndpointSet(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The usable endpoints of one Service port for one purpose, policy already resolved."""

    members: tuple[Endpoint, ...] = ()
    """Sorted, without duplicates."""
    ready: int = 0
    """In LOCAL_ENDPOINTS only: how many distinct addresses are ready (the health-check node port's count).

    0 while the members are a fallback to terminating ones.
    """


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an agent must know of its own Node object."""

    name: str
    zone: str = ""
    addresses: tuple[str, ...] = ()
    """Canonical; InternalIPs before ExternalIPs, each in the object's order."""
    pod_cidrs: tuple[str, ...] = ()
    eligible: bool = True
    """False when the Node is being deleted or has the cluster autoscaler's deletion taint (KEP-3836)."""


class ClusterInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Facts of the whole cluster."""

    service_cidrs: tuple[str, ...] = ()
    """Canonical, from ServiceCIDR objects; empty when unknown."""


class Kind(enum.IntEnum):
    """The kinds of resource. The order is the order in which snapshots carry them."""

    CLUSTER = 1
    """One ClusterInfo, key "", fleet scope."""
    NODE = 2
    """One NodeInfo, key "", in each node's scope."""
    SERVICE = 3
    """ServicePort, fleet scope."""
    CLUSTER_ENDPOINTS = 4
    """EndpointSet for cluster policies. Fleet scope without topology; with zone hints one per zone instead;
    with node hints also in the scopes of the hinted nodes. Only for services that use cluster endpoints."""
    LOCAL_ENDPOINTS = 5
    """EndpointSet of the node's own: its ready ones, else its serving and terminating ones. Node scope."""
    SERVING_ENDPOINTS = 6
    """Fleet scope, UDP only, and only where it differs from the fleet's CLUSTER_ENDPOINTS: every serving
    endpoint, whatever topology says. A UDP flow to one of these is not stale."""


class ResourceId(NamedTuple):
    """Identifies a resource within a scope. `key` is a ServiceKey, or "" for the singletons."""

    kind: Kind
    key: str


Value = ServicePort | EndpointSet | NodeInfo | ClusterInfo


class Change(NamedTuple):
    """One resource before and after; None means absent. Never equal on both sides."""

    old: Value | None
    new: Value | None


Changes = dict[Scope, dict[ResourceId, Change]]
"""What one projection step changed, by scope. Empty scopes are absent."""
