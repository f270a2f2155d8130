"""Values that no server of ours would send: they must not reach the compilers of rules.

A server that speaks nonsense, or a damaged file, costs its own stream or itself, never what is programmed.
"""

from rulecast.address import AddressError, canonical_cidr, canonical_ip
from rulecast.model import ClusterInfo, Endpoint, EndpointSet, NodeInfo, ServicePort, parse_service_key
from rulecast.wire.messages import WireError

_LONGEST_AFFINITY = 86_400
"""Seconds; the API allows no more (core/v1 ClientIPConfig)."""


def check_value(value: ServicePort | EndpointSet | NodeInfo | ClusterInfo) -> None:
    """Raises WireError for what cannot be right, in one line."""
    if isinstance(value, ServicePort):
        _service(value)
    elif isinstance(value, EndpointSet):
        check_endpoints(value.members)
    elif isinstance(value, NodeInfo):
        _addresses(value.addresses)
        _cidrs(value.pod_cidrs)
    else:
        _cidrs(value.service_cidrs)


def check_endpoints(members: list[Endpoint] | tuple[Endpoint, ...]) -> None:
    """Raises WireError for an address or port that is none."""
    for endpoint in members:
        _address(endpoint.ip)
        if not 0 < endpoint.port < 65_536:
            raise WireError(f"an endpoint's port is {endpoint.port}")


def check_key(key: str) -> None:
    """Raises WireError for what names no service port."""
    try:
        parse_service_key(key)
    except ValueError as error:
        raise WireError(f"not the key of a service port: {str(error)[:200]}") from None


def _service(port: ServicePort) -> None:
    check_key(port.key)
    if port.cluster_ip:
        _address(port.cluster_ip)
    _addresses(port.external_ips)
    _addresses(port.load_balancer_ips)
    _cidrs(port.source_ranges)
    numbers = (port.port, port.node_port, port.health_check_node_port)
    if not (0 < port.port < 65_536 and all(0 <= number < 65_536 for number in numbers)):
        raise WireError(f"{port.key}: ports {numbers}")
    if not 0 <= port.affinity_seconds <= _LONGEST_AFFINITY:
        raise WireError(f"{port.key}: session affinity of {port.affinity_seconds} s")


def _address(text: str) -> None:
    try:
        canonical = canonical_ip(text)
    except AddressError as error:
        raise WireError(str(error)) from None
    if canonical != text:
        raise WireError(f"an address that is not canonical: {text[:100]}")


def _addresses(texts: tuple[str, ...]) -> None:
    for text in texts:
        _address(text)


def _cidrs(texts: tuple[str, ...]) -> None:
    for text in texts:
        try:
            canonical = canonical_cidr(text)
        except AddressError as error:
            raise WireError(str(error)) from None
        if canonical != text:
            raise WireError(f"a CIDR that is not canonical: {text[:100]}")
