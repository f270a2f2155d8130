"""IPVS over generic netlink (linux/ip_vs.h); from /proc what netlink tells one service at a time."""

import errno
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import NamedTuple

from rulecast.model import Endpoint, Family
from rulecast_agent.kernel.netlink_batch import (
    NetlinkBatch,
    NetlinkFailed,
    Request,
    attribute,
    attributes,
    nested,
)

_GENERIC, _CONTROL = 16, 0x10
_NEW_SERVICE, _SET_SERVICE, _DEL_SERVICE, _GET_SERVICE = 1, 2, 3, 4
_NEW_DEST, _SET_DEST, _DEL_DEST = 5, 6, 7
_GET_DEST, _SET_CONFIG = 8, 12
_PERSISTENT = 0x1
FALLBACK, HASH_PORT = 0x8, 0x10
"""Scheduler flags of sh and mh: to another server when the chosen one has no weight; the port counts too."""
PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}
_NAMES = {"TCP": 6, "UDP": 17, "SCTP": 132}
_TABLE, _CONNECTIONS = "/proc/thread-self/net/ip_vs", "/proc/thread-self/net/ip_vs_conn"
_OVER = {"TIME_WAIT", "CLOSE", "LAST_ACK", "CLOSED"}
"""States of TCP and SCTP in which both sides have said all."""


class VirtualServer(NamedTuple):
    """Which packets: an address and port, or a mark (then the rest is empty)."""

    family: Family
    protocol: int
    address: str
    port: int
    mark: int = 0


class Scheduling(NamedTuple):
    """How a virtual server picks. `persistence` in seconds; 0: each connection for itself."""

    scheduler: str
    persistence: int = 0
    flags: int = 0


class Destination(NamedTuple):
    """As it is in the kernel now."""

    weight: int
    active: int
    """Established, or about to be."""
    inactive: int
    """Half closed, or over and not forgotten yet (TIME_WAIT lasts 120 s)."""


class Timeouts(NamedTuple):
    """Seconds; 0 keeps what the kernel has."""

    tcp: int = 0
    tcp_fin: int = 0
    udp: int = 0


Table = dict[VirtualServer, dict[Endpoint, Destination]]


class Ipvs:
    """The IPVS of the network namespace in which this was made."""

    def __init__(self) -> None:
        """Raises NetlinkFailed; ENOENT when the kernel has no IPVS."""
        self._netlink = NetlinkBatch(_GENERIC, "IPVS")
        name = attribute(2, b"IPVS\0")
        try:
            answer = attributes(
                self._netlink.ask(Request(_CONTROL, 0, struct.pack("=BBH", 3, 1, 0) + name))[4:]
            )
        except NetlinkFailed:
            self._netlink.close()
            raise
        self._family = struct.unpack_from("=H", answer[1])[0]

    def close(self) -> None:
        """Close the socket."""
        self._netlink.close()

    def commit(self, requests: Sequence[Request]) -> dict[int, int]:
        """See `NetlinkBatch.send`."""
        return self._netlink.send(requests)

    def add(self, server: VirtualServer, how: Scheduling) -> Request:
        """Make a virtual server."""
        return self._request(_NEW_SERVICE, _service(server, how))

    def edit(self, server: VirtualServer, how: Scheduling) -> Request:
        """Change how it picks."""
        return self._request(_SET_SERVICE, _service(server, how))

    def delete(self, server: VirtualServer) -> Request:
        """Delete it with its destinations."""
        return self._request(_DEL_SERVICE, _service(server, None))

    def add_destination(self, server: VirtualServer, endpoint: Endpoint) -> Request:
        """Give it an endpoint, with weight 1."""
        return self._request(_NEW_DEST, _service(server, None), _destination(server.family, endpoint, 1))

    def weigh_destination(self, server: VirtualServer, endpoint: Endpoint, weight: int) -> Request:
        """Weight 0: nothing new goes there."""
        return self._request(_SET_DEST, _service(server, None), _destination(server.family, endpoint, weight))

    def delete_destination(self, server: VirtualServer, endpoint: Endpoint) -> Request:
        """Take an endpoint away; its connections go."""
        return self._request(_DEL_DEST, _service(server, None), _destination(server.family, endpoint, None))

    def set_timeouts(self, timeouts: Timeouts) -> Request:
        """Set the idle times of connections."""
        parts = [attribute(kind, struct.pack("=I", seconds)) for kind, seconds in enumerate(timeouts, 4)]
        return self._request(_SET_CONFIG, *parts)

    def services(self) -> dict[VirtualServer, Scheduling]:
        """Every virtual server, of anyone."""
        found = {}
        body = struct.pack("=BBH", _GET_SERVICE, 1, 0)
        for answer in self._netlink.dump(Request(self._family, 0, body)):
            fields = attributes(attributes(answer[4:])[1])
            kind = struct.unpack_from("=H", fields[1])[0]
            family = Family.IPV6 if kind == socket.AF_INET6 else Family.IPV4
            flags = struct.unpack_from("=I", fields[7])[0]
            how = Scheduling(
                bytes(fields[6]).rstrip(b"\0").decode(),
                struct.unpack_from("=I", fields[8])[0] if flags & _PERSISTENT else 0,
                flags & (FALLBACK | HASH_PORT),
            )
            if 5 in fields:
                server = VirtualServer(family, 0, "", 0, struct.unpack_from("=I", fields[5])[0])
            else:
                address = _text(family, bytes(fields[3]))
                protocol = struct.unpack_from("=H", fields[2])[0]
                server = VirtualServer(family, protocol, address, struct.unpack_from("!H", fields[4])[0])
            found[server] = how
        return found

    def destinations(self, server: VirtualServer) -> dict[Endpoint, Destination]:
        """Of one virtual server. Raises NetlinkFailed."""
        body = struct.pack("=BBH", _GET_DEST, 1, 0) + _service(server, None)
        found = {}
        for answer in self._netlink.dump(Request(self._family, 0, body)):
            fields = attributes(attributes(answer[4:])[2])
            address = _text(server.family, bytes(fields[1]))
            endpoint = Endpoint(address, struct.unpack_from("!H", fields[2])[0])
            weight, active, inactive = (struct.unpack_from("=I", fields[at])[0] for at in (4, 7, 8))
            found[endpoint] = Destination(weight, active, inactive)
        return found

    @staticmethod
    def unfinished() -> set[tuple[str, int]]:
        """Addresses and ports to which a connection is open, if only in one direction.

        From /proc, a line a connection: what is counted as inactive has both kinds.
        """
        found = set()
        for line in Path(_CONNECTIONS).read_text().splitlines()[1:]:
            words = line.split()
            if len(words) > 7 and words[7] not in _OVER:
                found.add((words[3], words[4]))
        return {
            _place(f"{address if ':' not in address else f'[{address}]'}:{port}") for address, port in found
        }

    def table(self, marked: dict[int, Family]) -> Table:
        """Every virtual server with its destinations. `marked` tells the families of marks.

        From /proc: netlink gives destinations only one service at a time.
        """
        return dict(_parse(Path(_TABLE).read_text(), marked))

    def _request(self, command: int, *parts: bytes) -> Request:
        return Request(self._family, 0, struct.pack("=BBH", command, 1, 0) + b"".join(parts))


def _service(server: VirtualServer, how: Scheduling | None) -> bytes:
    six = server.family is Family.IPV6
    parts = [attribute(1, struct.pack("=H", socket.AF_INET6 if six else socket.AF_INET))]
    if server.mark:
        parts.append(attribute(5, struct.pack("=I", server.mark)))
    else:
        parts.append(attribute(2, struct.pack("=H", server.protocol)))
        parts.append(attribute(3, _packed(server.address)))
        parts.append(attribute(4, struct.pack("!H", server.port)))
    if how is not None:
        flags = how.flags | (_PERSISTENT if how.persistence else 0)
        parts.append(attribute(6, how.scheduler.encode() + b"\0"))
        parts.append(attribute(7, struct.pack("=II", flags, 0xFFFFFFFF)))
        parts.append(attribute(8, struct.pack("=I", how.persistence)))
        # One client is one address.
        parts.append(attribute(9, struct.pack("=I", 128) if six else b"\xff\xff\xff\xff"))
    return nested(1, *parts)


def _destination(family: Family, endpoint: Endpoint, weight: int | None) -> bytes:
    parts = [attribute(1, _packed(endpoint.ip)), attribute(2, struct.pack("!H", endpoint.port))]
    if weight is not None:
        # Forwarding by translation, no thresholds.
        parts += [
            attribute(kind, struct.pack("=I", value)) for kind, value in ((3, 0), (4, weight), (5, 0), (6, 0))
        ]
    parts.append(
        attribute(11, struct.pack("=H", socket.AF_INET6 if family is Family.IPV6 else socket.AF_INET))
    )
    return nested(2, *parts)


def _packed(address: str) -> bytes:
    # With the ipaddress module this was a third of the time of a first load.
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address).ljust(16, b"\0")


def _parse(
    text: str, marked: dict[int, Family]
) -> Iterator[tuple[VirtualServer, dict[Endpoint, Destination]]]:
    destinations: dict[Endpoint, Destination] = {}
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["->"]:
            if words[1] != "RemoteAddress:Port":
                address, port = _place(words[1])
                weight, active, inactive = map(int, words[3:6])
                destinations[Endpoint(address, port)] = Destination(weight, active, inactive)
        elif words[:1] == ["FWM"]:
            mark = int(words[1], 16)
            destinations = {}
            yield VirtualServer(marked.get(mark, Family.IPV4), 0, "", 0, mark), destinations
        elif words and words[0] in _NAMES:
            address, port = _place(words[1])
            family = Family.IPV6 if ":" in address else Family.IPV4
            destinations = {}
            yield VirtualServer(family, _NAMES[words[0]], address, port), destinations


def _place(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    if address.startswith("["):
        packed = socket.inet_pton(socket.AF_INET6, address[1:-1])
        return _text(Family.IPV6, packed), int(port, 16)
    return _text(Family.IPV4, bytes.fromhex(address)), int(port, 16)


def _text(family: Family, packed: bytes) -> str:
    # The ipaddress module takes ten times as long, and a table has 40,000 of these.
    if family is Family.IPV4:
        return socket.inet_ntop(socket.AF_INET, packed[:4])
    text = socket.inet_ntop(socket.AF_INET6, packed)
    return str(IPv6Address(packed)) if "." in text else text


def words(code: int) -> str:
    """An error number as IPVS means it."""
    return {
        errno.ENOENT: "no such scheduler (is its module there?)",
        errno.EEXIST: "is there already",
        errno.ESRCH: "is not there",
    }.get(code, errno.errorcode.get(code, str(code)))
