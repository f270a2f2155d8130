"""Clients that never rest: new connections every few milliseconds, and some that stay open."""

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from rulecast.lab import Host
from tests.netns import flows

_PAUSE = 0.005
# Below the second after which a lost SYN is sent again: one lost packet is one failure.
_TIMEOUT = 0.9
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Target(NamedTuple):
    """Where a client connects to."""

    client: Host
    address: str
    port: int


class Traffic:
    """A context manager; what failed meanwhile is in `failures` afterwards."""

    def __init__(self, targets: Sequence[Target], *, staying: Sequence[Target] = ()) -> None:
        """`staying`: one TCP connection and one UDP flow each, opened now; they must stay where they are."""
        self._targets = targets
        self._flows = [
            (target, kind.__name__, kind(*target)) for target in staying for kind in (flows.tcp, flows.udp)
        ]
        self._first = [flow.ask() for _, _, flow in self._flows]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failures: list[str] = []
        self.connections = 0

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for _, _, flow in self._flows:
            flow.__exit__()

    def check(self) -> None:
        """All went well, and there was something to go well."""
        assert self.failures == []
        assert self.connections > 50

    def _run(self) -> None:
        for turn, target in enumerate(itertools.cycle(self._targets)):
            if self._stop.is_set():
                return
            self._connect(target)
            if turn % 10 == 0:
                for (place, kind, flow), first in zip(self._flows, self._first, strict=True):
                    answered = flow.ask()
                    if answered != first:
                        self._fail(place, f"{kind}: {answered} instead of {first}")
            time.sleep(_PAUSE)

    def _connect(self, target: Target) -> None:
        family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
        with contextlib.closing(target.client.namespace.socket(family, socket.SOCK_STREAM)) as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            made.settimeout(_TIMEOUT)
            try:
                made.connect((target.address, target.port))
                made.sendall(b"?\n")
                if not made.recv(4096):
                    raise ConnectionResetError("closed without an answer")
            except OSError as error:
                self._fail(target, str(error) or type(error).__name__)
        self.connections += 1

    def _fail(self, target: Target, what: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        self.failures.append(f"{stamp} {target.client.name} to {target.address}:{target.port}: {what}")
