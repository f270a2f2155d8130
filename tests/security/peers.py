"""Peers that misbehave, below any gRPC library: HTTP/2 frames on a socket."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Mapping

from rulecast.v1 import rules_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_HEADERS, ACK = 4, 1
INITIAL_WINDOW_SIZE = 4
ENHANCE_YOUR_CALM = 11


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """One frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def settings(values: Mapping[int, int] | None = None) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, b"".join(struct.pack(">HI", *item) for item in (values or {}).items()))


def call(
    stream: int, path: str = "/rulecast.v1.Rules/Watch", extra: Mapping[str, str] | None = None
) -> bytes:
    """The HEADERS that begin a call, HPACK literals without indexing."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
    return frame(HEADERS, block, flags=END_HEADERS, stream=stream)


def message(stream: int, request: pb.WatchRequest) -> bytes:
    """A gRPC message in a DATA frame."""
    body = request.SerializeToString()
    return frame(DATA, b"\0" + struct.pack(">I", len(body)) + body, stream=stream)


def hello(node: str) -> pb.WatchRequest:
    """The first request."""
    return pb.WatchRequest(hello=pb.Hello(node_name=node))


def _text(text: str) -> bytes:
    # Below 127 the length is one byte (RFC 7541, 5.1).
    return bytes((len(text),)) + text.encode()


class RawPeer:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> "RawPeer":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, content: bytes) -> None:
        """Write; what the other side has closed takes nothing more."""
        with contextlib.suppress(OSError):
            self.writer.write(content)

    async def frames(self) -> AsyncIterator[tuple[int, int, bytes]]:
        """Kind, stream and payload of what comes, until the connection ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == SETTINGS and not head[4] & ACK:
                    self.send(frame(SETTINGS, flags=ACK))
                yield head[3], int.from_bytes(head[5:9], "big"), payload

    async def ended(self) -> int | None:
        """Wait until the connection ends; the error code of its GOAWAY, None without one."""
        code = None
        async for kind, _, payload in self.frames():
            if kind == GOAWAY:
                code = int.from_bytes(payload[4:8], "big")
        return code

    async def answers_pings(self) -> None:
        """Be alive in every way but reading streams, until the connection ends."""
        async for kind, _, payload in self.frames():
            if kind == PING:
                self.send(frame(PING, payload, flags=ACK))

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
