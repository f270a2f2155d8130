"""Short ways to write views, updates and hosts."""

from collections.abc import Mapping

from rulecast.model import ClusterInfo, Endpoint, Family, Revision, ServiceKey, ServicePort
from rulecast.view import ServiceView, Update
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector

HOST = HostConfig(
    families={
        Family.IPV4: FamilyConfig(
            detector=LocalDetector(source_cidr="10.0.0.0/8"),
            node_ips=("192.168.0.2",),
            nodeport_addresses=("192.168.0.2",),
            service_cidrs=("172.30.0.0/16",),
        ),
        Family.IPV6: FamilyConfig(
            detector=LocalDetector(source_cidr="fd00:10::/64"), nodeport_addresses=None
        ),
    }
)


def key(name: str = "web", *, protocol: str = "TCP", family: int = 4) -> ServiceKey:
    return ServiceKey(f"ns/{name}:http/{protocol}/ipv{family}")


def endpoints(*hosts: int, port: int = 8080, prefix: str = "10.180.0.") -> tuple[Endpoint, ...]:
    return tuple(sorted(Endpoint(f"{prefix}{host}", port) for host in hosts))


def view(
    service: ServiceKey,
    *hosts: int,
    local: tuple[int, ...] = (),
    cluster_ip: str = "172.30.0.41",
    prefix: str = "10.180.0.",
    has_endpoints: bool | None = None,
    **fields: object,
) -> ServiceView:
    port = ServicePort(
        key=service,
        cluster_ip=cluster_ip,
        port=80,
        has_endpoints=bool(hosts or local) if has_endpoints is None else has_endpoints,
        **fields,  # type: ignore[arg-type]
    )
    return ServiceView(
        service=port, cluster=endpoints(*hosts, prefix=prefix), local=endpoints(*local, prefix=prefix)
    )


def update(services: Mapping[ServiceKey, ServiceView | None], *, full: bool = False) -> Update:
    return Update(revision=Revision(1), full=full, services=services, node=None, cluster=ClusterInfo())


V6 = key(family=6)
VIEWS: dict[ServiceKey, ServiceView] = {
    key(): view(key(), 1, 2, 3, local=(1,), node_port=30080),
    key(protocol="UDP"): view(key(protocol="UDP"), 1, 2),
    key("sctp", protocol="SCTP"): view(key("sctp", protocol="SCTP"), 1, cluster_ip="172.30.0.42"),
    key("lb"): view(
        key("lb"),
        1,
        2,
        local=(2,),
        cluster_ip="172.30.0.43",
        load_balancer_ips=("192.0.2.1",),
        external_ips=("192.0.2.9",),
        node_port=30081,
        external_local=True,
        restrict_sources=True,
        source_ranges=("192.168.0.0/24", "192.168.0.128/25", "203.0.113.0/25"),
    ),
    key("none"): view(key("none"), cluster_ip="172.30.0.44", node_port=30082),
    key("gone"): view(key("gone"), cluster_ip="172.30.0.45", internal_local=True, has_endpoints=True),
    key("sticky"): view(
        key("sticky"),
        1,
        2,
        local=(2,),
        cluster_ip="172.30.0.46",
        node_port=30083,
        external_local=True,
        affinity_seconds=600,
    ),
    V6: view(V6, 1, 2, local=(2,), cluster_ip="fd00:30::41", prefix="fd00:10::", node_port=30080),
    key("sticky", family=6): view(
        key("sticky", family=6), 1, 2, cluster_ip="fd00:30::46", prefix="fd00:10::", affinity_seconds=60
    ),
}
