"""One Service object to its ports, as if no other Service existed (kube-proxy's newBaseServiceInfo)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rulecast.address import AddressError, canonical_cidr, canonical_ip, is_ipv6, is_unspecified
from rulecast.model import Family, Protocol, ServicePort, ServicePortName, service_key
from rulecast_server.kube.objects import Service, ServicePortSpec, ServiceSpec
from rulecast_server.projection.problems import Reason

PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
DEFAULT_AFFINITY_SECONDS = 10800
MAX_AFFINITY_SECONDS = 86400
"""The API's bound."""

_NONE: Mapping[Family, tuple[str, ...]] = dict.fromkeys(Family, ())

Report = Callable[[Reason, str], None]


class ParsedService(NamedTuple):
    """What one Service asks for."""

    ports: tuple[ServicePort, ...]
    """`external_local` and the frontends are as asked for; another Service may hold some of them."""
    created: str
    """creationTimestamp, "" when the object has none."""
    problems: tuple[tuple[Reason, str], ...]


def parse_service(namespace: str, object_name: str, service: Service) -> ParsedService:
    """Project one Service, known by that namespace and name; what gives no rules gives no ports.

    ExternalName, headless and foreign (service-proxy-name) Services are not problems, they have no ports.
    """
    problems: list[tuple[Reason, str]] = []
    spec = service.spec
    ports: list[ServicePort] = []
    if not namespace or not object_name or set(namespace + object_name) & set("/:"):
        problems.append((Reason.BAD_NAME, f"{namespace!r} / {object_name!r} cannot name a Service"))
    elif _is_ours(service):

        def report(reason: Reason, detail: str) -> None:
            problems.append((reason, detail))

        external = _by_family(spec.external_ips or (), "externalIPs", report)
        load_balancer = _by_family(_ingress_ips(service), "loadBalancer.ingress", report)
        ranges = _source_ranges(spec, report)
        policies = _policies(spec, report)
        specs = _valid_ports(spec.ports or (), report)
        cluster_ips = _cluster_ips(spec, report)
        for family, cluster_ip in cluster_ips.items():
            # An address that is both is guarded as a load-balancer address: the stricter reading.
            vips = tuple(ip for ip in load_balancer[family] if ip != cluster_ip)
            externals = tuple(ip for ip in external[family] if ip != cluster_ip and ip not in vips)
            for name, protocol, port, node_port in specs:
                key = service_key(ServicePortName(namespace, object_name, name, protocol, family))
                ports.append(
                    ServicePort(
                        key=key,
                        cluster_ip=cluster_ip,
                        port=port,
                        node_port=node_port,
                        external_ips=externals,
                        load_balancer_ips=vips,
                        source_ranges=ranges[family],
                        restrict_sources=bool(spec.load_balancer_source_ranges),
                        external_local=policies.external_local,
                        internal_local=policies.internal_local,
                        affinity_seconds=policies.affinity_seconds,
                        health_check_node_port=policies.health_check_node_port,
                    )
                )
        for family in Family:
            if family not in cluster_ips:
                for ip in external[family] + load_balancer[family]:
                    report(Reason.WRONG_FAMILY, f"{ip}: the Service has no clusterIP of its family")
    return ParsedService(tuple(ports), service.metadata.creation_timestamp or "", tuple(problems))


def _is_ours(service: Service) -> bool:
    spec = service.spec
    if spec.type == "ExternalName" or spec.cluster_ip == "None":
        return False
    if spec.cluster_ips and spec.cluster_ips[0] == "None":
        return False
    # Existence counts, whatever the value (kube-proxy's label selector).
    return PROXY_NAME_LABEL not in (service.metadata.labels or ())


def _cluster_ips(spec: ServiceSpec, report: Report) -> dict[Family, str]:
    texts = [text for text in spec.cluster_ips or (spec.cluster_ip,) if text]
    if not texts:
        report(Reason.NO_CLUSTER_IP, "clusterIP is empty")
    found: dict[Family, str] = {}
    for text in texts:
        ip = _address(text, "clusterIPs", report)
        if ip is not None:
            found.setdefault(_family(ip), ip)
    return dict(sorted(found.items()))


def _ingress_ips(service: Service) -> list[str]:
    balancer = service.status.load_balancer if service.status else None
    # ipMode Proxy: the balancer terminates connections, its address must not be short-circuited (KEP-1860).
    return [
        ingress.ip
        for ingress in (balancer.ingress if balancer else None) or ()
        if ingress.ip and ingress.ip_mode in (None, "VIP")
    ]


def _by_family(texts: Sequence[str], field: str, report: Report) -> Mapping[Family, tuple[str, ...]]:
    if not texts:
        return _NONE
    ips = {ip for text in texts if (ip := _address(text, field, report)) is not None}
    return {family: tuple(sorted(ip for ip in ips if _family(ip) is family)) for family in Family}


def _source_ranges(spec: ServiceSpec, report: Report) -> Mapping[Family, tuple[str, ...]]:
    if not spec.load_balancer_source_ranges:
        return _NONE
    ranges: set[str] = set()
    for text in spec.load_balancer_source_ranges:
        try:
            ranges.add(canonical_cidr(text))
        except AddressError as error:
            report(Reason.BAD_CIDR, f"loadBalancerSourceRanges: {error}")
    return {family: tuple(sorted(cidr for cidr in ranges if _family(cidr) is family)) for family in Family}


class _Policies(NamedTuple):
    external_local: bool
    internal_local: bool
    affinity_seconds: int
    health_check_node_port: int


def _policies(spec: ServiceSpec, report: Report) -> _Policies:
    external_local = spec.external_traffic_policy == "Local"
    health_check = 0
    if external_local and spec.type == "LoadBalancer":
        health_check = spec.health_check_node_port or 0
        if not 0 < health_check <= 65535:
            report(Reason.NO_HEALTH_CHECK_PORT, f"healthCheckNodePort is {health_check}")
            health_check = 0
    affinity = 0
    if spec.session_affinity == "ClientIP":
        affinity = DEFAULT_AFFINITY_SECONDS
        client_ip = spec.session_affinity_config.client_ip if spec.session_affinity_config else None
        if client_ip is not None and client_ip.timeout_seconds is not None:
            if 0 < client_ip.timeout_seconds <= MAX_AFFINITY_SECONDS:
                affinity = client_ip.timeout_seconds
            else:
                report(Reason.BAD_TIMEOUT, f"timeoutSeconds is {client_ip.timeout_seconds}")
    return _Policies(external_local, spec.internal_traffic_policy == "Local", affinity, health_check)


def _valid_ports(specs: Iterable[ServicePortSpec], report: Report) -> list[tuple[str, Protocol, int, int]]:
    ports: dict[tuple[str, Protocol], tuple[str, Protocol, int, int]] = {}
    for spec in specs:
        name = spec.name or ""
        protocol = parse_protocol(spec.protocol)
        if protocol is None:
            report(Reason.BAD_PROTOCOL, f"port {name!r}: protocol {spec.protocol!r}")
        elif "/" in name:
            report(Reason.BAD_NAME, f"port {name!r}")
        elif not 0 < spec.port <= 65535:
            report(Reason.BAD_PORT, f"port {name!r}: {spec.port}")
        elif (name, protocol) in ports:
            report(Reason.DUPLICATE_PORT, f"port {name!r}: a second {protocol} port of that name")
        else:
            node_port = spec.node_port or 0
            if not 0 <= node_port <= 65535:
                report(Reason.BAD_PORT, f"port {name!r}: nodePort {node_port}")
                node_port = 0
            ports[name, protocol] = (name, protocol, spec.port, node_port)
    return list(ports.values())


_PROTOCOLS: dict[str | None, Protocol] = {protocol.value: protocol for protocol in Protocol}
_PROTOCOLS |= {None: Protocol.TCP, "": Protocol.TCP}


def parse_protocol(text: str | None) -> Protocol | None:
    """The API's protocol, TCP by default; None when there is no such protocol."""
    return _PROTOCOLS.get(text)


def _address(text: str, field: str, report: Report) -> str | None:
    try:
        ip = canonical_ip(text)
    except AddressError as error:
        report(Reason.BAD_ADDRESS, f"{field}: {error}")
        return None
    if is_unspecified(ip):
        report(Reason.BAD_ADDRESS, f"{field}: {ip} cannot be served")
        return None
    return ip


def _family(canonical: str) -> Family:
    return Family.IPV6 if is_ipv6(canonical) else Family.IPV4
