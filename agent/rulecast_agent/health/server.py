"""The agent's HTTP port: /healthz, /livez, /readyz, /metrics and /proxyMode.

/healthz and /livez are kube-proxy's (KEP-3836): 200 or 503, and a JSON body of lastUpdated, currentTime and,
for /healthz, nodeEligible. /healthz adds `reasons` and `feed`, which load balancers do not read. A lost
server changes no status code; see `status.ProxyHealth`.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rulecast.errors import UsageError
from rulecast.flags import HostPort
from rulecast_agent.feed.base import FeedStatus
from rulecast_agent.metrics import AgentMetrics
from rulecast_agent.status import ProxyHealth

_HEADERS = {"X-Content-Type-Options": "nosniff"}


class HealthServer:
    """Serves one agent's health."""

    def __init__(
        self,
        *,
        listen: HostPort,
        health: ProxyHealth,
        metrics: AgentMetrics,
        feed_status: Callable[[], FeedStatus],
        mode: str,
    ) -> None:
        self._listen = listen
        self._health = health
        self._metrics = metrics
        self._feed_status = feed_status
        self._mode = mode
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._render_metrics)
        app.router.add_get("/proxyMode", self._proxy_mode)
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

    async def _healthz(self, _request: web.Request) -> web.StreamResponse:
        health = self._health.check()
        feed = self._feed_status()
        stale = 0.0 if feed.stale_since is None else max(0.0, health.now - feed.stale_since)
        status = 200 if health.healthy and health.node_eligible else 503
        self._metrics.healthz.labels(str(status)).inc()
        return _json(
            status,
            {
                "lastUpdated": _time(health.last_updated),
                "currentTime": _time(health.now),
                "nodeEligible": health.node_eligible,
                "reasons": health.reasons,
                "feed": {
                    "connected": feed.connected,
                    "server": feed.server,
                    "staleSeconds": round(stale, 1),
                    "fromCheckpoint": feed.from_checkpoint,
                    "lastError": feed.last_error,
                    "problems": feed.problems,
                },
            },
        )

    async def _livez(self, _request: web.Request) -> web.StreamResponse:
        health = self._health.check()
        status = 200 if health.healthy else 503
        self._metrics.livez.labels(str(status)).inc()
        return _json(status, {"lastUpdated": _time(health.last_updated), "currentTime": _time(health.now)})

    async def _readyz(self, _request: web.Request) -> web.StreamResponse:
        problems = list(self._health.problems.values())
        return _json(200 if self._health.ready else 503, {"ready": self._health.ready, "reasons": problems})

    async def _render_metrics(self, _request: web.Request) -> web.StreamResponse:
        self._metrics.feed(self._feed_status())
        # Rendering takes milliseconds, which the feed and the probes should not wait for.
        body = await asyncio.to_thread(generate_latest, self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _proxy_mode(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._mode, headers=_HEADERS)


def _json(status: int, body: object) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(body) + b"\n",
        content_type="application/json",
        headers=_HEADERS,
    )


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
