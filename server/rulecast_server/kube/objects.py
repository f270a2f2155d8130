"""The parts of the API objects that change rules, as msgspec decodes them; all else is skipped.

Field names follow the Kubernetes API (core/v1, discovery.k8s.io/v1, networking.k8s.io/v1). Optional means
that the API server may leave it out or send null; values are not validated here.
"""

import msgspec


class Meta(msgspec.Struct, frozen=True, rename="camel", gc=False):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ServicePortSpec(msgspec.Struct, frozen=True, rename="camel", gc=False):
    port: int
    name: str | None = None
    protocol: str | None = None
    node_port: int | None = None


class ClientIPConfig(msgspec.Struct, frozen=True, rename="camel", gc=False):
    timeout_seconds: int | None = None


class SessionAffinityConfig(msgspec.Struct, frozen=True, gc=False):
    client_ip: ClientIPConfig | None = msgspec.field(default=None, name="clientIP")


class ServiceSpec(msgspec.Struct, frozen=True, rename="camel", gc=False):
    type: str | None = None
    cluster_ip: str | None = msgspec.field(default=None, name="clusterIP")
    cluster_ips: list[str] | None = msgspec.field(default=None, name="clusterIPs")
    ip_families: list[str] | None = None
    ports: list[ServicePortSpec] | None = None
    external_ips: list[str] | None = msgspec.field(default=None, name="externalIPs")
    load_balancer_source_ranges: list[str] | None = None
    external_traffic_policy: str | None = None
    internal_traffic_policy: str | None = None
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    health_check_node_port: int | None = None


class LoadBalancerIngress(msgspec.Struct, frozen=True, rename="camel", gc=False):
    ip: str | None = None
    ip_mode: str | None = None


class LoadBalancerStatus(msgspec.Struct, frozen=True, gc=False):
    ingress: list[LoadBalancerIngress] | None = None


class ServiceStatus(msgspec.Struct, frozen=True, rename="camel", gc=False):
    load_balancer: LoadBalancerStatus | None = None


class Service(msgspec.Struct, frozen=True, gc=False):
    metadata: Meta
    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus | None = None


class EndpointConditions(msgspec.Struct, frozen=True, gc=False):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class HintFor(msgspec.Struct, frozen=True, gc=False):
    name: str


class EndpointHints(msgspec.Struct, frozen=True, rename="camel", gc=False):
    for_zones: list[HintFor] | None = None
    for_nodes: list[HintFor] | None = None


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel", gc=False):
    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    hints: EndpointHints | None = None


class SlicePort(msgspec.Struct, frozen=True, gc=False):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel", gc=False):
    metadata: Meta
    address_type: str = ""
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


class NodeAddress(msgspec.Struct, frozen=True, gc=False):
    type: str
    address: str


class NodeStatus(msgspec.Struct, frozen=True, gc=False):
    addresses: list[NodeAddress] | None = None


class Taint(msgspec.Struct, frozen=True, gc=False):
    key: str


class NodeSpec(msgspec.Struct, frozen=True, rename="camel", gc=False):
    pod_cidr: str | None = msgspec.field(default=None, name="podCIDR")
    pod_cidrs: list[str] | None = msgspec.field(default=None, name="podCIDRs")
    taints: list[Taint] | None = None


class Node(msgspec.Struct, frozen=True, gc=False):
    metadata: Meta
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class ServiceCIDRSpec(msgspec.Struct, frozen=True, gc=False):
    cidrs: list[str] | None = None


class ServiceCIDR(msgspec.Struct, frozen=True, gc=False):
    metadata: Meta
    spec: ServiceCIDRSpec | None = None


ApiObject = Service | EndpointSlice | Node | ServiceCIDR


class ObjectEvent(msgspec.Struct, frozen=True, gc=False):
    """One object of a source added or changed (`object` set) or gone (`object` None).

    `resource` is the API's plural: services, endpointslices, nodes, servicecidrs.
    """

    resource: str
    namespace: str
    name: str
    object: ApiObject | None
