"""Probes: connections and datagrams from within namespaces, many at a time, and what became of them."""

import contextlib
import enum
import errno
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from rulecast.lab.netns import Namespace
from rulecast.model import Protocol

_IN_FLIGHT = 256
"""So many sockets at a time: more would fill the backends' accept queues at once."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Verdict(enum.StrEnum):
    """What became of a probe."""

    REACHED = "reached"
    REFUSED = "refused"
    """A reset, or an ICMP error that says that nobody listens."""
    DROPPED = "dropped"
    """No answer within the timeout."""
    UNREACHABLE = "unreachable"
    """An ICMP error of routing: not a verdict of service rules, but of the network around them."""


class Reached(NamedTuple):
    """Who answered, and as whom the client was seen there."""

    backend: str
    source: str
    source_port: int
    port: int


class Probe(msgspec.Struct, frozen=True):
    """One question: from a namespace to an address."""

    namespace: Namespace
    address: str
    port: int
    protocol: Protocol = Protocol.TCP
    source: str | None = None
    """Bind to this address; None: whatever the route prefers."""
    source_port: int = 0
    timeout: float = 0.9
    """Seconds. Below a second, so that no lost SYN is sent again and the verdict is that of one packet."""


class Answer(NamedTuple):
    """What became of one probe."""

    verdict: Verdict
    reached: Reached | None
    detail: str = ""


def run_probes(probes: Iterable[Probe]) -> list[Answer]:
    """Send all probes, a bounded number at a time; answers are in the order of the probes."""
    todo = list(probes)
    answers: list[Answer | None] = [None] * len(todo)
    for first in range(0, len(todo), _IN_FLIGHT):
        chunk = todo[first : first + _IN_FLIGHT]
        answers[first : first + len(chunk)] = _Batch(chunk).run()
    return [answer for answer in answers if answer is not None]


class _Batch:
    def __init__(self, probes: Sequence[Probe]) -> None:
        self._probes = probes
        self._selector = selectors.DefaultSelector()
        self._answers: dict[int, Answer] = {}
        self._asked: set[int] = set()

    def run(self) -> list[Answer]:
        try:
            for index, made in self._sockets():
                self._start(index, made)
            self._wait()
        finally:
            for key in list(self._selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
            self._selector.close()
        return [self._answers[index] for index in range(len(self._probes))]

    def _sockets(self) -> Iterator[tuple[int, socket.socket]]:
        """One socket a probe; each namespace is entered once for all of its probes."""
        by_namespace: dict[Namespace, list[int]] = {}
        for index, probe in enumerate(self._probes):
            by_namespace.setdefault(probe.namespace, []).append(index)
        for namespace, indexes in by_namespace.items():
            with namespace.entered():
                made = [(index, _socket(self._probes[index])) for index in indexes]
            yield from made

    def _start(self, index: int, made: socket.socket) -> None:
        probe = self._probes[index]
        self._selector.register(made, selectors.EVENT_WRITE, index)
        try:
            if probe.source is not None or probe.source_port:
                made.bind((probe.source or "", probe.source_port))
            made.connect((probe.address, probe.port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._finish(index, made, _failed(error))

    def _wait(self) -> None:
        started = time.monotonic()
        while self._selector.get_map():
            patience = min(self._probes[key.data].timeout for key in self._selector.get_map().values())
            left = started + patience - time.monotonic()
            for key, _ in self._selector.select(max(left, 0)):
                assert isinstance(key.fileobj, socket.socket)
                self._step(key.data, key.fileobj)
            now = time.monotonic()
            for key in list(self._selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                if now >= started + self._probes[key.data].timeout:
                    self._finish(key.data, key.fileobj, Answer(Verdict.DROPPED, None, "no answer"))

    def _step(self, index: int, made: socket.socket) -> None:
        try:
            if index not in self._asked:
                code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, errno.errorcode.get(code, str(code)))
                with contextlib.suppress(PermissionError):
                    # A filter of our own host ate it: silently, or with an ICMP error that comes now.
                    made.send(b"?\n")
                self._asked.add(index)
                self._selector.modify(made, selectors.EVENT_READ, index)
                return
            text = made.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(index, made, _failed(error))
            return
        self._finish(index, made, _parsed(text))

    def _finish(self, index: int, made: socket.socket, answer: Answer) -> None:
        self._answers[index] = answer
        self._selector.unregister(made)
        made.close()


def _socket(probe: Probe) -> socket.socket:
    family = socket.AF_INET6 if ":" in probe.address else socket.AF_INET
    kind = socket.SOCK_STREAM if probe.protocol is Protocol.TCP else socket.SOCK_DGRAM
    made = socket.socket(family, kind)
    made.setblocking(False)
    if probe.source_port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if probe.protocol is Protocol.TCP:
        # No TIME_WAIT: thousands of probes would use up the client's ports.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    return made


def _parsed(text: bytes) -> Answer:
    words = text.decode(errors="replace").split()
    if len(words) < 4:
        return Answer(Verdict.REFUSED, None, "closed without an answer")
    return Answer(Verdict.REACHED, Reached(words[0], words[1], int(words[2]), int(words[3])))


def _failed(error: OSError) -> Answer:
    detail = error.strerror or str(error)
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        return Answer(Verdict.REFUSED, None, detail)
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES):
        return Answer(Verdict.UNREACHABLE, None, detail)
    raise error
