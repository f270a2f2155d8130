"""The names of everything in our tables, and the packed keys and values of set elements."""

import hashlib
import re
import sys
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from socket import AF_INET, AF_INET6, inet_pton

from rulecast.model import Endpoint, Family, Protocol, ServiceKey, parse_service_key

TABLE = "rulecast"

SERVICES = "services"
NODEPORTS = "nodeports"
NO_ENDPOINT_SERVICES = "no-endpoint-services"
NO_ENDPOINT_NODEPORTS = "no-endpoint-nodeports"
FIREWALL_IPS = "firewall-ips"
FIREWALL_SELF = "firewall-self"
CLUSTER_IPS = "cluster-ips"
NODEPORT_IPS = "nodeport-ips"
HAIRPIN = "hairpin-connections"
REJECT_CHAIN = "reject-chain"

LOCAL_OFFSET = 32768
"""The slot of the first local endpoint. A pick may choose among at most this many of either set."""

_PROTOCOL = {Protocol.TCP: b"\x06\0\0\0", Protocol.UDP: b"\x11\0\0\0", Protocol.SCTP: b"\x84\0\0\0"}
_READABLE = re.compile(r"[^A-Za-z0-9-]+")

PROTOCOL_NUMBER = {6: "tcp", 17: "udp", 132: "sctp"}
NFPROTO = {Family.IPV4: 2, Family.IPV6: 10}
WORD = {Family.IPV4: "ip", Family.IPV6: "ip6"}


def pack_address(address: str) -> bytes:
    """Canonical address text to its 4 or 16 bytes."""
    return inet_pton(AF_INET6 if ":" in address else AF_INET, address)


def pack_frontend(address: str, protocol: Protocol, port: int) -> bytes:
    """`daddr . l4proto . th dport`, or without address ("") the node port's `l4proto . th dport`.

    Each field of a concatenation is padded to four bytes.
    """
    tail = _PROTOCOL[protocol] + port.to_bytes(2, "big") + b"\0\0"
    return pack_address(address) + tail if address else tail


def pack_slot(frontend: bytes, slot: int) -> bytes:
    """The key of one endpoint slot: the frontend without its protocol. numgen counts in host byte order."""
    return frontend[:-8] + frontend[-4:] + slot.to_bytes(4, sys.byteorder)


def slot_map(frontend: bytes) -> str:
    """The map of a frontend's endpoint slots.

    One a protocol: on a map declared with `th dport` as target, nft 1.0.6 refuses rules as soon as the map
    comes from the kernel and not from the same script ("conflicting protocols"). The key is shorter by it.
    """
    prefix = "endpoints" if len(frontend) > 8 else "nodeport-endpoints"
    return f"{prefix}-{PROTOCOL_NUMBER[frontend[-8]]}"


def pack_endpoint(endpoint: Endpoint) -> bytes:
    """`addr . port`, the target of a DNAT."""
    return pack_address(endpoint.ip) + endpoint.port.to_bytes(2, "big") + b"\0\0"


def pack_hairpin(endpoint: Endpoint, protocol: Protocol) -> bytes:
    """`saddr . daddr . l4proto . th dport` of an endpoint that talks to itself."""
    return pack_address(endpoint.ip) + pack_frontend(endpoint.ip, protocol, endpoint.port)


def short_hash(text: str) -> str:
    """64 bits of SHA-256: names must be the same after a restart, and must not collide by design."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def service_suffix(key: ServiceKey) -> str:
    """Hash and readable part of a service's own objects, at most 57 characters.

    Kubernetes names may be longer than nft's names and comments (kubernetes/kubernetes#139515).
    """
    name = parse_service_key(key)
    readable = _READABLE.sub("-", f"{name.namespace}-{name.name}-{name.port_name}").strip("-")[:40]
    return f"{short_hash(key)}-{readable}"


def endpoint_suffix(key: ServiceKey, endpoint: Endpoint) -> str:
    """Hash and readable part of the objects of one endpoint of a service with session affinity."""
    digest = short_hash(f"{key} {endpoint.ip} {endpoint.port}")
    return f"{digest}-{_READABLE.sub('-', endpoint.ip)}-{endpoint.port}"


def collapse(cidrs: tuple[str, ...]) -> tuple[str, ...]:
    """The same addresses in the fewest CIDRs, sorted: nft refuses overlapping ones in one set."""
    networks = [ip_network(cidr, strict=False) for cidr in cidrs]
    v4 = [n for n in networks if isinstance(n, IPv4Network)]
    v6 = [n for n in networks if isinstance(n, IPv6Network)]
    return (*map(str, collapse_addresses(v4)), *map(str, collapse_addresses(v6)))


def firewall_chain(ranges: tuple[str, ...]) -> str:
    """The chain shared by all services with the same (collapsed) source ranges."""
    return f"firewall-{short_hash(' '.join(ranges))}"
