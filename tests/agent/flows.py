"""Tracked flows in the kernel, put there by netlink and read back by the conntrack tool."""

import itertools
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable
from ipaddress import ip_address
from typing import NamedTuple

import pytest

_PROTOCOLS = {"udp": 17, "tcp": 6, "sctp": 132}
_SEEN_REPLY_CONFIRMED_ASSURED = 2 | 4 | 8


class Flow(NamedTuple):
    """A flow as its first packet and the source of its replies have it."""

    destination: str
    port: int
    backend: str
    backend_port: int
    client_port: int = 1000
    protocol: str = "udp"
    client: str = "10.9.0.1"


def flow(destination: str, backend: str, *, client_port: int = 1000, protocol: str = "udp") -> Flow:
    """From `address:port` texts."""
    ip, _, port = destination.rpartition(":")
    backend_ip, _, backend_port = backend.rpartition(":")
    client = "2001:db8:9::1" if ":" in ip else "10.9.0.1"
    return Flow(ip, int(port), backend_ip, int(backend_port), client_port, protocol, client)


def add(flows: Iterable[Flow]) -> None:
    """Put flows into the kernel."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as netlink:
        netlink.bind((0, 0))
        netlink.settimeout(10)
        remaining = iter(flows)
        while batch := list(itertools.islice(remaining, 200)):
            netlink.send(b"".join(_message(each, last=each is batch[-1]) for each in batch))
            code = struct.unpack_from("=i", netlink.recv(65536), 16)[0]
            assert code == 0, code


def listed(family: str = "ipv4") -> set[Flow]:
    """What the kernel tracks."""
    if shutil.which("conntrack") is None:
        pytest.skip("needs the conntrack tool")
    text = subprocess.run(
        ["conntrack", "-L", "-f", family], check=True, capture_output=True, text=True
    ).stdout
    found = set()
    for line in text.splitlines():
        fields: dict[str, list[str]] = {}
        for name, value in re.findall(r"(\w+)=(\S+)", line):
            fields.setdefault(name, []).append(value)
        found.add(
            Flow(
                fields["dst"][0],
                int(fields["dport"][0]),
                fields["src"][1],
                int(fields["sport"][1]),
                int(fields["sport"][0]),
                line.split()[0],
                fields["src"][0],
            )
        )
    return found


def _message(each: Flow, *, last: bool) -> bytes:
    orig = _tuple(each.protocol, each.client, each.destination, each.client_port, each.port)
    reply = _tuple(each.protocol, each.backend, each.client, each.backend_port, each.client_port)
    body = _attribute(1 | 0x8000, orig) + _attribute(2 | 0x8000, reply)
    body += _attribute(3, struct.pack("!I", _SEEN_REPLY_CONFIRMED_ASSURED))
    body += _attribute(7, struct.pack("!I", 600))
    if each.protocol == "tcp":
        body += _attribute(4 | 0x8000, _attribute(1 | 0x8000, _attribute(1, b"\x03")))
    if each.protocol == "sctp":
        tags = _attribute(1, b"\x04") + _attribute(2, b"\0\0\0\1") + _attribute(3, b"\0\0\0\1")
        body += _attribute(4 | 0x8000, _attribute(3 | 0x8000, tags))
    family = socket.AF_INET6 if ":" in each.client else socket.AF_INET
    header = struct.pack("=IHHII", 20 + len(body), 0x100, 0x401 | (4 if last else 0), 0, 0)
    return header + struct.pack("!BBH", family, 0, 0) + body


def _tuple(protocol: str, source: str, destination: str, source_port: int, destination_port: int) -> bytes:
    first = 3 if ":" in source else 1
    ips = _attribute(first, ip_address(source).packed) + _attribute(first + 1, ip_address(destination).packed)
    ports = _attribute(1, bytes([_PROTOCOLS[protocol]]))
    ports += _attribute(2, source_port.to_bytes(2)) + _attribute(3, destination_port.to_bytes(2))
    return _attribute(1 | 0x8000, ips) + _attribute(2 | 0x8000, ports)


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", len(data) + 4, kind) + data + b"\0" * (-len(data) & 3)
