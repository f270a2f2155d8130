"""The agent's HTTP port: /healthz, /livez, /readyz, /metrics and /proxyMode.

/healthz and /livez are kube-proxy's (KEP-3836): 200 or 503, and a JSON body of lastUpdated, currentTime and,
for /healthz, nodeEligible. /healthz adds `reasons` and `feed`, which load balancers do not read. A lost
server changes no status code; see `status.ProxyHealth`.
"""

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from aiohttp import web

from rulecast.flags import HostPort
from rulecast.http import HttpListener, render_metrics
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
        self._health = health
        self._metrics = metrics
        self._feed_status = feed_status
        self._mode = mode
        self._listener = HttpListener(
            listen=listen,
            handlers={
                "/healthz": self._healthz,
                "/livez": self._livez,
                "/readyz": self._readyz,
                "/metrics": self._render_metrics,
                "/proxyMode": self._proxy_mode,
            },
        )
        self.start = self._listener.start
        self.stop = self._listener.stop

    @property
    def port(self) -> int:
        """The port that is really bound; differs from the asked one only when that was 0."""
        return self._listener.port

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
        return await render_metrics(self._metrics.registry)

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
