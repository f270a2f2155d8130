"""What a scenario wants to exist, as values that a random generator can change, and their API objects."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rulecast.model import Family
from tests.conformance.odd import write
from tests.conformance.places import BACKENDS, NODES
from tests.netns.objects import CLUSTER_IP, EXTERNAL_IP, VIP, Object, frontend

NODE_ADDRESS = "node address"
SHARED_NODE = NODES["n1"]
"""The node whose own address Services may name as a load balancer's."""
CONDITIONS: dict[str, Object] = {
    "ready": {"ready": True, "serving": True, "terminating": False},
    "terminating": {"ready": False, "serving": True, "terminating": True},
    "gone": {"ready": False, "serving": False, "terminating": True},
    "unready": {"ready": False, "serving": False, "terminating": False},
    "serving-only": {"ready": False, "serving": True, "terminating": False},
    # Of publishNotReadyAddresses: ready is said of what terminates, too.
    "published": {"ready": True, "serving": False, "terminating": True},
    "published-unready": {"ready": True, "serving": False, "terminating": False},
    "published-ending": {"ready": True, "serving": True, "terminating": True},
    "unsaid": {},
    "only-ready-said": {"ready": True},
    "only-unready-said": {"ready": False},
}


class Port(NamedTuple):
    """A port of a Service; `target` is what its slices say."""

    name: str
    port: int
    protocol: str
    target: int
    node_port: int


class Endpoint(NamedTuple):
    """An endpoint of a slice."""

    who: str
    state: str = "ready"
    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    said_where: bool = True
    """Whether the endpoint has a nodeName."""

    written: str = ""
    """How its address is written: "" as usual, or one of `odd.WRITINGS`."""


class Slice(NamedTuple):
    """A slice; its target ports may be others than those of the Service's other slices."""

    number: int
    family: Family
    endpoints: tuple[Endpoint, ...]
    ports: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Wanted:
    """A Service and its slices."""

    number: int
    type: str
    families: tuple[Family, ...]
    ports: tuple[Port, ...]
    external: bool = False
    ingress: tuple[tuple[str, str], ...] = ()
    """`ipMode` ("" for none) and "VIP" or a hostname, for each ingress."""
    external_policy: str = ""
    internal_policy: str = ""
    affinity: int = 0
    """Seconds; 0: none."""
    ranges: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    incarnation: int = 0
    """Which cluster IP it has: another one after it was deleted and made again under the same name."""
    shared: tuple[tuple[str, int], ...] = ()
    """Kinds and numbers of addresses that other Services may have, too."""
    odd: tuple[str, ...] = ()
    """Further external IPs as somebody wrote them."""
    odd_ingress: tuple[str, ...] = ()
    """Further ingress IPs as somebody wrote them."""
    written: str = ""
    """How its external and ingress IPs are written: "" as usual, or one of `odd.WRITINGS`."""
    node_ports: bool = True
    """allocateLoadBalancerNodePorts."""
    distribution: str = ""
    """trafficDistribution: of no concern to a proxy, which goes by the hints."""
    slices: tuple[Slice, ...] = field(default=())

    @property
    def name(self) -> str:
        return f"s{self.number}"

    @property
    def has_cluster_ip(self) -> bool:
        return self.type in ("ClusterIP", "NodePort", "LoadBalancer")

    @property
    def reachable_from_outside(self) -> bool:
        return self.type in ("NodePort", "LoadBalancer") or (
            self.has_cluster_ip and bool(self._external_ips())
        )

    @property
    def vip_is_elsewhere(self) -> bool:
        """Whether its load-balancer address is for the load balancer alone (ipMode Proxy)."""
        return {mode for mode, what in self.ingress if what == "VIP"} == {"Proxy"}

    @property
    def health_port(self) -> int:
        """The health-check node port; 0: none."""
        local = self.type == "LoadBalancer" and self.external_policy == "Local"
        return 32000 + self.number if local else 0

    def addresses(self, family: Family) -> dict[str, str]:
        """Its own addresses by their kind."""
        found = {}
        if self.has_cluster_ip and family in self.families:
            found[CLUSTER_IP] = self.cluster_ip(family)
            if self.external:
                found[EXTERNAL_IP] = frontend(EXTERNAL_IP, self.number, family)
            if self.type == "LoadBalancer" and any(what == "VIP" for _, what in self.ingress):
                found[VIP] = frontend(VIP, self.number, family)
        return found

    def cluster_ip(self, family: Family) -> str:
        """The address of a cluster IP; a Service may have none."""
        return frontend(CLUSTER_IP, self.number + 100 * self.incarnation, family)

    def shared_addresses(self, family: Family, *kinds: str) -> list[str]:
        """Addresses that are not its alone; of these kinds only, if any are given."""
        return [
            _shared(kind, number, family)
            for kind, number in self.shared
            if self.has_cluster_ip
            and family in self.families
            and (kind in kinds or not kinds)
            and (kind in (EXTERNAL_IP, CLUSTER_IP) or (self.type == "LoadBalancer" and self.ingress))
        ]

    def has_node_port(self, port: Port) -> bool:
        """Whether a port of it has a node port."""
        return bool(port.node_port) and (
            self.type == "NodePort" or (self.type == "LoadBalancer" and self.node_ports)
        )

    def objects(self) -> list[Object]:
        """The Service and its slices."""
        return [self._service(), *(self._slice(each) for each in self.slices)]

    def _service(self) -> Object:
        spec: Object = {"ports": [self._port(each) for each in self.ports]}
        spec["type"] = "ClusterIP" if self.type == "Headless" else self.type
        if self.type == "ExternalName":
            spec["externalName"] = "elsewhere.example"
        else:
            addresses = [self.cluster_ip(family) for family in self.families]
            addresses = ["None"] if self.type == "Headless" else addresses
            spec |= {"clusterIP": addresses[0], "clusterIPs": addresses}
            spec["ipFamilies"] = [f"IPv{int(family)}" for family in self.families]
            spec["internalTrafficPolicy"] = self.internal_policy or "Cluster"
        if external := self._external_ips():
            spec["externalIPs"] = external
        if self.reachable_from_outside:
            spec["externalTrafficPolicy"] = self.external_policy or "Cluster"
        if self.health_port:
            spec["healthCheckNodePort"] = self.health_port
        if self.affinity:
            spec["sessionAffinity"] = "ClientIP"
            spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": self.affinity}}
        if self.ranges and self.type == "LoadBalancer":
            spec["loadBalancerSourceRanges"] = list(self.ranges)
        if self.type == "LoadBalancer" and not self.node_ports:
            spec["allocateLoadBalancerNodePorts"] = False
        if self.distribution:
            spec["trafficDistribution"] = self.distribution
        made: Object = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "namespace": "default", "labels": dict(self.labels)},
            "spec": spec,
        }
        if self.type == "LoadBalancer" and self.ingress:
            made["status"] = {"loadBalancer": {"ingress": self._ingress()}}
        return made

    def _port(self, port: Port) -> Object:
        made: Object = {"name": port.name, "port": port.port, "protocol": port.protocol}
        if self.has_node_port(port):
            made["nodePort"] = port.node_port
        return made

    def _external_ips(self) -> list[str]:
        """Those of its own, those that it shares, and what else was written there."""
        if self.type == "ExternalName":
            return []
        own = [frontend(EXTERNAL_IP, self.number, family) for family in self.families if self.external]
        return [
            *(write(each, self.written) for each in own),
            *self._shared(EXTERNAL_IP, CLUSTER_IP),
            *self.odd,
        ]

    def _shared(self, *kinds: str) -> list[str]:
        """Shared addresses of these kinds that its spec or status names."""
        return [
            _shared(kind, number, family)
            for kind, number in self.shared
            for family in self.families
            if kind in kinds
        ]

    def _ingress(self) -> list[Object]:
        made: list[Object] = []
        for mode, what in self.ingress:
            said: Object = {"ipMode": mode} if mode else {}
            if what == "VIP":
                own = [frontend(VIP, self.number, family) for family in self.families]
                made += [{"ip": write(each, self.written)} | said for each in own]
            else:
                made.append({"hostname": what})
        made += [{"ip": each} for each in (*self._shared(VIP, NODE_ADDRESS), *self.odd_ingress)]
        return made

    def _slice(self, each: Slice) -> Object:
        labels = {"kubernetes.io/service-name": self.name}
        if self.type == "Headless":
            labels["service.kubernetes.io/headless"] = ""
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{self.name}-v{int(each.family)}-{each.number}",
                "namespace": "default",
                "labels": labels,
            },
            "addressType": f"IPv{int(each.family)}",
            "ports": [{"name": name, "port": port, "protocol": kind} for name, port, kind in each.ports],
            "endpoints": [_endpoint(endpoint, each.family) for endpoint in each.endpoints],
        }


def _shared(kind: str, number: int, family: Family) -> str:
    return SHARED_NODE.addresses[family] if kind == NODE_ADDRESS else frontend(kind, number, family)


def usable(endpoint: Endpoint) -> bool:
    """Whether it may get traffic: ready, or serving until its end when nothing is ready."""
    conditions = CONDITIONS[endpoint.state]
    serving = conditions.get("serving", True)
    return bool(conditions.get("ready", True) or (serving and conditions.get("terminating", False)))


def _endpoint(endpoint: Endpoint, family: Family) -> Object:
    place = BACKENDS[endpoint.who]
    address = write(place.addresses[family], endpoint.written)
    made: Object = {"addresses": [address], "conditions": CONDITIONS[endpoint.state]}
    if endpoint.said_where:
        made["nodeName"] = place.node
    hints: Object = {}
    if endpoint.zones:
        hints["forZones"] = [{"name": zone} for zone in endpoint.zones]
    if endpoint.nodes:
        hints["forNodes"] = [{"name": node} for node in endpoint.nodes]
    return made | ({"hints": hints} if hints else {})


def node_object(name: str, zone: str) -> Object:
    """A Node of the labs."""
    place, number = NODES[name], int(name[1:])
    cidrs = [f"10.244.{number}.0/24", f"2001:db8:244:{number}::/64"]
    addresses: list[dict[str, Any]] = [
        {"type": "InternalIP", "address": address} for address in place.addresses.values()
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone} if zone else {}},
        "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs},
        "status": {"addresses": [*addresses, {"type": "Hostname", "address": name}]},
    }
