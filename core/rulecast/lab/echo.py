"""Backends: sockets in many namespaces, answered by one thread.

Each line (TCP) or datagram (UDP) is answered with `NAME PEER-ADDRESS PEER-PORT LOCAL-PORT`, so that a client
learns who answered and as whom it was seen.
"""

import collections
import contextlib
import functools
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Iterable

from rulecast.lab.netns import Namespace
from rulecast.model import Protocol


class EchoServers:
    """All backends of a lab. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._sockets: dict[str, set[socket.socket]] = collections.defaultdict(set)
        self._received: collections.Counter[tuple[str, Protocol, int]] = collections.Counter()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="lab-backends", daemon=True)
        self._thread.start()

    def listen(
        self, name: str, namespace: Namespace, addresses: Iterable[str], port: int, protocol: Protocol
    ) -> None:
        """Answer as `name` on these addresses of a namespace; in force when this returns.

        One socket an address: a UDP answer from a wildcard socket leaves with the address that the route
        prefers, not with the one that was asked. Raises OSError when an address is taken or not there.
        """
        made = []
        try:
            with namespace.entered():
                for address in addresses:
                    made.append(_bound(address, port, protocol))  # noqa: PERF401  (what was made must be closed)
        except OSError:
            for each in made:
                each.close()
            raise
        self._do(lambda: self._add(name, port, protocol, made))

    def close(self, name: str) -> None:
        """Close every socket and connection of one backend, in force when this returns."""
        self._do(lambda: self._drop(name))

    def received(self, name: str, protocol: Protocol, port: int) -> int:
        """Lines or datagrams that came for one backend's port so far."""
        return self._received[name, protocol, port]

    def stop(self) -> None:
        """Close everything and end the thread."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._wake.send(b".")
            self._thread.join()

    def _do(self, command: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        self._commands.put(run)
        self._wake.send(b".")
        done.wait()

    def _loop(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fileobj in self._selector.get_map():
                    key.data()
        for name in list(self._sockets):
            self._drop(name)
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is None:
                    self._stopping = True
                else:
                    command()

    def _add(self, name: str, port: int, protocol: Protocol, made: list[socket.socket]) -> None:
        action = self._on_connection if protocol is Protocol.TCP else self._on_datagram
        for each in made:
            self._register(name, each, functools.partial(action, name, each, port))

    def _register(self, name: str, each: socket.socket, action: Callable[[], None]) -> None:
        each.setblocking(False)
        self._sockets[name].add(each)
        self._selector.register(each, selectors.EVENT_READ, action)

    def _on_connection(self, name: str, listener: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, peer = listener.accept()
                answer = _answer(name, peer, port)
                action = functools.partial(self._on_line, name, connection, port, answer)
                self._register(name, connection, action)

    def _on_line(self, name: str, connection: socket.socket, port: int, answer: bytes) -> None:
        try:
            data = connection.recv(4096)
            lines = data.count(b"\n")
            if lines:
                self._received[name, Protocol.TCP, port] += lines
                connection.send(answer * lines)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(name, connection)

    def _on_datagram(self, name: str, each: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                _, peer = each.recvfrom(4096)
                self._received[name, Protocol.UDP, port] += 1
                each.sendto(_answer(name, peer, port), peer)

    def _drop(self, name: str) -> None:
        for each in list(self._sockets.pop(name, ())):
            self._forget(name, each)

    def _forget(self, name: str, each: socket.socket) -> None:
        self._selector.unregister(each)
        each.close()
        if name in self._sockets:
            self._sockets[name].discard(each)


def _bound(address: str, port: int, protocol: Protocol) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM if protocol is Protocol.TCP else socket.SOCK_DGRAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        if protocol is Protocol.TCP:
            made.listen(1024)
    except OSError:
        made.close()
        raise
    return made


def _answer(name: str, peer: tuple[str, int], port: int) -> bytes:
    return f"{name} {peer[0]} {peer[1]} {port}\n".encode()
