"""Who is let in, and certificates that change under way."""

import shutil
from pathlib import Path

import grpc
import pytest

from rulecast.errors import UsageError
from rulecast.model import FLEET
from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from rulecast_agent.feed.channels import ChannelSettings, ClientTls, check_tls
from rulecast_server.rpc.authorize import CertificateNames, Peer, Refused
from rulecast_server.rpc.credentials import ReloadingCredentials, TlsFiles
from tests.wire import values
from tests.wire.conftest import Authority
from tests.wire.proxy import Proxy
from tests.wire.waiting import eventually

CONTENTS = {FLEET: {**values.fleet_of(3)}}


def server_files(authority: Authority, directory: Path, ca: Authority | None = None) -> TlsFiles:
    cert, key = authority.issue("server", "rulecast", "IP:127.0.0.1", "DNS:localhost")
    files = TlsFiles(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
    for source, target in zip((cert, key, (ca or authority).cert), files, strict=True):
        shutil.copy(source, target)
    return files


def client(authority: Authority, cn: str, *names: str, ca: Authority | None = None) -> ChannelSettings:
    cert, key = authority.issue(
        "client-" + "".join(each if each.isalnum() else "-" for each in cn), cn, *names
    )
    return ChannelSettings(tls=ClientTls((ca or authority).cert, cert, key), connect_backoff=0.2)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("cn", "names"),
    [("system:node:n1", ()), ("n1", ()), ("agent", ("DNS:n1",))],
    ids=["kubelet", "cn", "san"],
)
async def test_a_certificate_that_names_the_node_is_let_in(
    start_server, start_agent, authority, tmp_path, cn, names
) -> None:
    server = await start_server(contents=CONTENTS, tls=server_files(authority, tmp_path))
    agent = start_agent(server.address, channel=client(authority, cn, *names))
    await eventually(lambda: agent.holds(server))


@pytest.mark.asyncio
async def test_an_agent_may_ask_for_its_own_node_only(start_server, start_agent, authority, tmp_path) -> None:
    server = await start_server(contents=CONTENTS, tls=server_files(authority, tmp_path))
    agent = start_agent(server.address, channel=client(authority, "system:node:n2"))
    await eventually(lambda: "PERMISSION_DENIED" in agent.feed.status.last_error)
    assert "does not name node 'n1'" in agent.feed.status.last_error
    assert not agent.updates
    assert not server.hub.streams


@pytest.mark.asyncio
async def test_who_the_ca_did_not_sign_is_not_let_in(
    start_server, start_agent, authority, stranger, tmp_path
) -> None:
    server = await start_server(contents=CONTENTS, tls=server_files(authority, tmp_path))
    agent = start_agent(server.address, channel=client(stranger, "n1", ca=authority))
    await eventually(lambda: "UNAVAILABLE" in agent.feed.status.last_error)
    assert not agent.updates
    assert not server.hub.counters.connects


@pytest.mark.asyncio
async def test_a_server_that_our_ca_did_not_sign_is_not_believed(
    start_server, start_agent, authority, stranger, tmp_path
) -> None:
    server = await start_server(contents=CONTENTS, tls=server_files(stranger, tmp_path, ca=authority))
    agent = start_agent(server.address, channel=client(authority, "n1"))
    await eventually(lambda: "UNAVAILABLE" in agent.feed.status.last_error)
    assert not agent.updates


@pytest.mark.asyncio
async def test_plain_text_and_a_missing_client_certificate_get_nowhere(
    start_server, start_agent, authority, tmp_path
) -> None:
    server = await start_server(contents=CONTENTS, tls=server_files(authority, tmp_path))
    plain = start_agent(server.address)
    await eventually(lambda: "UNAVAILABLE" in plain.feed.status.last_error)
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
    async with grpc.aio.secure_channel(server.address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await rules_pb2_grpc.RulesStub(channel).ListAgents(pb.ListAgentsRequest(), timeout=5)
    assert not plain.updates


@pytest.mark.asyncio
async def test_listing_is_for_a_group_of_its_own(start_server, authority, tmp_path) -> None:
    server = await start_server(
        contents=CONTENTS,
        tls=server_files(authority, tmp_path),
        authorizer=CertificateNames(inspect_groups=("viewers",)),
    )
    refused = grpc.StatusCode.PERMISSION_DENIED
    for cn, code in (
        ("ann/O=viewers", grpc.StatusCode.OK),
        ("bob/O=other/O=viewers", grpc.StatusCode.OK),
        ("carl", refused),
        ("system:node:n1", refused),
        ("n1/O=other", refused),
        ("eve/O=a\\+O\\=viewers", refused),
        ("O=viewers", refused),
    ):
        tls = client(authority, cn).tls
        credentials = grpc.ssl_channel_credentials(
            tls.server_ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
        )
        async with grpc.aio.secure_channel(server.address, credentials) as channel:
            call = rules_pb2_grpc.RulesStub(channel).ListAgents(pb.ListAgentsRequest(), timeout=5)
            assert await call.code() is code


@pytest.mark.asyncio
async def test_new_certificates_are_used_without_a_restart(
    start_server, start_agent, authority, stranger, tmp_path
) -> None:
    """Both sides move to another authority: files are replaced, then connections break."""
    files = server_files(authority, tmp_path)
    server = await start_server(contents=CONTENTS, tls=files)
    proxy = await Proxy(server.rpc.port).start()
    tls = ClientTls(tmp_path / "server-ca.crt", tmp_path / "agent.crt", tmp_path / "agent.key")
    first = client(authority, "n1").tls
    for source, target in zip(first, tls, strict=True):
        shutil.copy(source, target)
    agent = start_agent(f"127.0.0.1:{proxy.port}", channel=ChannelSettings(tls=tls, connect_backoff=0.2))
    await eventually(lambda: agent.holds(server))

    # Half-way: a key that does not match. The last good set stays in use.
    shutil.copy(stranger.issue("server", "rulecast", "IP:127.0.0.1")[1], files.key)
    proxy.cut()
    await eventually(lambda: agent.counters["connects"] == 2)
    assert "not a matching certificate" in server.rpc.credentials.error

    server_files(stranger, tmp_path)
    proxy.cut()
    await eventually(lambda: server.rpc.credentials.reloads == 1)
    assert not server.rpc.credentials.error
    await eventually(lambda: not agent.feed.status.connected)
    for source, target in zip(client(stranger, "n1").tls, tls, strict=True):
        shutil.copy(source, target)
    await eventually(lambda: agent.counters["connects"] == 3)
    assert agent.feed._channels.rebuilds == 1
    assert len(agent.updates) == 1
    await proxy.stop()


@pytest.mark.parametrize("broken", ["cert", "key", "client_ca"])
def test_unusable_server_files_are_one_line_at_start(authority, tmp_path, broken: str) -> None:
    files = server_files(authority, tmp_path)
    getattr(files, broken).write_text("nonsense")
    with pytest.raises(UsageError, match=r"TLS files .*: not a matching"):
        ReloadingCredentials(files)
    getattr(files, broken).unlink()
    with pytest.raises(UsageError, match="No such file"):
        ReloadingCredentials(files)


def test_unusable_agent_files_are_one_line_at_start(authority, tmp_path) -> None:
    tls = client(authority, "n1").tls
    check_tls(tls)
    with pytest.raises(UsageError, match=r"missing\.crt: No such file"):
        check_tls(tls._replace(cert=tmp_path / "missing.crt"))
    with pytest.raises(UsageError, match="not a matching"):
        check_tls(tls._replace(key=authority.issue("other", "other")[1]))


@pytest.mark.asyncio
async def test_a_certificate_speaks_for_no_node_whose_name_only_looks_like_it() -> None:
    authorizer = CertificateNames()
    peer = Peer(address="a", common_name="system:node:n1", alternative_names=("n2",))
    assert await authorizer.watch(peer, "n1") is None
    assert await authorizer.watch(peer, "n2") is None
    for name in ("n", "n11", "system:node:n1x", "N1", ""):
        with pytest.raises(Refused, match="does not name node"):
            await authorizer.watch(peer, name)
    with pytest.raises(Refused):
        await authorizer.watch(Peer(address="a"), "n1")
