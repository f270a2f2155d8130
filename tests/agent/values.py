"""Short ways to write what a feed delivers."""

from collections.abc import Mapping

from rulecast.model import ClusterInfo, Endpoint, NodeInfo, Revision, ServiceKey, ServicePort
from rulecast.view import ServiceView, Update

NODE = NodeInfo(
    name="n1",
    addresses=("192.0.2.11", "2001:db8:2::11", "198.51.100.11"),
    pod_cidrs=("10.244.1.0/24", "2001:db8:244:1::/64"),
)


def key(name: str = "web", *, protocol: str = "TCP", family: int = 4, port: str = "p") -> ServiceKey:
    return ServiceKey(f"ns/{name}:{port}/{protocol}/ipv{family}")


def endpoints(*texts: str) -> tuple[Endpoint, ...]:
    """`10.240.0.4:9090` or `2001:db8::4:9090`, the port behind the last colon."""
    split = [text.rpartition(":") for text in texts]
    return tuple(sorted(Endpoint(ip, int(port)) for ip, _, port in split))


def view(
    service: ServiceKey | None = None,
    *cluster: str,
    local: tuple[str, ...] = (),
    serving: tuple[str, ...] | None = None,
    local_ready: int | None = None,
    has_endpoints: bool | None = None,
    **fields: object,
) -> ServiceView:
    fields = {"cluster_ip": "10.96.0.1", "port": 80} | fields
    port = ServicePort(
        key=service or key(),
        has_endpoints=bool(cluster or local) if has_endpoints is None else has_endpoints,
        **fields,  # type: ignore[arg-type]
    )
    return ServiceView(
        service=port,
        cluster=endpoints(*cluster),
        local=endpoints(*local),
        serving=endpoints(*(cluster if serving is None else serving)),
        local_ready=len({ip for ip, _ in endpoints(*local)}) if local_ready is None else local_ready,
    )


def update(
    revision: int,
    services: Mapping[ServiceKey, ServiceView | None] | None = None,
    *,
    full: bool = False,
    node: NodeInfo | None = NODE,
    cluster: ClusterInfo | None = None,
    triggers: Mapping[ServiceKey, float] | None = None,
) -> Update:
    return Update(
        revision=Revision(revision),
        full=full,
        services=services or {},
        node=node,
        cluster=cluster or ClusterInfo(),
        trigger_times=triggers or {},
    )
