"""Who is where in both labs: names and addresses, without a lab."""

import ipaddress
from typing import NamedTuple

from rulecast.lab import Lab
from rulecast.model import Family

FAMILIES = (Family.IPV4, Family.IPV6)


class Place(NamedTuple):
    """A machine that backends or clients are on; `node` is empty outside of the cluster."""

    node: str
    addresses: dict[Family, str]


def _pod(node: int, number: int) -> Place:
    return Place(
        f"n{node}",
        {Family.IPV4: f"10.244.{node}.{number}", Family.IPV6: f"2001:db8:244:{node}::{number}"},
    )


def _host(node: str, v4: str, v6: str) -> Place:
    return Place(node, {Family.IPV4: v4, Family.IPV6: v6})


PODS = {
    "A": _pod(1, 5),
    "A2": _pod(1, 6),
    "A3": _pod(1, 7),
    "B": _pod(2, 5),
    "C": _pod(2, 6),
}
"""Backends with addresses of their own."""
NODES = {
    "n1": _host("n1", "192.0.2.11", "2001:db8:2::11"),
    "n2": _host("n2", "192.0.2.12", "2001:db8:2::12"),
}
SECOND = {
    "n1": _host("n1", "192.0.3.11", "2001:db8:3::11"),
    "n2": _host("n2", "192.0.3.12", "2001:db8:3::12"),
}
"""Addresses that the nodes have and their Node objects do not name."""
BACKENDS = PODS | NODES
OUTSIDE = _host("", "198.51.100.7", "2001:db8:51::7")
OUTSIDE2 = _host("", "198.51.100.8", "2001:db8:51::8")
BLOCKED = _host("", "198.51.100.200", "2001:db8:51::200")
"""A second address of the outside client."""
PORTS = (53, 5353, 8080, 8443, 9090)
"""What pods answer on."""
NODE_PORTS = (8080, 9090)
"""What nodes answer on."""


def check(lab: Lab) -> None:
    """A lab is built as this module says. Raises AssertionError."""
    for name, place in PODS.items():
        assert lab.nodes[place.node].pods[name].addresses == {f: [a] for f, a in place.addresses.items()}
    for name, place in NODES.items():
        assert {family: lab.nodes[name].ip(family) for family in FAMILIES} == place.addresses
        assert lab.nodes[name].second == SECOND[name].addresses


def holds(cidr: str, address: str) -> bool:
    """Whether a CIDR holds an address."""
    return ipaddress.ip_address(address) in ipaddress.ip_network(cidr.strip(), strict=False)
