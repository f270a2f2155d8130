"""A TCP proxy that cuts, stalls, and counts."""

import asyncio
import contextlib
import socket


class Proxy:
    """Forwards to one port until told otherwise."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.port = 0
        self.cut_after: int | None = None
        """Bytes from the server after which each connection is reset; None: never."""
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.accepted = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1") -> "Proxy":
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def stall(self) -> None:
        """Carry nothing more on the connections of this moment, either way, and tell nobody."""
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            # RST, so that it is noticed at once.
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: streams report the cancellation of theirs as an error.
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        flowing = self._flowing
        self._writers.add(writer)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(up_writer)
        copies = [
            asyncio.create_task(self._copy(reader, up_writer, flowing, None)),
            asyncio.create_task(self._copy(up_reader, writer, flowing, self.cut_after)),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            # That one side is gone is not carried either.
            await flowing.wait()
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.wait(copies)
            for each in (writer, up_writer):
                each.transport.abort()
                self._writers.discard(each)

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        flowing: asyncio.Event,
        limit: int | None,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 14):
                await flowing.wait()
                if limit is not None:
                    data = data[:limit]
                    limit -= len(data)
                writer.write(data)
                await writer.drain()
                if limit == 0:
                    return
