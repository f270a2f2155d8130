"""How an agent finds its servers: from the API server, else from disk, and never through a Service or DNS."""

import json
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from rulecast.flags import HostPort
from rulecast.model import FLEET
from rulecast_agent.feed.channels import ChannelSettings
from rulecast_agent.feed.discovery import AddressFile, Discovery
from rulecast_agent.feed.slices import ApiServers, LookupFailedError, SliceLookup, addresses_in
from rulecast_server.rpc.credentials import TlsFiles
from tests.fakes.apiserver import FakeApiServer
from tests.fakes.apiserver_refusals import Refusal
from tests.wire import values
from tests.wire.conftest import Authority, Server
from tests.wire.test_tls import client
from tests.wire.waiting import eventually

SERVICE = "rulecast/rulecast-server"
NAME = "rulecast-server.rulecast.svc"
TOKEN = "secret-of-the-agent"
CONTENTS = {FLEET: {**values.fleet_of(3)}}


def endpoint_slice(*addresses: str, name: str = "a", ready: bool | None = True, **more: object) -> dict:
    """A slice whose endpoints are all at one port."""
    port = addresses[0].rpartition(":")[2]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"rulecast-server-{name}",
            "namespace": "rulecast",
            "labels": {"kubernetes.io/service-name": "rulecast-server"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "metrics", "port": 9440}, {"name": "grpc", "port": int(port), "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [address.rpartition(":")[0].strip("[]")], "conditions": {"ready": ready}}
            for address in addresses
        ],
    } | more


def listed(*slices: dict) -> list[str]:
    return [str(each) for each in addresses_in(json.dumps({"items": slices}).encode())]


def test_addresses_are_those_of_ready_endpoints_at_the_port_named_grpc() -> None:
    unready = endpoint_slice("10.0.0.3:9443", ready=False)
    assert listed(endpoint_slice("10.0.0.1:9443", "10.0.0.2:9443"), unready) == [
        "10.0.0.1:9443",
        "10.0.0.2:9443",
    ]
    assert listed(endpoint_slice("[fd00::1]:9443"), endpoint_slice("10.0.0.1:443", ready=None)) == [
        "[fd00::1]:9443",
        "10.0.0.1:443",
    ]


def test_with_none_ready_all_are_tried() -> None:
    assert listed(endpoint_slice("10.0.0.3:9443", ready=False)) == ["10.0.0.3:9443"]


@pytest.mark.parametrize(
    ("ports", "found"),
    [
        ([{"name": "whatever", "port": 7}], ["10.0.0.1:7"]),
        ([{"name": "grpc", "port": 7, "protocol": "UDP"}], []),
        ([{"name": "a", "port": 7}, {"name": "b", "port": 8}], []),
        ([{"name": "grpc"}], []),
        ([{"name": "grpc", "port": 70000}], []),
        ([], []),
        (None, []),
    ],
)
def test_the_port_is_the_one_named_grpc_or_the_only_one(ports: object, found: list[str]) -> None:
    assert listed(endpoint_slice("10.0.0.1:1", ports=ports)) == found


@pytest.mark.parametrize(
    "endpoints", [None, [], [{}], [{"addresses": None}], [{"addresses": ["host.example"]}]]
)
def test_slices_without_addresses_give_none(endpoints: object) -> None:
    assert listed(endpoint_slice("10.0.0.1:1", endpoints=endpoints)) == []


class Lookup:
    """Answers what it is told to."""

    def __init__(self, *servers: str) -> None:
        self.servers: Sequence[str] = servers
        self.error = ""

    async def __call__(self) -> list[HostPort]:
        if self.error:
            raise LookupFailedError(self.error)
        return [
            HostPort(host, int(port)) for host, _, port in (each.rpartition(":") for each in self.servers)
        ]


@pytest.mark.asyncio
async def test_what_was_found_last_is_used_while_nobody_can_be_asked(tmp_path: Path) -> None:
    lookup = Lookup("10.0.0.1:9443", "10.0.0.2:9443")
    first = Discovery(lookup, AddressFile(tmp_path / "state", SERVICE), pause=0)
    assert await first.servers() == ["10.0.0.1:9443", "10.0.0.2:9443"]
    lookup.servers = ["10.0.0.3:9443"]
    assert await first.servers() == ["10.0.0.3:9443"]
    lookup.error = "down"
    assert await first.servers() == ["10.0.0.3:9443"]
    assert "down" in first.problem
    restarted = Discovery(lookup, AddressFile(tmp_path / "state", SERVICE), pause=0)
    assert await restarted.servers() == ["10.0.0.3:9443"]
    lookup.error = ""
    assert await restarted.servers() == ["10.0.0.3:9443"]
    assert restarted.problem == ""
    assert (restarted.lookups, restarted.failures) == (2, 1)


@pytest.mark.asyncio
async def test_others_are_not_asked_more_often_than_each_pause(tmp_path: Path) -> None:
    now = [0.0]
    discovery = Discovery(Lookup("10.0.0.1:9443"), pause=5.0, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 4.9, 5.0, 9.9):
        assert await discovery.servers() == ["10.0.0.1:9443"]
    assert discovery.lookups == 2


@pytest.mark.asyncio
async def test_the_file_is_written_only_when_the_servers_change(tmp_path: Path) -> None:
    file = AddressFile(tmp_path, SERVICE)
    lookup = Lookup("10.0.0.1:9443", "10.0.0.2:9443")
    discovery = Discovery(lookup, file, pause=0)
    await discovery.servers()
    written = file.path.stat()
    lookup.servers = ["10.0.0.2:9443", "10.0.0.1:9443"]
    await discovery.servers()
    assert file.path.stat().st_ino == written.st_ino
    lookup.servers = ["10.0.0.2:9443"]
    await discovery.servers()
    assert file.load() == [HostPort("10.0.0.2", 9443)]


@pytest.mark.asyncio
async def test_a_disk_that_takes_nothing_is_told_and_keeps_nobody_from_the_servers(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    discovery = Discovery(Lookup("10.0.0.1:9443"), AddressFile(tmp_path / "file" / "dir", SERVICE), pause=0)
    assert await discovery.servers() == ["10.0.0.1:9443"]
    assert "not kept" in discovery.problem
    assert await discovery.servers() == ["10.0.0.1:9443"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00garbage",
        b"[]",
        b'{"service": "rulecast/rulecast-server", "servers": []}',
        b'{"service": "rulecast/rulecast-server", "servers": [["server.example", 9443]]}',
        b'{"service": "rulecast/rulecast-server", "servers": [["10.0.0.1", 99999]]}',
        b'{"service": "rulecast/rulecast-server", "servers": [["10.0.0.1"]]}',
        b'{"service": "other/rulecast-server", "servers": [["10.0.0.1", 9443]]}',
        b'{"service": "rulecast/rulecast-server", "servers": [["10.0.0.1", 9443]]}'[:-9],
    ],
)
async def test_garbage_on_disk_is_one_line_and_not_used(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = AddressFile(tmp_path, SERVICE)
    file.path.write_bytes(content)
    lookup = Lookup("10.0.0.1:9443")
    lookup.error = "down"
    discovery = Discovery(lookup, file, pause=0)
    assert await discovery.servers() == []
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 1
    assert str(file.path) in errors[0]
    assert "\n" not in errors[0]
    lookup.error = ""
    assert await discovery.servers() == ["10.0.0.1:9443"]
    assert file.load() == [HostPort("10.0.0.1", 9443)]


class Place:
    """An API server with TLS, a ServiceAccount's files, and a state directory."""

    def __init__(self, api: FakeApiServer, directory: Path, authority: Authority) -> None:
        self.api, self.directory, self.authority = api, directory, authority
        self.file = AddressFile(directory / "state", SERVICE)

    def lookup(self, *more: HostPort, patience: float = 5.0) -> SliceLookup:
        servers = [*more, HostPort("127.0.0.1", self.api.port)]
        api = ApiServers(servers, self.directory)
        return SliceLookup(api, "rulecast", "rulecast-server", patience=patience)

    def discovery(self) -> Discovery:
        return Discovery(self.lookup(), self.file, pause=0.05)

    def publish(self, *servers: Server) -> None:
        """The EndpointSlices name these servers and no others."""
        wanted = [endpoint_slice(each.address, name=str(each.rpc.port)) for each in servers]
        held = [each.object for each in self.api.state.objects["endpointslices"].values()]
        for each in held:
            self.api.delete(each)
        self.api.put(*wanted)

    def channel(self) -> ChannelSettings:
        return msgspec.structs.replace(client(self.authority, "n1"), server_name=NAME)

    def tls(self, name: str = NAME) -> TlsFiles:
        cert, key = self.authority.issue(f"cert-of-{name}", "rulecast", f"DNS:{name}")
        return TlsFiles(cert, key, self.authority.cert)


@pytest_asyncio.fixture
async def place(tmp_path: Path, authority: Authority) -> AsyncIterator[Place]:
    cert, key = authority.issue("apiserver", "kube-apiserver", "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    shutil.copy(authority.cert, tmp_path / "ca.crt")
    (tmp_path / "token").write_text(TOKEN + "\n")
    api = FakeApiServer()
    api.token = TOKEN
    await api.start(tls=context)
    yield Place(api, tmp_path, authority)
    await api.stop()


@pytest.fixture
def without_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def numbers_only(host: object, *rest: object, **more: object) -> object:
        try:
            return real(host, *rest, **{**more, "flags": socket.AI_NUMERICHOST})  # type: ignore[arg-type]
        except socket.gaierror:
            raise AssertionError(f"{host!r} was looked up") from None

    monkeypatch.setattr(socket, "getaddrinfo", numbers_only)


@pytest.mark.asyncio
@pytest.mark.usefixtures("without_dns")
async def test_a_fresh_node_needs_the_apiservers_address_alone(
    place: Place, start_server, start_agent
) -> None:
    server = await start_server(contents=CONTENTS, tls=place.tls())
    place.publish(server)
    agent = start_agent(channel=place.channel(), discovery=place.discovery())
    await eventually(lambda: agent.holds(server))
    assert agent.feed.status.server == server.address
    (asked,) = place.api.requests
    assert asked == (
        "endpointslices",
        {"labelSelector": "kubernetes.io/service-name=rulecast-server", "resourceVersion": "0"},
    )
    assert place.file.load() == [HostPort("127.0.0.1", server.rpc.port)]


@pytest.mark.asyncio
async def test_an_agent_that_comes_before_any_server_waits_for_one(
    place: Place, start_server, start_agent
) -> None:
    agent = start_agent(channel=place.channel(), discovery=place.discovery())
    await eventually(lambda: any("has no endpoints" in each for each in agent.feed.status.problems))
    assert "none is known" in agent.feed.status.last_error
    server = await start_server(contents=CONTENTS, tls=place.tls())
    place.publish(server)
    await eventually(lambda: agent.holds(server))
    assert agent.feed.status.problems == ()


@pytest.mark.asyncio
async def test_servers_that_are_all_replaced_are_found_again(place: Place, start_server, start_agent) -> None:
    old = [await start_server(contents=CONTENTS, tls=place.tls()) for _ in range(2)]
    place.publish(*old)
    agent = start_agent(channel=place.channel(), discovery=place.discovery())
    await eventually(lambda: agent.feed.status.connected)
    new = [await start_server(contents=CONTENTS, tls=place.tls()) for _ in range(2)]
    place.publish(*new)
    for server in old:
        await server.kill()
    await eventually(lambda: any(agent.holds(server) and server.hub.streams for server in new))
    assert agent.feed.status.server in {server.address for server in new}
    assert len(agent.updates) == 1
    assert {each.port for each in place.file.load()} == {server.rpc.port for server in new}


@pytest.mark.asyncio
async def test_a_restarted_agent_uses_the_addresses_on_disk_while_the_apiserver_is_down(
    place: Place, start_server, start_agent
) -> None:
    server = await start_server(contents=CONTENTS, tls=place.tls())
    place.file.save([HostPort("127.0.0.1", server.rpc.port)])
    await place.api.stop()
    agent = start_agent(channel=place.channel(), discovery=place.discovery())
    await eventually(lambda: agent.holds(server))
    assert any("no servers' addresses" in each for each in agent.feed.status.problems)


@pytest.mark.asyncio
async def test_whoever_has_got_a_servers_old_address_is_not_taken_for_it(
    place: Place, start_server, start_agent
) -> None:
    stranger = await start_server(contents=CONTENTS, tls=place.tls("other.rulecast.svc"))
    place.file.save([HostPort("127.0.0.1", stranger.rpc.port)])
    place.api.refuse("list", "endpointslices", *[Refusal(503, "ServiceUnavailable", "starting")] * 3)
    server = await start_server(contents=CONTENTS, tls=place.tls())
    place.publish(server)
    agent = start_agent(channel=place.channel(), discovery=place.discovery())
    await eventually(lambda: agent.holds(server))
    assert agent.feed.status.server == server.address
    assert not stranger.hub.streams


@pytest.mark.asyncio
async def test_another_apiserver_is_asked_when_one_does_not_answer(place: Place) -> None:
    place.api.put(endpoint_slice("10.0.0.1:9443"))
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        servers = [HostPort(*each.getsockname()) for each in (silent, closed)]
        closed.close()
        lookup = place.lookup(*servers, patience=1.0)
        assert await lookup() == [HostPort("10.0.0.1", 9443)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Refusal(401, "Unauthorized", "Unauthorized"), ["401", "token is not accepted"]),
        (
            Refusal(403, "Forbidden", "endpointslices is forbidden:\n no rule"),
            ["403", "is forbidden: no rule"],
        ),
        (Refusal(429, "TooManyRequests", "x" * 5000), ["429"]),
    ],
)
async def test_a_refusal_is_one_line_without_the_token(
    place: Place, refusal: Refusal, words: list[str]
) -> None:
    place.api.refuse("list", "endpointslices", refusal)
    with pytest.raises(LookupFailedError) as caught:
        await place.lookup()()
    line = str(caught.value)
    assert "\n" not in line
    assert TOKEN not in line
    assert len(line) < 500
    for word in words:
        assert word in line


@pytest.mark.asyncio
async def test_an_apiserver_that_its_certificate_does_not_name_gets_no_token(
    place: Place, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority(tmp_path_factory.mktemp("other"), "other")
    shutil.copy(other.cert, tmp_path / "ca.crt")
    with pytest.raises(LookupFailedError, match="certificate"):
        await place.lookup()()
    assert place.api.requests == []


@pytest.mark.asyncio
async def test_a_token_and_an_authority_that_are_replaced_count_from_the_next_question(
    place: Place, tmp_path: Path
) -> None:
    place.api.put(endpoint_slice("10.0.0.1:9443"))
    lookup = place.lookup()
    assert await lookup()
    place.api.token = "renewed"
    with pytest.raises(LookupFailedError, match="401"):
        await lookup()
    (tmp_path / "token").write_text("renewed")
    assert await lookup()


@pytest.mark.asyncio
async def test_an_endless_answer_is_cut(place: Place) -> None:
    place.api.put(*(endpoint_slice("10.0.0.1:9443", name=str(number) + "x" * 400) for number in range(2000)))
    with pytest.raises(LookupFailedError, match="more than"):
        await place.lookup()()
