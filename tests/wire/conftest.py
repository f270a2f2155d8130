"""A server on loopback, agents of it, and certificates."""

import asyncio
import contextlib
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from rulecast.flags import HostPort
from rulecast.model import FLEET, ClusterInfo
from rulecast.view import Receipt, ServiceView, Update
from rulecast_agent.feed.base import Feed
from rulecast_agent.feed.channels import ChannelSettings
from rulecast_agent.feed.checkpoint import CheckpointFile
from rulecast_agent.feed.client import ClientSettings, GrpcFeed
from rulecast_agent.feed.persistent import PersistentFeed
from rulecast_agent.feed.session import AgentIdentity, AgentSession
from rulecast_server.feed import DeltaLog, Hub, HubSettings
from rulecast_server.rpc.authorize import Authorizer
from rulecast_server.rpc.credentials import TlsFiles
from rulecast_server.rpc.server import RpcServer, RpcSettings
from tests.wire import values


class Server:
    """One replica and its content."""

    def __init__(
        self,
        *,
        contents: values.Contents | None = None,
        port: int = 0,
        tls: TlsFiles | None = None,
        authorizer: Authorizer | None = None,
        mark_interval: float = 10.0,
        **settings: object,
    ) -> None:
        self.contents: values.Contents = {}
        self.hub = Hub(DeltaLog(), HubSettings(mark_interval=mark_interval))
        self.rpc = RpcServer(
            self.hub,
            RpcSettings(listen=HostPort("127.0.0.1", port), tls=tls, **settings),
            authorizer=authorizer,
        )
        self._first = contents

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc.port}"

    async def start(self) -> "Server":
        await self.rpc.start()
        if self._first is not None:
            self.put({FLEET: {values.CLUSTER: ClusterInfo()}, **self._first})
        return self

    def put(self, assignment) -> None:
        step = values.changes(assignment, self.contents)
        values.apply(self.contents, step)
        self.hub.publish(step)

    def set(self, name: object, *addresses: str) -> None:
        self.put({FLEET: {values.cluster_set(name): values.endpoints(*addresses)}})

    async def kill(self) -> None:
        """End at once, as a crash would look."""
        await self.rpc._server.stop(None)


class Agent:
    """A client that applies every update at once and adds them up."""

    def __init__(
        self,
        *servers: str,
        node: str = "n1",
        channel: ChannelSettings | None = None,
        checkpoint: CheckpointFile | None = None,
        **settings: float,
    ) -> None:
        self.session = AgentSession(AgentIdentity(node_name=node, version="test", mode="nftables"))
        self.feed: Feed = GrpcFeed(
            self.session,
            ClientSettings(
                servers=servers,
                channel=channel or ChannelSettings(connect_backoff=0.2),
                **{"retry_initial": 0.02, "retry_maximum": 0.1, **settings},
            ),
        )
        if checkpoint is not None:
            self.feed = PersistentFeed(self.feed, self.session, checkpoint, interval=0.05)
        self.views: dict[str, ServiceView] = {}
        self.updates: list[Update] = []
        self.task = asyncio.create_task(self.feed.run(self._take))

    def _take(self, update: Update) -> None:
        self.updates.append(update)
        if update.full:
            assert not self.views
        for key, view in update.services.items():
            if view is None:
                del self.views[key]
            else:
                self.views[key] = view
        self.feed.ack(Receipt(revision=update.revision, seconds=0.003))

    @property
    def counters(self) -> Counter[str]:
        return Counter(self.feed.status.counters)

    def holds(self, server: Server) -> bool:
        return self.feed.status.connected and self.views == values.node_view(server.contents, "n1")

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


Start = Callable[..., "asyncio.Future"]


@pytest_asyncio.fixture
async def start_server() -> AsyncIterator[Callable]:
    """Starts servers, and stops them in the end."""
    servers: list[Server] = []

    async def start(**options: object) -> Server:
        server = await Server(**options).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.rpc.stop(grace=0.0)
        # Streams and their readers end with the server.
        for _ in range(200):
            if not server.hub.streams and not server.rpc.service.readers:
                break
            await asyncio.sleep(0.005)
        assert not server.hub.streams
        assert not server.rpc.service.readers


@pytest_asyncio.fixture
async def start_agent() -> AsyncIterator[Callable]:
    """Starts agents, and stops them in the end."""
    agents: list[Agent] = []

    def start(*servers: str, **options: object) -> Agent:
        agents.append(Agent(*servers, **options))
        return agents[-1]

    yield start
    for agent in agents:
        await agent.stop()


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.cert = directory / f"{name}.crt"
        self._key = directory / f"{name}.key"
        self._openssl(
            "req",
            "-x509",
            *_KEY,
            "-keyout",
            self._key,
            "-out",
            self.cert,
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
        )

    def issue(self, name: str, cn: str, *names: str, days: int = 2) -> tuple[Path, Path]:
        """A certificate and its key; `names` as in subjectAltName: `DNS:a`, `IP:127.0.0.1`."""
        cert, key, request, extensions = (
            self.directory / f"{name}.{suffix}" for suffix in ("crt", "key", "csr", "ext")
        )
        self._openssl("req", "-new", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={cn}")
        extensions.write_text(f"subjectAltName={','.join(names)}\n" if names else "")
        self._openssl(
            "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-out", cert,
            "-days", str(days), "-extfile", extensions,
        )  # fmt: skip
        return cert, key

    @staticmethod
    def _openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ca")
