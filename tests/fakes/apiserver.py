"""An API server stand-in: lists, watches and writes of what a service proxy needs, and faults on demand.

In a test: `async with FakeApiServer() as api: api.put(service); ... api.url`. As a process:
`python -m tests.fakes.serve --port 8001`. Plain HTTP on loopback; no discovery, no defaulting,
no validation beyond what a list or watch client can tell.
"""

import asyncio
import base64
import contextlib
import json
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator

from aiohttp import web

from tests.fakes.apiserver_refusals import Refusal, gone, too_large
from tests.fakes.apiserver_state import (
    PLURALS,
    Change,
    Expired,
    Object,
    State,
    Stored,
    Test,
    key_of,
    line,
    merge_patch,
    selector,
    watch_event,
)


class FakeApiServer:
    """One API server. Attributes are switches that may be set at any time; methods act at once."""

    def __init__(self, *, version: int = 100, bookmark_interval: float = 60.0) -> None:
        self.state = State(version)
        self.bookmark_interval = bookmark_interval
        self.watch_list = True
        """False: sendInitialEvents is answered with 422, as without the feature gate."""
        self.initial_end = True
        """False: streamed lists never get their end mark (kubernetes/kubernetes#122805)."""
        self.gone_as_event = True
        """A watch from a compacted version: 200 and an ERROR event; False: HTTP 410."""
        self.refuse_field_selector = False
        self.disabled: set[str] = set()
        """Plurals that are answered with 404."""
        self.stalled: set[str] = set()
        """Plurals whose watches are accepted and stay silent; open ones fall silent."""
        self.lagging_at: int | None = None
        """Answer from a cache that stands at this version; only consistent lists see what is newer."""
        self.lagging_consistent = False
        """... and not even those: a proxy that answers from an old copy."""
        self.token: str | None = None
        """The only bearer token that is accepted; None: everybody."""
        self.split = 0
        """Write watch bytes in pieces of so many; 0: whole lines."""
        self.expire_continue = 0
        """So many continue tokens are answered with 410."""
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Plural (or path) and query of each GET, in order."""
        self.counters: Counter[str] = Counter()
        """`list PLURAL` (pages count once), `watch PLURAL`, `page PLURAL`, `refused CODE`, `raw PLURAL`."""
        self.port = 0
        self._scheme = "http"
        self._scripted: list[tuple[str, str, Refusal]] = []
        self._wake = asyncio.Event()
        self._open: list[tuple[str, web.Request]] = []
        self._corrupt: dict[str, list[bytes]] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    # Writing

    def put(self, *items: Object) -> None:
        """Create or replace objects."""
        for item in items:
            self.state.put(item)
        self._notify()

    def delete(self, item: Object) -> None:
        """Delete an object by its kind, namespace and name."""
        plural = next(plural for plural, (_, kind, _) in PLURALS.items() if kind == item["kind"])
        self.state.delete(plural, *key_of(item))
        self._notify()

    def compact(self) -> None:
        """Forget the history, so that watches from the past are told 410."""
        self.state.compact()

    def restore(self, backup: State) -> None:
        """Go back to `state.backup()`, version and all, and cut every connection."""
        self.state = backup
        self.cut()

    # Faults

    def refuse(self, what: str, plural: str, *refusals: Refusal) -> None:
        """Answer the next requests of a kind (`list` or `watch`) for a plural with these, one each."""
        self._scripted += [(what, plural, refusal) for refusal in refusals]

    def send_line(self, plural: str, content: bytes) -> None:
        """Write raw bytes into every open watch of a plural, before its next event."""
        self._corrupt.setdefault(plural, []).append(content)
        self._notify()

    def cut(self, plural: str | None = None) -> None:
        """Abort open watches (of one plural) without an end."""
        for name, request in list(self._open):
            if plural in (None, name) and request.transport is not None:
                request.transport.abort()

    def watching(self, plural: str) -> int:
        """How many watches of a plural are open."""
        return sum(name == plural for name, _ in self._open)

    # Serving

    async def start(self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """Listen; `port` 0 takes a free one."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # Watches do not end by themselves; do not wait for them at the end.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        self._scheme = "https" if tls else "http"
        self.port = self._runner.addresses[0][1]

    async def listen(self, *listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve on more sockets, of other network namespaces; `start` came first."""
        assert self._runner is not None
        for each in listening:
            await web.SockSite(self._runner, each, ssl_context=tls).start()

    async def stop(self) -> None:
        """Close the port and every connection; `start` may follow."""
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> "FakeApiServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _notify(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Refusal as refusal:
            self.counters[f"refused {refusal.code}"] += 1
            headers = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after is not None else {}
            return web.json_response(refusal.status, status=refusal.code, headers=headers)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise Refusal(401, "Unauthorized", "Unauthorized")
        parts = request.path.strip("/").split("/")
        root = 2 if parts[0] == "api" else 3
        rest = parts[root:]
        namespace = ""
        if len(rest) >= 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        if parts[0] not in ("api", "apis") or not rest or rest[0] not in PLURALS:
            if request.path in ("/version", "/healthz", "/readyz", "/livez"):
                return web.json_response({"major": "1", "minor": "37", "gitVersion": "v1.37.2"})
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        plural = rest[0]
        if plural in self.disabled:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        if request.method != "GET":
            return await self._write(request, plural, namespace, rest[1:])
        if len(rest) > 1:
            found = self.state.objects[plural].get((namespace, rest[1]))
            if found is None:
                raise Refusal(404, "NotFound", f'{plural} "{rest[1]}" not found')
            return web.Response(body=found.json, content_type="application/json")
        query = dict(request.query)
        self.requests.append((plural, query))
        what = "watch" if query.get("watch") in ("true", "1") else "list"
        for index, (kind, name, refusal) in enumerate(self._scripted):
            if (kind, name) == (what, plural):
                del self._scripted[index]
                raise refusal
        if self.refuse_field_selector and "spec.clusterIP" in query.get("fieldSelector", ""):
            raise Refusal(400, "BadRequest", 'field label not supported: "spec.clusterIP"')
        try:
            chosen = selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        except ValueError as error:
            raise Refusal(400, "BadRequest", str(error)) from None

        def fits(item: Object) -> bool:
            return (not namespace or item["metadata"].get("namespace") == namespace) and chosen(item)

        if what == "list":
            return self._list(plural, query, fits)
        return await self._watch(request, plural, query, fits)

    def _list(self, plural: str, query: dict[str, str], fits: Test) -> web.Response:
        limit = int(query.get("limit") or 0)
        start = 0
        token = query.get("continue")
        if token:
            version, start = json.loads(base64.urlsafe_b64decode(token))
            if self.expire_continue:
                self.expire_continue -= 1
                raise gone("The provided continue parameter is too old to display a consistent list result.")
        else:
            self.counters[f"list {plural}"] += 1
            version = self._view(query)
        self.counters[f"page {plural}"] += 1
        try:
            everything = self.state.snapshot(plural, version) if limit else self.state.at(plural, version)
        except Expired:
            raise gone() from None
        chosen = [stored for stored in everything if fits(stored.object)]
        page = chosen[start : start + limit] if limit else chosen
        meta: Object = {"resourceVersion": str(version)}
        if limit and start + limit < len(chosen):
            left = json.dumps([version, start + limit]).encode()
            meta |= {
                "continue": base64.urlsafe_b64encode(left).decode(),
                "remainingItemCount": len(chosen) - start - limit,
            }
        api, kind, _ = PLURALS[plural]
        head = json.dumps({"kind": f"{kind}List", "apiVersion": api, "metadata": meta}).encode()
        body = b"".join([head[:-1], b',"items":[', b",".join(stored.json for stored in page), b"]}"])
        return web.Response(body=body, content_type="application/json")

    def _view(self, query: dict[str, str]) -> int:
        """The version at which to answer a list or a streamed one; refuses what the cache has not reached."""
        asked = query.get("resourceVersion") or ""
        cached = self.state.version if self.lagging_at is None else self.lagging_at
        if not asked:
            return cached if self.lagging_consistent else self.state.version
        if int(asked) > cached:
            raise too_large(int(asked), cached)
        return cached

    async def _watch(
        self, request: web.Request, plural: str, query: dict[str, str], fits: Test
    ) -> web.StreamResponse:
        initial: list[Stored] = []
        streamed = query.get("sendInitialEvents") == "true"
        if streamed:
            if not self.watch_list:
                message = "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the "
                raise Refusal(422, "Invalid", message + "WatchList feature gate is enabled")
            if query.get("resourceVersionMatch") != "NotOlderThan":
                message = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
                raise Refusal(422, "Invalid", message)
            position = self._view(query)
            initial = [stored for stored in self.state.at(plural, position) if fits(stored.object)]
            self.counters[f"list {plural}"] += 1
        elif query.get("resourceVersion") in (None, "", "0"):
            position = self._view({})
            initial = [stored for stored in self.state.at(plural, position) if fits(stored.object)]
        else:
            position = int(query["resourceVersion"])
            if position < self.state.compacted and not self.gone_as_event:
                raise gone(f"too old resource version: {position} ({self.state.compacted})")
        self.counters[f"watch {plural}"] += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        entry = (plural, request)
        self._open.append(entry)
        try:
            content = b"".join(line("ADDED", stored.json) for stored in initial)
            if streamed and self.initial_end:
                content += self._bookmark(plural, position, end=True)
            await self._send(response, plural, content)
            until = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
            marks = query.get("allowWatchBookmarks") in ("true", "1")
            async for piece in self._follow(plural, position, fits, until, marks=marks):
                await self._send(response, plural, piece)
            await response.write_eof()
        except ConnectionResetError:
            pass
        finally:
            self._open.remove(entry)
        return response

    async def _follow(
        self, plural: str, position: int, fits: Test, until: float, *, marks: bool
    ) -> AsyncIterator[bytes]:
        next_mark = time.monotonic() + self.bookmark_interval
        raw_seen = len(self._corrupt.get(plural, ()))
        while True:
            wake = self._wake
            raw = self._corrupt.get(plural, [])[raw_seen:]
            raw_seen += len(raw)
            if raw:
                self.counters[f"raw {plural}"] += len(raw)
            try:
                changes = [] if position > self.state.version else self.state.since(position)
            except Expired:
                refusal = gone(f"too old resource version: {position} ({self.state.compacted})")
                yield line("ERROR", json.dumps(refusal.status).encode())
                return
            visible = [change for change in changes if self._visible(change)]
            if visible:
                position = visible[-1].version
            events = [watch_event(change, fits) for change in visible if change.plural == plural]
            content = b"".join([*raw, *(event for event in events if event is not None)])
            now = time.monotonic()
            if marks and now >= next_mark:
                next_mark = now + self.bookmark_interval
                content += self._bookmark(plural, self._current())
            if content:
                yield content
            if now >= until:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(until, next_mark) - time.monotonic())):
                    await wake.wait()

    def _current(self) -> int:
        return self.state.version if self.lagging_at is None else self.lagging_at

    def _visible(self, change: Change) -> bool:
        return change.version <= self._current()

    def _bookmark(self, plural: str, version: int, *, end: bool = False) -> bytes:
        api, kind, _ = PLURALS[plural]
        meta: Object = {"resourceVersion": str(version), "creationTimestamp": None}
        if end:
            meta["annotations"] = {"k8s.io/initial-events-end": "true"}
        return line("BOOKMARK", json.dumps({"kind": kind, "apiVersion": api, "metadata": meta}).encode())

    async def _send(self, response: web.StreamResponse, plural: str, content: bytes) -> None:
        if plural in self.stalled:
            # Silent until the connection is cut.
            await asyncio.sleep(3600)
        size = self.split or len(content) or 1
        for start in range(0, len(content), size):
            await response.write(content[start : start + size])

    async def _write(
        self, request: web.Request, plural: str, namespace: str, rest: list[str]
    ) -> web.StreamResponse:
        if request.method == "DELETE":
            deleted = self.state.delete(plural, namespace, rest[0])
            if deleted is None:
                raise Refusal(404, "NotFound", f'{plural} "{rest[0]}" not found')
            self._notify()
            return web.json_response(deleted)
        try:
            item = json.loads(await request.read())
        except ValueError:
            raise Refusal(400, "BadRequest", "the body is not JSON") from None
        item.setdefault("kind", PLURALS[plural][1])
        if plural == "events":
            return web.json_response(item, status=201)
        meta = item.setdefault("metadata", {})
        if PLURALS[plural][2] and namespace:
            meta.setdefault("namespace", namespace)
        if rest:
            meta.setdefault("name", rest[0])
        held = self.state.objects[plural].get(key_of(item))
        if request.method == "POST" and held is not None:
            raise Refusal(409, "AlreadyExists", f'{plural} "{meta["name"]}" already exists')
        if request.method in ("PUT", "PATCH") and held is None:
            raise Refusal(404, "NotFound", f'{plural} "{meta.get("name")}" not found')
        if request.method == "PATCH":
            assert held is not None
            item = merge_patch(held.object, item)
        elif rest[1:] == ["status"]:
            assert held is not None
            item = held.object | {"status": item.get("status", {})}
        stored = self.state.put(item)
        self._notify()
        return web.Response(
            body=stored.json, content_type="application/json", status=201 if request.method == "POST" else 200
        )
