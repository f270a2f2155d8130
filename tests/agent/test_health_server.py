"""The agent's HTTP port, asked over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession

from rulecast.errors import UsageError
from rulecast.flags import HostPort
from rulecast.model import NodeInfo
from rulecast_agent.feed.base import FeedStatus
from rulecast_agent.health.server import HealthServer
from rulecast_agent.metrics import AgentMetrics
from rulecast_agent.status import ProxyHealth
from tests.agent.fakes import ManualClock
from tests.agent.values import NODE

pytestmark = pytest.mark.asyncio
WALL = 1_764_579_600.0
START = 1000.0


class Served:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.health = ProxyHealth(
            node_name="n1", limit=60, clock=self.clock.now, wall=lambda: WALL + self.clock.time - START
        )
        self.metrics = AgentMetrics()
        self.feed = FeedStatus(connected=True, counters={"connects": 3})
        self.server = HealthServer(
            listen=HostPort("127.0.0.1", 0),
            health=self.health,
            metrics=self.metrics,
            feed_status=lambda: self.feed,
            mode="nftables",
        )

    async def get(self, path: str) -> tuple[int, str, ClientResponse]:
        async with (
            ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.server.port}{path}") as response,
        ):
            return response.status, await response.text(), response

    async def json(self, path: str) -> tuple[int, dict[str, Any]]:
        status, text, _ = await self.get(path)
        return status, json.loads(text)


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    s = Served()
    await s.server.start()
    try:
        yield s
    finally:
        await s.server.stop()


async def test_a_healthy_agent_answers_as_kube_proxy_does() -> None:
    async with serving() as s:
        s.health.node(NODE)
        status, text, response = await s.get("/healthz")
        assert status == 200
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        body = json.loads(text)
        assert body["lastUpdated"] == body["currentTime"] == "2025-12-01T09:00:00.000000Z"
        assert body["nodeEligible"] is True
        status, body = await s.json("/livez")
        assert status == 200
        assert body.keys() == {"lastUpdated", "currentTime"}


async def test_an_update_that_waits_too_long_fails_healthz_and_livez() -> None:
    async with serving() as s:
        s.health.node(NODE)
        s.health.queued()
        s.clock.advance(61)
        for path in ("/healthz", "/livez"):
            status, body = await s.json(path)
            assert status == 503
            assert body["lastUpdated"] < body["currentTime"]
        s.health.applied()
        assert [(await s.json(path))[0] for path in ("/healthz", "/livez")] == [200, 200]


@pytest.mark.parametrize("node", [NodeInfo(name="n1", eligible=False), None])
async def test_a_node_that_goes_or_is_unknown_fails_healthz_only(node: NodeInfo | None) -> None:
    async with serving() as s:
        s.health.node(node)
        status, body = await s.json("/healthz")
        assert status == 503
        assert body["nodeEligible"] is False
        assert len(body["reasons"]) == 1
        assert (await s.json("/livez"))[0] == 200


async def test_a_silent_server_is_told_and_keeps_the_node_in_service() -> None:
    async with serving() as s:
        s.health.node(NODE)
        s.feed = FeedStatus(connected=False, stale_since=WALL - 3600, last_error="s:1: refused")
        status, body = await s.json("/healthz")
        assert status == 200
        assert body["feed"]["connected"] is False
        assert body["feed"]["staleSeconds"] == 3600
        assert body["feed"]["lastError"] == "s:1: refused"


async def test_ready_once_the_first_state_is_in_the_kernel() -> None:
    async with serving() as s:
        s.health.problem("dataplane", "nft is missing")
        assert await s.json("/readyz") == (503, {"ready": False, "reasons": ["nft is missing"]})
        s.health.ready = True
        assert (await s.json("/readyz"))[0] == 200


async def test_metrics_have_the_feeds_state_and_the_answers_given() -> None:
    async with serving() as s:
        s.health.node(None)
        await s.get("/healthz")
        await s.get("/livez")
        status, text, _ = await s.get("/metrics")
        assert status == 200
        lines = text.splitlines()
        assert 'kubeproxy_proxy_healthz_total{code="503"} 1.0' in lines
        assert 'kubeproxy_proxy_livez_total{code="200"} 1.0' in lines
        assert "rulecast_agent_feed_connected 1.0" in lines
        assert "rulecast_agent_feed_connects_total 3.0" in lines
        assert "rulecast_agent_feed_staleness_seconds 0.0" in lines


async def test_the_mode_is_told_as_text() -> None:
    async with serving() as s:
        assert (await s.get("/proxyMode"))[1] == "nftables"


async def test_a_port_in_use_is_one_line_that_names_the_flag() -> None:
    async with serving() as s:
        other = Served()
        other.server = HealthServer(
            listen=HostPort("127.0.0.1", s.server.port),
            health=other.health,
            metrics=other.metrics,
            feed_status=FeedStatus,
            mode="nftables",
        )
        with pytest.raises(UsageError, match=f"--http 127.0.0.1:{s.server.port}: .*in use"):
            await other.server.start()
        await asyncio.sleep(0)
