"""Addresses as people write them, which the API took for years: and what is none at all."""

import ipaddress

from rulecast.model import Family

WRITINGS = ("zeros", "mapped", "long")
"""Of IPv4: octets with leading zeros, and IPv4-mapped IPv6; of IPv6: without any shortening."""
NO_ADDRESSES = (
    *("203.0.114.256", "203.0.114", "203.0.114.9/32", "lb.example", "", " 203.0.114.9"),
    *("2001:db8:114:::9", "fe80::1%eth0", "[2001:db8:114::9]"),
)
"""No address at all. The API refuses them; one of them in an endpoint, and kube-proxy writes nothing more."""


def write(address: str, how: str) -> str:
    """An address in one of `WRITINGS`; as it is where that writing is not of its family."""
    parsed = ipaddress.ip_address(address)
    if parsed.version == 4 and how == "zeros":
        return ".".join(f"{int(octet):03}" for octet in address.split("."))
    if parsed.version == 4 and how == "mapped":
        return f"::ffff:{address}"
    if parsed.version == 6 and how == "long":
        return parsed.exploded.upper()
    return address


def family_of(cidr: str) -> Family | None:
    """The family of a source range, however it is written; None: it is no CIDR."""
    if "/" not in cidr:
        return None
    return Family.IPV4 if "." in cidr else Family.IPV6
