"""Ending peers' connections, which gRPC's aio server offers no way to do.

A handler that is cancelled while its write waits for a peer that does not read leaves the call open for as
long as the connection is (grpc/grpc#43360), and a status would wait behind the unread data. Shutting the
socket down ends all of it: the connection's calls go, and with them what was buffered for them.
"""

import contextlib
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple
from urllib.parse import unquote


class PeerAddress(NamedTuple):
    """Canonical address text, IPv4 also where the socket is a dual one, and a port."""

    host: str
    port: int


def parse_peer(peer: str) -> PeerAddress | None:
    """Read gRPC's name of a peer; None for kinds without an address.

    `ipv4:192.0.2.1:5000` or `ipv6:%5B2001:db8::1%5D:5000`.
    """
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _canonical(host.strip("[]"), int(port))


def peer_host(peer: str) -> str:
    """The part of a peer's name that all of its connections share."""
    address = parse_peer(peer)
    return address.host if address is not None else peer


def end_connection(peer: str) -> bool:
    """Shut down the socket that is connected to this peer; whether there was one.

    Other streams of the same connection end with it. Walks through the process's files, a few microseconds
    for each.
    """
    wanted = parse_peer(peer)
    if wanted is None:
        return False
    for found in _sockets():
        if _remote(found) == wanted:
            found.shutdown(socket.SHUT_RDWR)
            return True
    return False


def open_files() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def end_excess(known: Collection[PeerAddress], *, local_port: int, allowed: int) -> Counter[str]:
    """End connections to `local_port` that are none of `known`, of each address all but the first `allowed`.

    Returns how many by address. Takes tens of milliseconds with thousands of files: not for the event loop.
    """
    strangers: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for found in _sockets():
        peer = _remote(found)
        if peer is None or peer in known or found.getsockname()[1] != local_port:
            continue
        strangers[peer.host] += 1
        if strangers[peer.host] > allowed:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
                ended[peer.host] += 1
    return ended


def _sockets() -> Iterator[socket.socket]:
    """In the order in which they were opened, more or less."""
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        # A duplicate: whoever closes and reuses the number meanwhile does not change what this one is.
        with contextlib.suppress(OSError):
            duplicate = os.dup(int(name))
            try:
                found = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                continue
            with found:
                yield found


def _remote(connected: socket.socket) -> PeerAddress | None:
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port, *_ = connected.getpeername()
    except OSError:
        return None
    return _canonical(host, port)


def _canonical(host: str, port: int) -> PeerAddress | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return PeerAddress(str(mapped or address), port)
