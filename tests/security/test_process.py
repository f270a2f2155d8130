"""The server as a process: its flags mean what they say, and its output tells no secret."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
import pytest_asyncio

from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from tests.fakes.apiserver_reviews import ReviewingApiServer
from tests.security.conftest import KUBECONFIG
from tests.wire.conftest import Authority
from tests.wire.test_rpc import hello, read_step
from tests.wire.test_tls import client, server_files

pytestmark = pytest.mark.asyncio
Code = grpc.StatusCode
VIEWER = "system:serviceaccount:rulecast:viewer"


class Process:
    """`rulecast server` on free ports."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.log = ""
        self.ports = (0, 0)

    @classmethod
    async def start(cls, *flags: str) -> "Process":
        command = [sys.executable, "-m", "rulecast.cli", "server", *flags, "--log-level", "debug"]
        command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        started = cls(
            await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
        )
        await started.until(r"synced: ")
        found = await started.until(r"gRPC on port (\d+), HTTP on port (\d+)")
        started.ports = (int(found[1]), int(found[2]))
        return started

    async def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line."""
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            while (found := re.search(pattern, self.log)) is None:
                line = await self._process.stdout.readline()
                assert line, self.log
                self.log += line.decode()
        return found

    async def get(self, path: str) -> str:
        url = f"http://127.0.0.1:{self.ports[1]}{path}"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return await answer.text()

    async def stop(self) -> int:
        self._process.terminate()
        rest, _ = await self._process.communicate()
        self.log += rest.decode()
        assert self._process.returncode is not None
        return self._process.returncode


@pytest_asyncio.fixture
async def api() -> AsyncIterator[ReviewingApiServer]:
    async with ReviewingApiServer() as api:
        api.put({"kind": "Node", "metadata": {"name": "n1"}})
        yield api


@pytest.fixture
def kubeconfig(api: ReviewingApiServer, tmp_path: Path) -> str:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG % api.url)
    return str(path)


async def watch(channel: grpc.aio.Channel, token: str = "") -> Code:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    call = rules_pb2_grpc.RulesStub(channel).Watch(metadata=metadata)
    try:
        await call.write(hello("n1"))
        await read_step(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return Code.OK


async def list_nodes(channel: grpc.aio.Channel, token: str = "") -> Code:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    return await rules_pb2_grpc.NodesStub(channel).List(pb.ListNodesRequest(), metadata=metadata).code()


async def test_agent_auth_token(
    api: ReviewingApiServer, kubeconfig: str, authority: Authority, tmp_path: Path
) -> None:
    files = server_files(authority, tmp_path)
    server = await Process.start(
        *("--kubeconfig", kubeconfig, "--tls-cert", str(files.cert), "--tls-key", str(files.key)),
        *("--agent-auth", "token", "--token-audience", "ours", "--agent-service-account", "net/proxy"),
    )
    api.allowed = {(VIEWER, "/rulecast.v1.Nodes/*")}
    agent = api.issue("net/proxy", node="n1", audience="ours")
    viewer = api.issue("rulecast/viewer", audience="ours")
    others = [
        api.issue("rulecast/rulecast-agent", node="n1", audience="ours"),
        api.issue("net/proxy", node="n1"),
    ]
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.ports[0]}", credentials) as channel:
        assert await watch(channel, agent) is Code.OK
        assert await list_nodes(channel, viewer) is Code.OK
        assert [await watch(channel, token) for token in (*others, viewer, "")] == [
            Code.PERMISSION_DENIED,
            Code.UNAUTHENTICATED,
            Code.PERMISSION_DENIED,
            Code.UNAUTHENTICATED,
        ]
        assert await list_nodes(channel, agent) is Code.PERMISSION_DENIED
        api.out_of_order = True
        assert await watch(channel, "not-a-known-token") is Code.UNAVAILABLE
    problems = json.loads(await server.get("/healthz"))["problems"]
    assert any("tokens cannot be reviewed" in problem for problem in problems)
    metrics = await server.get("/metrics")
    assert "rulecast_server_insecure 0.0" in metrics
    assert 'rulecast_server_token_reviews_total{result="failed"} 1.0' in metrics
    assert await server.stop() == 0
    for secret in (agent, viewer, *others, "the-servers-own", "not-a-known-token"):
        assert secret not in server.log + metrics + str(problems)


async def test_agent_auth_cert(kubeconfig: str, authority: Authority, tmp_path: Path) -> None:
    files = server_files(authority, tmp_path)
    server = await Process.start(
        *("--kubeconfig", kubeconfig, "--tls-cert", str(files.cert), "--tls-key", str(files.key)),
        *("--client-ca", str(files.client_ca), "--inspect-group", "ops"),
    )
    for name, node, inspect in (
        ("system:node:n1", Code.OK, Code.PERMISSION_DENIED),
        ("ann/O=ops", Code.PERMISSION_DENIED, Code.OK),
        ("ann/O=rulecast:inspectors", Code.PERMISSION_DENIED, Code.PERMISSION_DENIED),
    ):
        tls = client(authority, name).tls
        credentials = grpc.ssl_channel_credentials(*(tls[index].read_bytes() for index in (0, 2, 1)))
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.ports[0]}", credentials) as channel:
            assert (await watch(channel), await list_nodes(channel)) == (node, inspect)
    assert await server.stop() == 0
    assert "--insecure" not in server.log


async def test_insecure_is_said_loudly(kubeconfig: str) -> None:
    server = await Process.start("--kubeconfig", kubeconfig, "--insecure")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.ports[0]}") as channel:
        assert (await watch(channel), await list_nodes(channel)) == (Code.OK, Code.OK)
    assert "rulecast_server_insecure 1.0" in await server.get("/metrics")
    assert await server.stop() == 0
    assert re.search(r"warning.*--insecure: plain text on .*; anyone may ask for any node", server.log)
