"""API objects for the packet tests, with regular addresses: service number N has
10.96.0.N, 203.0.113.N (load balancer), 203.0.114.N (external), node port 30000+N and port 80."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rulecast.lab import Lab
from rulecast.model import Family

Object = dict[str, Any]

CLUSTER_IP = "cluster IP"
NODE_PORT = "node port"
VIP = "load-balancer IP"
EXTERNAL_IP = "external IP"

SERVICE_CIDRS = {Family.IPV4: "10.96.0.0/16", Family.IPV6: "2001:db8:96::/112"}
_PREFIXES = {
    CLUSTER_IP: {Family.IPV4: "10.96.0.", Family.IPV6: "2001:db8:96::"},
    VIP: {Family.IPV4: "203.0.113.", Family.IPV6: "2001:db8:113::"},
    EXTERNAL_IP: {Family.IPV4: "203.0.114.", Family.IPV6: "2001:db8:114::"},
}
ROUTED = [f"{p[Family.IPV4]}0/24" for p in _PREFIXES.values()] + [
    f"{p[Family.IPV6]}/112" for p in _PREFIXES.values()
]
BOTH = (Family.IPV4, Family.IPV6)


def frontend(kind: str, number: int, family: Family) -> str:
    """The address of that kind that service `number` has."""
    return f"{_PREFIXES[kind][family]}{number}"


@dataclass(frozen=True)
class Ep:
    """One endpoint of a slice: who, in what state, with what hints."""

    name: str
    state: str = "ready"
    """ready, terminating (still serving), gone (terminating, not serving) or unready."""
    zones: Sequence[str] = ()
    nodes: Sequence[str] = ()

    def manifest(self, lab: Lab, family: Family) -> Object:
        address, node = place(lab, self.name, family)
        conditions = {
            "ready": {"ready": True, "serving": True, "terminating": False},
            "terminating": {"ready": False, "serving": True, "terminating": True},
            "gone": {"ready": False, "serving": False, "terminating": True},
            "unready": {"ready": False, "serving": False, "terminating": False},
            "serving-only": {"ready": False, "serving": True, "terminating": False},
        }[self.state]
        hints: Object = {}
        if self.zones:
            hints["forZones"] = [{"name": zone} for zone in self.zones]
        if self.nodes:
            hints["forNodes"] = [{"name": name} for name in self.nodes]
        made: Object = {"addresses": [address], "nodeName": node, "conditions": conditions}
        return made | ({"hints": hints} if hints else {})


def place(lab: Lab, name: str, family: Family) -> tuple[str, str]:
    """Address and node name of a backend, which is a pod or (host network) a node."""
    for node in lab.nodes.values():
        if name == node.name:
            return node.ip(family), node.name
        if name in node.pods:
            return node.pods[name].ip(family), node.name
    raise KeyError(name)


@dataclass(frozen=True)
class Port:
    """One port of a Service; `target` is the slice's number."""

    port: int = 80
    target: int = 8080
    protocol: str = "TCP"
    name: str = ""
    node_port: int | None = None
    """None: 30000 + the service's number, on exposed services."""
    endpoints: Sequence[Ep] | None = None
    """None: those of the service."""


TCP_AND_UDP = (Port(name="t"), Port(name="u", protocol="UDP"))


@dataclass(frozen=True)
class Svc:
    """A Service with its slices. `exposed`: node ports, a load-balancer IP and an external IP as well."""

    name: str
    number: int
    endpoints: Sequence[Ep] = ()
    ports: Sequence[Port] = TCP_AND_UDP
    exposed: bool = True
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Merged over the spec: policies, ranges, affinity, malformed addresses."""
    ingress: Sequence[Mapping[str, Any]] | None = None
    families: Sequence[Family] = BOTH
    slice_families: Sequence[Family] | None = None
    """Families in which endpoints exist; None: all of `families`."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def address(self, kind: str, family: Family) -> str:
        return frontend(kind, self.number, family)

    def node_port(self, port: Port) -> int:
        if port.node_port is not None:
            return port.node_port
        return 30000 + self.number if self.exposed else 0

    def manifests(self, lab: Lab) -> list[Object]:
        return [self._service(), *self._slices(lab)]

    def _service(self) -> Object:
        ips = [self.address(CLUSTER_IP, family) for family in self.families]
        spec: Object = {
            "type": "LoadBalancer" if self.exposed else "ClusterIP",
            "clusterIP": ips[0],
            "clusterIPs": ips,
            "ipFamilies": [f"IPv{int(family)}" for family in self.families],
            "ports": [
                {"name": each.name, "port": each.port, "protocol": each.protocol}
                | ({"nodePort": self.node_port(each)} if self.node_port(each) else {})
                for each in self.ports
            ],
        }
        ingress = self.ingress
        if self.exposed:
            spec["externalIPs"] = [self.address(EXTERNAL_IP, family) for family in self.families]
            if ingress is None:
                ingress = [{"ip": self.address(VIP, family)} for family in self.families]
        made: Object = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "namespace": "default", "labels": dict(self.labels)},
            "spec": spec | dict(self.spec),
        }
        return made | ({"status": {"loadBalancer": {"ingress": list(ingress)}}} if ingress else {})

    def _slices(self, lab: Lab) -> list[Object]:
        """One slice for each family and each set of endpoints."""
        made = []
        for family in self.families if self.slice_families is None else self.slice_families:
            groups: dict[str, tuple[Sequence[Ep], list[Port]]] = {}
            for port in self.ports:
                endpoints = self.endpoints if port.endpoints is None else port.endpoints
                groups.setdefault(repr(endpoints), (endpoints, []))[1].append(port)
            for index, (endpoints, ports) in enumerate(groups.values()):
                if endpoints:
                    made.append(
                        slice_(
                            f"{self.name}-v{int(family)}-{index}",
                            service=self.name,
                            family=family,
                            ports=[(port.name, port.target, port.protocol) for port in ports],
                            endpoints=[each.manifest(lab, family) for each in endpoints],
                        )
                    )
        return made


def slice_(
    name: str,
    *,
    service: str,
    family: Family,
    ports: Sequence[tuple[str, int, str]],
    endpoints: Sequence[Object],
) -> Object:
    """An EndpointSlice."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": service}},
        "addressType": f"IPv{int(family)}",
        "ports": [{"name": name, "port": port, "protocol": protocol} for name, port, protocol in ports],
        "endpoints": list(endpoints),
    }


def node_objects(lab: Lab) -> list[Object]:
    """The Node objects of a lab."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": node.name,
                "labels": {"topology.kubernetes.io/zone": node.zone} if node.zone else {},
            },
            "spec": {"podCIDR": node.pod_cidrs[Family.IPV4], "podCIDRs": list(node.pod_cidrs.values())},
            "status": {
                "addresses": [{"type": "InternalIP", "address": node.ip(family)} for family in BOTH]
                + [{"type": "Hostname", "address": node.name}]
            },
        }
        for node in lab.nodes.values()
    ]


def service_cidrs() -> Object:
    """The ServiceCIDR object that covers all cluster IPs."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": list(SERVICE_CIDRS.values())},
    }
