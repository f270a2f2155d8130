"""The server's HTTP port: /healthz, /livez, /readyz and /metrics on one listener.

Meanings as in Kubernetes: livez asks whether to restart us, readyz whether to send agents here, healthz tells
everything that is wrong. A lost apiserver is told in healthz but costs neither liveness nor readiness: what
was learned before goes on being served.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rulecast.errors import UsageError
from rulecast.flags import HostPort

Check = Callable[[], Sequence[str]]
"""Answers with what is wrong, a line each; nothing wrong is an empty sequence."""


def _probe(check: Check) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_request: web.Request) -> web.StreamResponse:
        wrong = list(check())
        body = json.dumps({"status": "failing" if wrong else "ok", "problems": wrong}) + "\n"
        return web.Response(status=503 if wrong else 200, text=body, content_type="application/json")

    return answer


class HttpServer:
    """Serves the probes and the metrics of one registry."""

    def __init__(
        self, *, listen: HostPort, live: Check, ready: Check, healthy: Check, registry: CollectorRegistry
    ) -> None:
        self._listen = listen
        self._registry = registry
        app = web.Application()
        for path, check in (("/livez", live), ("/readyz", ready), ("/healthz", healthy)):
            app.router.add_get(path, _probe(check))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        self.port = listen.port
        """The port that is really bound; differs from the asked one only when that was 0."""

    async def start(self) -> None:
        """Bind and serve. Raises UsageError when the address cannot be bound."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._listen.host, self._listen.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise UsageError(f"--http {self._listen}: {error.strerror or error}") from None
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        # Rendering thousands of series blocks for milliseconds; the loop has streams to feed.
        body = await asyncio.to_thread(generate_latest, self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
