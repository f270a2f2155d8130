"""Packets made by hand: what no socket of this kernel sends."""

import contextlib
import socket
import struct
import time

from rulecast.lab import Host
from rulecast.model import Family

_SCTP = 132
_ETH = {Family.IPV4: 0x0800, Family.IPV6: 0x86DD}


def _family(family: Family) -> socket.AddressFamily:
    return socket.AF_INET if family is Family.IPV4 else socket.AF_INET6


def crc32c(data: bytes) -> int:
    """The checksum of SCTP (RFC 9260, appendix A)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


class SctpListener:
    """Sees the SCTP packets that come to a host; answers nothing."""

    def __init__(self, host: Host, family: Family) -> None:
        self._family = family
        self._socket = host.namespace.socket(_family(family), socket.SOCK_RAW, _SCTP)
        self._socket.settimeout(0.05)

    def __enter__(self) -> "SctpListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def receive(self, patience: float = 1.0) -> tuple[str, int, int] | None:
        """Source, source port and destination port of the next INIT with a right checksum."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            try:
                data, peer = self._socket.recvfrom(4096)
            except TimeoutError:
                continue
            if self._family is Family.IPV4:
                data = data[(data[0] & 15) * 4 :]
            source, destination, _, checksum = struct.unpack_from("!HHII", data)
            # Raw sockets see the packet before hardware would have filled in the checksum, if ever.
            right = struct.pack("<I", crc32c(data[:8] + bytes(4) + data[12:]))
            if data[12] == 1 and checksum == int.from_bytes(right, "big"):
                return peer[0], source, destination
        return None


def send_sctp_init(host: Host, family: Family, address: str, port: int, source_port: int) -> None:
    """Begin an association, as a client would."""
    tag = 0x12345678
    chunk = struct.pack("!BBHIIHHI", 1, 0, 20, tag, 65536, 1, 1, tag)
    head = struct.pack("!HHI", source_port, port, 0)
    checksum = struct.pack("<I", crc32c(head + bytes(4) + chunk))
    with host.namespace.socket(_family(family), socket.SOCK_RAW, _SCTP) as made:
        made.sendto(head + checksum + chunk, (address, 0))


def ping(host: Host, family: Family, address: str) -> str:
    """Send one ICMP echo: "answered", "refused" (port unreachable) or "dropped"."""
    protocol, request, reply, unreachable = (
        (socket.IPPROTO_ICMP, 8, 0, (3, 3))
        if family is Family.IPV4
        else (socket.IPPROTO_ICMPV6, 128, 129, (1, 4))
    )
    number = time.monotonic_ns() & 0xFFFF
    body = struct.pack("!BBHHH", request, 0, 0, number, 1)
    if family is Family.IPV4:
        body = body[:2] + struct.pack("!H", _internet_checksum(body)) + body[4:]
    with host.namespace.socket(_family(family), socket.SOCK_RAW, protocol) as made:
        made.settimeout(0.5)
        # What is rejected on its way out is also not permitted to the sender.
        with contextlib.suppress(PermissionError):
            made.sendto(body, (address, 0))
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            try:
                data, _ = made.recvfrom(4096)
            except TimeoutError:
                break
            if family is Family.IPV4:
                data = data[(data[0] & 15) * 4 :]
            if data[0] == reply and data[4:6] == body[4:6]:
                return "answered"
            if (data[0], data[1]) == unreachable and body[4:6] in data[8:]:
                return "refused"
    return "dropped"


def send_udp_frame(sender: Host, receiver: Host, family: Family, destination: str, port: int) -> None:
    """Put a datagram for an address on the wire to a neighbour, whatever the routes say."""
    source = sender.ip(family)
    payload = b"?\n"
    length = 8 + len(payload)
    datagram = struct.pack("!HHHH", 40000, port, length, 0) + payload
    if family is Family.IPV4:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 1, 0, 64, 17, 0)
        addresses = socket.inet_aton(source) + socket.inet_aton(destination)
        head = head[:10] + struct.pack("!H", _internet_checksum(head + addresses)) + addresses
    else:
        addresses = b"".join(socket.inet_pton(socket.AF_INET6, each) for each in (source, destination))
        pseudo = addresses + struct.pack("!II", length, 17)
        checksum = _internet_checksum(pseudo + datagram)
        datagram = datagram[:6] + struct.pack("!H", checksum or 0xFFFF) + datagram[8:]
        head = struct.pack("!IHBB", 0x60000000, length, 17, 64) + addresses
    frame = _mac(receiver) + _mac(sender) + struct.pack("!H", _ETH[family]) + head + datagram
    with sender.namespace.socket(socket.AF_PACKET, socket.SOCK_RAW) as made:
        made.bind(("eth0", 0))
        made.send(frame)


def _mac(host: Host) -> bytes:
    text = host.namespace.run("cat", "/sys/class/net/eth0/address")
    return bytes.fromhex(text.strip().replace(":", ""))


def _internet_checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
