"""The server's HTTP port: /healthz, /livez, /readyz and /metrics on one listener.

Meanings as in Kubernetes: livez asks whether to restart us, readyz whether to send agents here, healthz tells
everything that is wrong. A lost apiserver is told in healthz but costs neither liveness nor readiness: what
was learned before goes on being served.
"""

import json
from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry

from rulecast.flags import HostPort
from rulecast.http import Handler, HttpListener, render_metrics

Check = Callable[[], Sequence[str]]
"""Answers with what is wrong, a line each; nothing wrong is an empty sequence."""


def http_listener(
    *, listen: HostPort, live: Check, ready: Check, healthy: Check, registry: CollectorRegistry
) -> HttpListener:
    """The probes, and the metrics of one registry."""

    async def metrics(_request: web.Request) -> web.StreamResponse:
        return await render_metrics(registry)

    return HttpListener(
        listen=listen,
        handlers={
            "/livez": _probe(live),
            "/readyz": _probe(ready),
            "/healthz": _probe(healthy),
            "/metrics": metrics,
        },
    )


def _probe(check: Check) -> Handler:
    async def answer(_request: web.Request) -> web.StreamResponse:
        wrong = list(check())
        body = json.dumps({"status": "failing" if wrong else "ok", "problems": wrong}) + "\n"
        return web.Response(status=503 if wrong else 200, text=body, content_type="application/json")

    return answer
