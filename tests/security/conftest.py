"""A server that asks an apiserver stand-in who comes, and agents with tokens."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest_asyncio

from rulecast.model import FLEET
from rulecast_agent.feed.channels import ChannelSettings, ClientTls
from rulecast_agent.feed.tokens import TokenFile
from rulecast_server.kube.auth import kubeconfig_loader
from rulecast_server.kube.client import ApiClient
from rulecast_server.kube.reviews import Reviews
from rulecast_server.rpc.authorize import Authorizer
from rulecast_server.rpc.limits import Limits
from rulecast_server.rpc.token_authorizer import TokenAuthorizer
from rulecast_server.rpc.tokens import TokenIdentities, TokenSettings
from tests.fakes.apiserver_reviews import ReviewingApiServer
from tests.wire import values
from tests.wire.conftest import Agent, Authority, Server, authority, start_agent, start_server
from tests.wire.test_tls import server_files

__all__ = ["authority", "start_agent", "start_server"]

CONTENTS = {FLEET: {**values.fleet_of(3)}}
NO_LIMITS = Limits()


class Fleet:
    """An apiserver, a server with --agent-auth token, and what agents need to come to it."""

    def __init__(self, api: ReviewingApiServer, server: Server, ca: Path, directory: Path) -> None:
        self.api = api
        self.server = server
        self.ca = ca
        self.directory = directory
        self.identities: TokenIdentities

    @property
    def channel(self) -> ChannelSettings:
        return ChannelSettings(tls=ClientTls(self.ca), connect_backoff=0.2)

    def token_file(self, token: str, name: str = "token") -> TokenFile:
        """A file with a token, as kubelet would write it."""
        path = self.directory / name
        new = path.with_suffix(".new")
        new.write_text(token)
        new.rename(path)
        return TokenFile(path)

    def dial(self) -> grpc.aio.Channel:
        """A channel that trusts the server, and shows nothing."""
        return grpc.aio.secure_channel(
            self.server.address, grpc.ssl_channel_credentials(self.ca.read_bytes())
        )


StartFleet = Callable[..., Awaitable[Fleet]]
StartAgent = Callable[..., Agent]


@pytest_asyncio.fixture
async def start_fleet(
    start_server: Callable[..., Awaitable[Server]], authority: Authority, tmp_path: Path
) -> AsyncIterator[StartFleet]:
    """Starts an apiserver and a server of it; options are those of TokenSettings."""
    clients: list[ApiClient] = []
    servers: list[ReviewingApiServer] = []

    async def start(*, limits: Limits = NO_LIMITS, **settings: float) -> Fleet:
        api = ReviewingApiServer()
        await api.start()
        servers.append(api)
        config = tmp_path / "kubeconfig"
        config.write_text(KUBECONFIG % api.url)
        client = await ApiClient.connect(kubeconfig_loader(config))
        clients.append(client)
        reviews = Reviews(client, timeout=10.0)
        identities = TokenIdentities(reviews, TokenSettings(**settings))
        authorizer: Authorizer = TokenAuthorizer(identities, reviews, accounts=["rulecast/rulecast-agent"])
        files = server_files(authority, tmp_path)._replace(client_ca=None)
        server = await start_server(contents=CONTENTS, tls=files, authorizer=authorizer, limits=limits)
        fleet = Fleet(api, server, authority.cert, tmp_path)
        fleet.identities = identities
        return fleet

    yield start
    for client in clients:
        await client.close()
    for server in servers:
        await server.stop()


KUBECONFIG = """
current-context: it
contexts: [{name: it, context: {cluster: it, user: it}}]
clusters: [{name: it, cluster: {server: "%s"}}]
users: [{name: it, user: {token: the-servers-own}}]
"""
