"""The addresses of this host's interfaces, kept current by rtnetlink notifications."""

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Collection
from pathlib import Path

from rulecast.model import Family

_LOG = logging.getLogger(__name__)
_GETADDR, _NEWADDR, _ERROR, _DONE = 22, 20, 2, 3
_REQUEST_DUMP = 0x301
_INTERRUPTED = 0x10
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_GROUPS = 0x10 | 0x100
"""RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR."""
_HEADER = struct.Struct("=IHHII")
_IFADDRMSG = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_SETTLE = 0.1
_POLL = 60.0
IGNORED = ("kube-ipvs0", "rulecast-ipvs0")
"""Interfaces that hold service addresses, which are not the host's own."""


def supported_families() -> tuple[Family, ...]:
    """The families that this kernel runs with; IPv6 may be off (ipv6.disable=1)."""
    return tuple(Family) if Path("/proc/net/if_inet6").exists() else (Family.IPV4,)


def list_addresses(ignored: Collection[str] = IGNORED) -> frozenset[str]:
    """All local addresses, loopback included, canonical. Raises OSError."""
    with _open(0) as netlink:
        return _list(netlink, _indices(ignored))


class InterfaceAddresses:
    """The addresses of the network namespace in which it was made."""

    def __init__(self, *, ignored: Collection[str] = IGNORED) -> None:
        """Read them once. Raises OSError."""
        self._ignored = ignored
        self._monitor = _open(_GROUPS)
        self._monitor.setblocking(False)
        # Made here and kept: a worker thread may belong to another network namespace.
        self._netlink = _open(0)
        self.current: Collection[str] = _list(self._netlink, _indices(ignored))

    async def run(self, on_change: Callable[[], None]) -> None:
        """Watch until cancelled; `on_change` is called after `current` changed."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        loop.add_reader(self._monitor, self._drain, changed)
        try:
            while True:
                try:
                    # A poll besides, in case a notification is ever lost.
                    async with asyncio.timeout(_POLL):
                        await changed.wait()
                    await asyncio.sleep(_SETTLE)
                except TimeoutError:
                    pass
                changed.clear()
                try:
                    current = await asyncio.to_thread(_list, self._netlink, _indices(self._ignored))
                except OSError as error:
                    _LOG.error("cannot list interface addresses: %s", error.strerror)
                    continue
                if current != self.current:
                    self.current = current
                    on_change()
        finally:
            loop.remove_reader(self._monitor)

    def close(self) -> None:
        """Close the sockets."""
        self._monitor.close()
        self._netlink.close()

    def _drain(self, changed: asyncio.Event) -> None:
        try:
            while self._monitor.recv(65536):
                pass
        except BlockingIOError:
            pass
        except OSError:
            # ENOBUFS: notifications were lost, which is one as well.
            pass
        changed.set()


def _open(groups: int) -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    opened.settimeout(10.0)
    opened.bind((0, groups))
    return opened


def _indices(names: Collection[str]) -> frozenset[int]:
    found = set()
    for name in names:
        try:
            found.add(socket.if_nametoindex(name))
        except OSError:
            continue
    return frozenset(found)


def _list(netlink: socket.socket, skip: Collection[int]) -> frozenset[str]:
    for _ in range(5):
        found, whole = _dump(netlink, skip)
        if whole:
            break
    return found


def _dump(netlink: socket.socket, skip: Collection[int]) -> tuple[frozenset[str], bool]:
    """The addresses, and whether none changed meanwhile."""
    sequence = time.monotonic_ns() & 0xFFFFFFFF
    netlink.send(_HEADER.pack(24, _GETADDR, _REQUEST_DUMP, sequence, 0) + _IFADDRMSG.pack(0, 0, 0, 0, 0))
    found: set[str] = set()
    whole = True
    while True:
        data = netlink.recv(1 << 17)
        position = 0
        while position + 16 <= len(data):
            length, kind, flags, answered, _ = _HEADER.unpack_from(data, position)
            if answered == sequence:
                whole = whole and not flags & _INTERRUPTED
                if kind == _DONE:
                    return frozenset(found), whole
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", data, position + 16)[0]
                    raise OSError(code, os.strerror(code))
                if kind == _NEWADDR:
                    family, _, _, _, index = _IFADDRMSG.unpack_from(data, position + 16)
                    if index not in skip:
                        found.update(_address(family, data[position + 24 : position + length]))
            position += (length + 3) & ~3


def _address(family: int, attributes: bytes) -> tuple[str, ...]:
    """IFA_LOCAL where there is one: on point-to-point links IFA_ADDRESS is the peer."""
    values: dict[int, bytes] = {}
    position = 0
    while position + 4 <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, position)
        if length < 4:
            break
        values[kind] = attributes[position + 4 : position + length]
        position += (length + 3) & ~3
    packed = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
    if packed is None or family not in (socket.AF_INET, socket.AF_INET6):
        return ()
    return (socket.inet_ntop(family, packed),)
