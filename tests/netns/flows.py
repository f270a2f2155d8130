"""Clients that stay: one socket, many questions."""

import socket
import struct

from rulecast.lab import Host


class Flow:
    """A connection or a UDP flow from one socket; a context manager."""

    def __init__(
        self, client: Host, address: str, port: int, kind: socket.SocketKind, source_port: int = 0
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = client.namespace.socket(family, kind)
        self._socket.settimeout(0.5)
        if kind is socket.SOCK_STREAM and source_port:
            # A reset at the end leaves the port free for the next connection.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.bind(("", source_port))
        try:
            self._socket.connect((address, port))
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> "Flow":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self) -> str:
        """Who answers the next line or datagram: a backend's name, "refused" or "dropped"."""
        return self.ask_where().partition(":")[0]

    def ask_where(self) -> str:
        """The same with the backend's port: `NAME:PORT`."""
        try:
            self._socket.send(b"?\n")
            words = self._socket.recv(4096).decode().split()
            return f"{words[0]}:{words[3]}"
        except TimeoutError:
            return "dropped"
        except ConnectionError:
            return "refused"
        except PermissionError:
            return "dropped"


def tcp(client: Host, address: str, port: int, source_port: int = 0) -> Flow:
    """An open connection; one with a source port ends with a reset."""
    return Flow(client, address, port, socket.SOCK_STREAM, source_port)


def udp(client: Host, address: str, port: int, source_port: int = 0) -> Flow:
    """A UDP flow: always the same socket, so always the same source port."""
    return Flow(client, address, port, socket.SOCK_DGRAM, source_port)
