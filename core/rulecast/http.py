"""The HTTP listener that each daemon has for probes and metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rulecast.errors import UsageError
from rulecast.flags import HostPort

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpListener:
    """Serves GET handlers by path on one address."""

    def __init__(self, *, listen: HostPort, handlers: Mapping[str, Handler]) -> None:
        self._listen = listen
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_get(path, handler)
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


async def render_metrics(registry: CollectorRegistry) -> web.StreamResponse:
    """The registry in Prometheus' text format.

    Rendering takes milliseconds, which streams and probes should not wait for: it runs in a thread.
    """
    body = await asyncio.to_thread(generate_latest, registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
