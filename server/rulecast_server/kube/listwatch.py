"""Lists and watches as nested generators: one call, then a list followed by its watch.

The protocol is that of the API concepts page (resource versions, bookmarks, chunked lists) and KEP-3157
(streaming lists). The third level, for ever, is the Reflector.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from rulecast_server.kube.client import ApiClient
from rulecast_server.kube.decode import (
    BadObject,
    Bookmark,
    Codec,
    Gone,
    Key,
    MalformedError,
    Seen,
    ServerStatus,
    WatchItem,
    decode_status,
)
from rulecast_server.kube.selectors import Resource
from rulecast_server.kube.status import ResourceStatus


class WatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds."""

    inactivity: float = 90.0
    """A list or watch without a byte for so long is dead. API servers send a bookmark about each minute."""
    watch_seconds: tuple[float, float] = (300.0, 600.0)
    """A watch is asked to end after a random time between these, so that load spreads over API servers."""
    page_size: int = 500
    batch: int = 500
    """Events handed over before other tasks get their turn."""
    backoff: tuple[float, float] = (0.5, 30.0)
    """First and longest wait after failures; each is drawn between half of it and all."""
    optional_retry: float = 600.0
    """Until a resource that the server does not have is tried again."""
    streaming_lists: bool = True
    too_large_tries: int = 2
    """How often a server that is behind is waited for, before a consistent list is made."""


class ApiError(Exception):
    """The server answered with an error."""

    def __init__(self, status: ServerStatus) -> None:
        super().__init__(f"{status.code} {status.reason} {status.message}".strip())
        self.status = status

    @property
    def expired(self) -> bool:
        """The version or the continue token is too old."""
        return self.status.code == 410 or self.status.reason in ("Expired", "Gone")

    @property
    def too_large(self) -> bool:
        """The server has not reached the version yet, or never will (kubernetes/kubernetes#91073)."""
        return (
            "ResourceVersionTooLarge" in self.status.causes
            or "Too large resource version" in self.status.message
        )


class SilentError(Exception):
    """No byte for the whole inactivity timeout."""


class CutError(Exception):
    """The connection ended in the middle of a line, or at once."""


class InitialEventsError(Exception):
    """A streamed list did not come to its end; the server may not really have the feature."""


class RewoundError(Exception):
    """The server is at a version before ours."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """All objects at one version."""

    seen: list[Seen]
    bad: list[BadObject]
    version: int
    consistent: bool
    """Asked for without a resourceVersion, so answered from the database and not from a cache."""

    @property
    def unreadable(self) -> list[Key]:
        """Keys of the bad objects."""
        return [item.key for item in self.bad]


class LineSplitter:
    """Cuts a byte stream into lines of any length, in linear time."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    @property
    def pending(self) -> bool:
        """Part of a line is waiting for its end."""
        return any(not part.isspace() for part in self._parts)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take bytes, return the lines that they complete; blank ones are left out."""
        *lines, tail = chunk.split(b"\n")
        if lines:
            if self._parts:
                lines[0] = b"".join([*self._parts, lines[0]])
                self._parts = []
            lines = [line for line in lines if line and not line.isspace()]
        if tail:
            self._parts.append(tail)
        return lines


class ListWatch:
    """The calls for one resource. What it learns of the server (`streaming`, `field_selector`) it keeps."""

    def __init__(
        self, *, client: ApiClient, resource: Resource, settings: WatchSettings, status: ResourceStatus
    ) -> None:
        self._client = client
        self._resource = resource
        self._settings = settings
        self._status = status
        self._codec = Codec(resource)
        self.streaming = settings.streaming_lists
        self.field_selector = resource.field_selector

    async def list_then_watch(
        self, *, since: int, floor: int
    ) -> AsyncGenerator[Listing | list[WatchItem], None]:
        """A Listing first, unless `since` is a version to go on from; then what changes, in batches.

        `floor`: the list must not be older than this version; 0 asks for a consistent one. Ends only by
        raising: ApiError, SilentError, CutError, InitialEventsError, RewoundError, MalformedError,
        aiohttp.ClientError or OSError.
        """
        if not since:
            steps = self._streamed(floor) if self.streaming else self._paged(floor)
            async with aclosing(steps):
                async for step in steps:
                    since = step.version if isinstance(step, Listing) else _last_version(step, since)
                    yield step
        while True:
            async with aclosing(self._watch(since)) as batches:
                async for batch in batches:
                    since = _last_version(batch, since)
                    yield batch

    async def _paged(self, floor: int) -> AsyncGenerator[Listing, None]:
        """LIST in pages. A continue token that expired meanwhile means one whole list instead."""
        seen: list[Seen] = []
        bad: list[BadObject] = []
        start = self._selectors()
        if floor:
            start |= {"resourceVersion": str(floor), "resourceVersionMatch": "NotOlderThan"}
        self._status.lists += 1
        limit = {"limit": str(self._settings.page_size)}
        params = start | limit
        while True:
            try:
                body = await self._body(params)
            except ApiError as error:
                if not error.expired or "continue" not in params:
                    raise
                seen, bad, params = [], [], start
                continue
            page = self._codec.page(body)
            seen += page.seen
            bad += page.bad
            if not page.continue_token:
                yield Listing(seen=seen, bad=bad, version=page.version, consistent=not floor)
                return
            # The token fixes the version; the API refuses both together.
            params = self._selectors() | limit | {"continue": page.continue_token}
            await asyncio.sleep(0)

    async def _streamed(self, floor: int) -> AsyncGenerator[Listing | list[WatchItem], None]:
        """A watch that begins with the whole state and goes on (WatchList)."""
        params = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        if floor:
            params["resourceVersion"] = str(floor)
        self._status.lists += 1
        self._status.streamed_lists += 1
        deadline = time.monotonic() + 2 * self._settings.inactivity
        current: dict[Key, Seen | BadObject] | None = {}
        async with aclosing(self._events(params)) as batches:
            try:
                async for batch in batches:
                    if current is None:
                        yield batch
                        continue
                    for index, item in enumerate(batch):
                        if isinstance(item, Seen | BadObject):
                            current[item.key] = item
                        elif isinstance(item, Gone):
                            current.pop(item.key, None)
                        elif isinstance(item, Bookmark) and item.initial_end:
                            yield _listing(current, item.version, consistent=not floor)
                            current = None
                            if batch[index + 1 :]:
                                yield batch[index + 1 :]
                            break
                    await asyncio.sleep(0)
                    if current is not None and time.monotonic() > deadline:
                        raise InitialEventsError("the initial events do not end")
            except SilentError as error:
                if current is None:
                    raise
                raise InitialEventsError(str(error)) from error
        if current is not None:
            raise InitialEventsError("the stream ended before its initial events did")

    async def _watch(self, since: int) -> AsyncGenerator[list[WatchItem], None]:
        """One watch from a version until the server ends it."""
        started = time.monotonic()
        empty = True
        async with aclosing(self._events({"resourceVersion": str(since)})) as batches:
            async for batch in batches:
                empty = False
                for item in batch:
                    if isinstance(item, Bookmark) and 0 < item.version < since:
                        raise RewoundError(f"a bookmark at {item.version}, after {since}")
                since = _last_version(batch, since)
                yield batch
        # Otherwise a server that ends each watch at once would be asked again in a tight loop.
        if empty and time.monotonic() - started < min(1.0, self._settings.watch_seconds[0] / 2):
            raise CutError("the watch ended at once, without an event")

    async def _events(self, params: dict[str, str]) -> AsyncGenerator[list[WatchItem], None]:
        seconds = random.uniform(*self._settings.watch_seconds)  # noqa: S311  (jitter, no secret)
        params = {
            **self._selectors(),
            **params,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        self._status.watches += 1
        splitter = LineSplitter()
        async with aclosing(self._call(params)) as chunks:
            async for chunk in chunks:
                batch: list[WatchItem] = []
                for line in splitter.feed(chunk):
                    item = self._codec.event(line)
                    if isinstance(item, ServerStatus):
                        # What came before the error counts.
                        if batch:
                            yield batch
                        raise ApiError(item)
                    batch.append(item)
                if batch:
                    yield batch
        if splitter.pending:
            raise CutError("the watch ended in the middle of a line")

    async def _body(self, params: dict[str, str]) -> bytes:
        async with aclosing(self._call(params)) as chunks:
            return b"".join([chunk async for chunk in chunks])

    async def _call(self, params: dict[str, str]) -> AsyncGenerator[bytes, None]:
        """One HTTP call: its body in pieces, as they come. Raises ApiError unless the answer is 200."""
        limit = self._settings.inactivity
        request = self._client.get(self._resource.path, params)
        try:
            async with asyncio.timeout(limit):
                response = await request.__aenter__()
        except TimeoutError:
            raise SilentError(f"no answer for {limit:g} s") from None
        try:
            self._status.contact()
            if response.status != 200:
                async with asyncio.timeout(limit):
                    body = await response.content.read(65536)
                status = decode_status(body, response.status)
                raise ApiError(_with_retry_after(status, response.headers.get("Retry-After")))
            self._status.works()
            while True:
                try:
                    async with asyncio.timeout(limit):
                        chunk = await response.content.readany()
                except TimeoutError:
                    raise SilentError(f"no byte for {limit:g} s") from None
                if not chunk:
                    return
                self._status.contact()
                yield chunk
        finally:
            await request.__aexit__(None, None, None)

    def _selectors(self) -> dict[str, str]:
        named = (("labelSelector", self._resource.label_selector), ("fieldSelector", self.field_selector))
        return {name: value for name, value in named if value}


def _listing(current: dict[Key, Seen | BadObject], version: int, *, consistent: bool) -> Listing:
    return Listing(
        seen=[item for item in current.values() if isinstance(item, Seen)],
        bad=[item for item in current.values() if isinstance(item, BadObject)],
        version=version,
        consistent=consistent,
    )


def _last_version(batch: list[WatchItem], since: int) -> int:
    for item in reversed(batch):
        if not isinstance(item, ServerStatus) and item.version:
            return max(item.version, since)
    return since


def _with_retry_after(status: ServerStatus, header: str | None) -> ServerStatus:
    if header and header.isdigit():
        return status._replace(retry_after=float(header))
    return status


__all__ = [
    "ApiError",
    "CutError",
    "InitialEventsError",
    "LineSplitter",
    "ListWatch",
    "Listing",
    "MalformedError",
    "RewoundError",
    "SilentError",
    "WatchSettings",
]
