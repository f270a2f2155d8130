"""SCTP questions without the kernel's SCTP: an INIT sent by hand, and who saw it.

Nobody answers; listeners on every backend tell who was reached, and an ICMP error tells that the client was
refused. Each INIT is known by its tag, as masquerading may give it another source port.
"""

import contextlib
import errno
import itertools
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence

from rulecast.lab import Answer, Host, Lab, Probe, Reached, Verdict
from tests.conformance.places import BACKENDS, NODE_PORTS, NODES, PORTS
from tests.netns.raw import crc32c

_SCTP = 132
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_HEAD = struct.Struct("!HHII")
_INIT = struct.Struct("!BBHIIHHI")
_tags = itertools.count(1)


class SctpProbes(contextlib.AbstractContextManager["SctpProbes"]):
    """Listeners on the backends of one lab, and what asks them."""

    def __init__(self, lab: Lab) -> None:
        self._selector = selectors.DefaultSelector()
        with contextlib.ExitStack() as stack:
            for name in BACKENDS:
                host = _host(lab, name)
                for family in (socket.AF_INET, socket.AF_INET6):
                    made = stack.enter_context(host.namespace.socket(family, socket.SOCK_RAW, _SCTP))
                    made.setblocking(False)
                    self._selector.register(made, selectors.EVENT_READ, name)
            self._sockets = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._sockets.close()
        self._selector.close()

    def run(self, probes: Sequence[Probe]) -> list[Answer]:
        """Ask all at once; answers are in the order of the probes."""
        tags = [next(_tags) for _ in probes]
        found: dict[int, Answer] = {}
        with contextlib.ExitStack() as stack:
            clients: dict[tuple[str, bool, str | None], socket.socket] = {}
            for tag, probe in zip(tags, probes, strict=True):
                key = (probe.namespace.name, ":" in probe.address, probe.source)
                if key not in clients:
                    clients[key] = stack.enter_context(_client(probe))
                    self._selector.register(clients[key], selectors.EVENT_READ)
                    stack.callback(self._selector.unregister, clients[key])
                _send(clients[key], probe, tag)
            end = time.monotonic() + max((each.timeout for each in probes), default=0)
            while not found.keys() >= set(tags) and (left := end - time.monotonic()) > 0:
                for key_, _ in self._selector.select(left):
                    assert isinstance(key_.fileobj, socket.socket)
                    found |= _seen(key_.fileobj, key_.data) if key_.data else _refused(key_.fileobj)
        return [found.get(tag, Answer(Verdict.DROPPED, None, "no answer")) for tag in tags]


def _host(lab: Lab, name: str) -> Host:
    node = lab.nodes[BACKENDS[name].node]
    return node if node.name == name else node.pods[name]


def _client(probe: Probe) -> socket.socket:
    is_ipv6 = ":" in probe.address
    made = probe.namespace.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_RAW, _SCTP)
    made.setblocking(False)
    # Also errors of a socket that is not connected, each with the packet that it is about.
    made.setsockopt(
        *((socket.IPPROTO_IPV6, _IPV6_RECVERR) if is_ipv6 else (socket.IPPROTO_IP, _IP_RECVERR)), 1
    )
    if probe.source is not None:
        made.bind((probe.source, 0))
    return made


def _send(client: socket.socket, probe: Probe, tag: int) -> None:
    chunk = _INIT.pack(1, 0, _INIT.size, tag, 65536, 1, 1, tag)
    head = struct.pack("!HHI", probe.source_port, probe.port, 0)
    checksum = struct.pack("<I", crc32c(head + bytes(4) + chunk))
    # What a filter of the sender's own host ate is not permitted; an error of a packet before may come here.
    with contextlib.suppress(PermissionError):
        for _ in range(2):
            with contextlib.suppress(ConnectionRefusedError):
                client.sendto(head + checksum + chunk, (probe.address, 0))
                return


def _seen(listener: socket.socket, name: str) -> dict[int, Answer]:
    found = {}
    with contextlib.suppress(BlockingIOError):
        while True:
            data, peer = listener.recvfrom(4096)
            if listener.family == socket.AF_INET:
                data = data[(data[0] & 15) * 4 :]
            if len(data) < _HEAD.size + _INIT.size:
                # A kernel that has SCTP says that nobody listens.
                continue
            source, port, _, _ = _HEAD.unpack_from(data)
            kind, _, _, tag, *_ = _INIT.unpack_from(data, _HEAD.size)
            if kind == 1 and port in (NODE_PORTS if name in NODES else PORTS):
                found[tag] = Answer(Verdict.REACHED, Reached(name, peer[0], source, port))
            elif kind == 1:
                found[tag] = Answer(Verdict.REFUSED, None, f"nobody listens on {name}:{port}")
    return found


def _refused(client: socket.socket) -> dict[int, Answer]:
    client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    found = {}
    with contextlib.suppress(BlockingIOError):
        while True:
            data, said, _, _ = client.recvmsg(4096, 512, socket.MSG_ERRQUEUE)
            code = struct.unpack_from("=I", said[0][2])[0]
            tag = _INIT.unpack_from(data, _HEAD.size)[3]
            verdict = Verdict.REFUSED if code == errno.ECONNREFUSED else Verdict.UNREACHABLE
            found[tag] = Answer(verdict, None, os.strerror(code))
    with contextlib.suppress(BlockingIOError):
        while True:
            client.recv(4096)
    return found
