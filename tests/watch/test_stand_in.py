"""The stand-in itself, where a client could be misled by it: REST writes, statuses, watches by plain HTTP."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.fakes.apiserver import FakeApiServer
from tests.watch.harness import Object, node, service

pytestmark = pytest.mark.asyncio

SERVICES = "/api/v1/namespaces/default/services"


@asynccontextmanager
async def client(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=url) as session:
        yield session


async def ask(http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> tuple[int, Object]:
    async with http.request(method, path, json=body) as response:
        answer = await response.json()
        assert isinstance(answer, dict)
        return response.status, answer


async def test_objects_are_made_changed_and_deleted_over_http() -> None:
    async with FakeApiServer() as api, client(api.url) as http:
        code, made = await ask(http, "POST", SERVICES, service())
        assert (code, made["metadata"]["resourceVersion"]) == (201, "101")
        assert (await ask(http, "POST", SERVICES, service()))[0] == 409
        code, changed = await ask(http, "PUT", f"{SERVICES}/web", service(ip="10.96.0.9"))
        assert (code, changed["metadata"]["uid"]) == (200, made["metadata"]["uid"])
        status = {"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.10"}]}}}
        _, patched = await ask(http, "PATCH", f"{SERVICES}/web/status", status)
        assert patched["spec"] == changed["spec"]
        assert patched["status"] == status["status"]
        code, listed = await ask(http, "GET", "/api/v1/services")
        assert (listed["kind"], listed["apiVersion"], listed["items"]) == ("ServiceList", "v1", [patched])
        assert listed["metadata"]["resourceVersion"] == "103"
        assert (await ask(http, "DELETE", f"{SERVICES}/web"))[0] == 200
        code, missing = await ask(http, "GET", f"{SERVICES}/web")
        assert (code, missing["kind"], missing["reason"]) == (404, "Status", "NotFound")


@pytest.mark.parametrize(
    "path",
    ["/api/v1/namespaces/default/events", "/apis/events.k8s.io/v1/namespaces/default/events"],
)
async def test_events_are_accepted_and_forgotten(path: str) -> None:
    async with FakeApiServer() as api, client(api.url) as http:
        assert (await ask(http, "POST", path, {"metadata": {"name": "e"}}))[0] == 201
        assert api.state.version == 100


async def test_one_node_is_watched_by_its_name() -> None:
    """kube-proxy does."""
    async with FakeApiServer() as api, client(api.url) as http:
        api.put(node("n1"), node("n2"))
        query = {"watch": "true", "fieldSelector": "metadata.name=n2", "resourceVersion": "100"}
        async with http.get("/api/v1/nodes", params={**query, "timeoutSeconds": "1"}) as response:
            api.put(node("n1"))
            api.delete(node("n2"))
            lines = [json.loads(each) async for each in response.content]
        assert [(each["type"], each["object"]["metadata"]["name"]) for each in lines] == [
            ("ADDED", "n2"),
            ("DELETED", "n2"),
        ]
        assert [each["object"]["metadata"]["resourceVersion"] for each in lines] == ["102", "104"]


async def test_it_runs_as_a_process() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.serve", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with client(url) as http:
            assert (await ask(http, "POST", "/api/v1/nodes", node()))[0] == 201
    finally:
        process.terminate()
        await process.wait()
