"""Tracked UDP flows over netlink: a streamed dump, and removal in batches.

Hand-packed (linux/netfilter/nfnetlink_conntrack.h), because tables hold hundreds of thousands of flows: no
more than one received chunk and one batch is ever in memory (kubernetes/kubernetes#129982), and an entry that
does not matter costs two slices and a look-up.
"""

import errno
import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from rulecast.model import Family
from rulecast_agent.kernel.udp_flows import Backends, Targets, is_stale

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 1 << 8
_GET, _DELETE = _SUBSYSTEM | 1, _SUBSYSTEM | 2
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP, _INTERRUPTED = 0x1, 0x4, 0x300, 0x10
_NESTED = 0x8000
_ORIG, _REPLY, _ID, _ZONE, _FILTER = 1, 2, 12, 18, 25
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_PROTO_NUM, _PROTO_SOURCE, _PROTO_DESTINATION = 1, 2, 3
_MATCH_DESTINATION, _MATCH_PROTOCOL, _MATCH_PORT = 1 << 1, 1 << 3, 1 << 5
"""CTA_FILTER's flags (net/netfilter/nf_internals.h); kernels before 5.8 ignore the filter."""
_UDP = 17
_SOL_NETLINK, _CAP_ACK = 270, 10
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_FAMILY = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_FOREIGN: Backends = frozenset((b"foreign",))
"""Stands for a destination that is none of the frontends looked at."""
_BATCH = 200
_FILTERED_DUMPS = 4
"""Up to so many frontends are asked for one by one; more are sorted out of one dump of all UDP flows."""
_ATTEMPTS = 5


class ConntrackError(Exception):
    """Flows could not be listed or removed; `str()` is one clear line."""


class Removed(msgspec.Struct, frozen=True):
    """What one run did."""

    seen: int
    """Flows that the kernel sent."""
    deleted: int


def remove_stale(targets: Targets, node_port_ips: Mapping[Family, Collection[bytes]]) -> Removed:
    """Remove the stale flows to `targets`; `node_port_ips` are the packed addresses that have node ports.

    Blocks for about 1 s for 200,000 flows looked at. Acts in the thread's network namespace. Raises
    ConntrackError; what was removed before it stays removed.
    """
    seen = deleted = 0
    try:
        with _Connection() as dump, _Connection() as remove:
            for family in Family:
                wanted = {f.destination: b for f, b in targets.items() if f.family is family}
                if not wanted:
                    continue
                for query in _queries(family, wanted):
                    counts = _run(dump, remove, family, query, wanted, frozenset(node_port_ips[family]))
                    seen += counts.seen
                    deleted += counts.deleted
    except OSError as error:
        raise ConntrackError(f"conntrack: {error.strerror or error}") from error
    return Removed(seen, deleted)


def _run(
    dump: "_Connection",
    remove: "_Connection",
    family: Family,
    query: bytes,
    wanted: Mapping[bytes, Backends],
    node_port_ips: frozenset[bytes],
) -> Removed:
    deleted = 0
    for _ in range(_ATTEMPTS):
        scan = _Scan(family, wanted, node_port_ips)
        dump.ask(family, query)
        while not scan.done:
            scan.take(dump.receive())
            if len(scan.stale) >= _BATCH or scan.done:
                deleted += remove.delete(family, scan.stale)
                scan.stale = []
        if not scan.interrupted:
            return Removed(scan.seen, deleted)
    raise ConntrackError("conntrack: the table changes too fast to be listed")


class _Scan:
    """Finds the stale flows in the chunks of one dump."""

    def __init__(
        self, family: Family, wanted: Mapping[bytes, Backends], node_port_ips: frozenset[bytes]
    ) -> None:
        self._size = 4 if family is Family.IPV4 else 16
        self._wanted = wanted
        self._node_port_ips = node_port_ips
        self.seen = 0
        self.done = False
        self.interrupted = False
        """The table was rebuilt meanwhile; flows may have been left out."""
        self.stale: list[bytes] = []
        """What names each of them to the kernel."""

    def take(self, chunk: bytes) -> None:
        """Take the next chunk. Raises OSError when it is the kernel's refusal."""
        size = self._size
        # A tuple has this length and order unless it carries a zone; only then attributes are walked.
        plain = 44 + 2 * size
        ip_at, protocol_at, port_at = 36 + size, plain, plain + 16
        reply_at = 20 + plain
        source_at, source_port_at = reply_at + 12, reply_at + plain - 12
        wanted, node_port_ips = self._wanted, self._node_port_ips
        unpack_header, unpack_attribute = _HEADER.unpack_from, _ATTRIBUTE.unpack_from
        at, end = 0, len(chunk)
        while at + 16 <= end:
            length, kind, flags, _, _ = unpack_header(chunk, at)
            if flags & _INTERRUPTED:
                self.interrupted = True
            if kind == _DONE:
                self.done = True
                return
            if kind == _ERROR:
                _raise(chunk, at)
            self.seen += 1
            following = at + ((length + 3) & ~3)
            if (
                length >= reply_at + plain
                and unpack_attribute(chunk, at + 20) == (plain, _ORIG | _NESTED)
                and unpack_attribute(chunk, at + reply_at) == (plain, _REPLY | _NESTED)
            ):
                udp = chunk[at + protocol_at] == _UDP
                ip = chunk[at + ip_at : at + ip_at + size]
                port = chunk[at + port_at : at + port_at + 2]
                source = chunk[at + source_at : at + source_at + size]
                backend = source + chunk[at + source_port_at : at + source_port_at + 2]
            else:
                udp, ip, port, backend = _slow(chunk[at + 20 : at + length])
            if udp:
                backends = wanted.get(ip + port, _FOREIGN)
                if backends is _FOREIGN and ip in node_port_ips:
                    backends = wanted.get(port, _FOREIGN)
                if backends is not _FOREIGN and is_stale(
                    destination=ip + port, backend=backend, backends=backends
                ):
                    self.stale.append(_identity(chunk[at + 20 : at + length]))
            at = following


def _slow(data: bytes) -> tuple[bool, bytes, bytes, bytes]:
    attributes = _attributes(data)
    orig, reply = _attributes(attributes.get(_ORIG, b"")), _attributes(attributes.get(_REPLY, b""))
    protocol = _attributes(orig.get(_TUPLE_PROTO, b""))
    reply_protocol = _attributes(reply.get(_TUPLE_PROTO, b""))
    ips, reply_ips = _attributes(orig.get(_TUPLE_IP, b"")), _attributes(reply.get(_TUPLE_IP, b""))
    source = reply_ips.get(1) or reply_ips.get(3) or b""
    return (
        protocol.get(_PROTO_NUM) == bytes([_UDP]),
        ips.get(2) or ips.get(4) or b"",
        protocol.get(_PROTO_DESTINATION, b""),
        source + reply_protocol.get(_PROTO_SOURCE, b""),
    )


def _identity(data: bytes) -> bytes:
    """What names exactly this flow: its tuple, zone and id. The id keeps a successor with the same tuple."""
    attributes = _attributes(data)
    return b"".join(
        _pack(kind | (_NESTED if kind == _ORIG else 0), attributes[kind])
        for kind in (_ORIG, _ZONE, _ID)
        if kind in attributes
    )


def _queries(family: Family, wanted: Mapping[bytes, Backends]) -> Iterator[bytes]:
    if len(wanted) > _FILTERED_DUMPS:
        yield _query(family, b"", b"")
        return
    for destination in wanted:
        yield _query(family, destination[:-2], destination[-2:])


def _query(family: Family, ip: bytes, port: bytes) -> bytes:
    flags = _MATCH_PROTOCOL
    protocol = _pack(_PROTO_NUM, bytes([_UDP]))
    address = b""
    if port:
        flags |= _MATCH_PORT
        protocol += _pack(_PROTO_DESTINATION, port)
    if ip and family is Family.IPV4:
        # Not for IPv6: there the kernel (seen on 6.18) sends all that do not have the address.
        flags |= _MATCH_DESTINATION
        address = _pack(_TUPLE_IP | _NESTED, _pack(2, ip))
    orig = address + _pack(_TUPLE_PROTO | _NESTED, protocol)
    mask = _pack(1, struct.pack("=I", flags)) + _pack(2, struct.pack("=I", 0))
    return _pack(_ORIG | _NESTED, orig) + _pack(_FILTER | _NESTED, mask)


def _pack(kind: int, data: bytes) -> bytes:
    return _ATTRIBUTE.pack(len(data) + 4, kind) + data + b"\0" * (-len(data) & 3)


def _attributes(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    position = 0
    while position + 4 <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, position)
        if length < 4:
            break
        found[kind & 0x3FFF] = data[position + 4 : position + length]
        position += (length + 3) & ~3
    return found


class _Connection:
    """One netlink socket."""

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER
        )
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._socket.bind((0, 0))
        self._socket.settimeout(30.0)
        self._sequence = 0

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, family: Family, query: bytes) -> None:
        """Begin a dump. Raises OSError."""
        self._sequence += 1
        self._socket.send(self._message(_GET, _REQUEST | _DUMP, family, query))

    def receive(self) -> bytes:
        """The next chunk of messages. Raises OSError."""
        # The kernel sizes its chunks by what the reader offers, up to 32 KiB.
        return self._socket.recv(1 << 16)

    def delete(self, family: Family, identities: Sequence[bytes]) -> int:
        """Remove flows; gives how many were still there. Raises OSError."""
        if not identities:
            return 0
        first = self._sequence + 1
        messages = []
        for index, identity in enumerate(identities, 1):
            self._sequence += 1
            flags = _REQUEST | (_ACK if index == len(identities) else 0)
            messages.append(self._message(_DELETE, flags, family, identity))
        self._socket.send(b"".join(messages))
        gone = 0
        failure = 0
        while True:
            data = self._socket.recv(1 << 16)
            position = 0
            while position + 20 <= len(data):
                length, kind, _, sequence, _ = _HEADER.unpack_from(data, position)
                if kind == _ERROR and sequence >= first:
                    code = -struct.unpack_from("=i", data, position + 16)[0]
                    gone += code != 0
                    if code not in (0, errno.ENOENT):
                        failure = code
                    if sequence == self._sequence:
                        if failure:
                            raise OSError(failure, os.strerror(failure))
                        return len(identities) - int(gone)
                position += (length + 3) & ~3

    def _message(self, kind: int, flags: int, family: Family, body: bytes) -> bytes:
        header = _HEADER.pack(20 + len(body), kind, flags, self._sequence, 0)
        return header + struct.pack("!BBH", _FAMILY[family], 0, 0) + body


def _raise(data: bytes, at: int) -> None:
    code = -struct.unpack_from("=i", data, at + 16)[0]
    if code:
        raise OSError(code, os.strerror(code))
