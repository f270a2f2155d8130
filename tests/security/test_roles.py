"""What tells the state of all nodes or connections needs a role of its own."""

import asyncio
import socket
import ssl

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from rulecast_server.rpc.authorize import CertificateNames
from rulecast_server.rpc.limits import Limits
from rulecast_server.rpc.names import organizations
from tests.security.conftest import CONTENTS, StartFleet
from tests.wire.test_tls import client, server_files

pytestmark = pytest.mark.asyncio
Code = grpc.StatusCode
VIEWER = "system:serviceaccount:ops:viewer"

Metadata = tuple[tuple[str, str], ...] | None


async def list_agents(channel: grpc.aio.Channel, metadata: Metadata) -> Code:
    call = rules_pb2_grpc.RulesStub(channel).ListAgents(pb.ListAgentsRequest(), metadata=metadata)
    return await call.code()


async def channelz(channel: grpc.aio.Channel, metadata: Metadata) -> Code:
    stub = channelz_pb2_grpc.ChannelzStub(channel)
    return await stub.GetServers(channelz_pb2.GetServersRequest(), metadata=metadata).code()


async def reflection(channel: grpc.aio.Channel, metadata: Metadata) -> Code:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(metadata=metadata)
    try:
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.read()
        await call.done_writing()
    except grpc.aio.AioRpcError:
        pass
    return await call.code()


async def list_nodes(channel: grpc.aio.Channel, metadata: Metadata) -> Code:
    return await rules_pb2_grpc.NodesStub(channel).List(pb.ListNodesRequest(), metadata=metadata).code()


async def watch_nodes(channel: grpc.aio.Channel, metadata: Metadata) -> Code:
    call = rules_pb2_grpc.NodesStub(channel).Watch(pb.WatchNodesRequest(), metadata=metadata)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return Code.OK


INSPECTIONS = [list_agents, channelz, reflection, list_nodes, watch_nodes]


@pytest.mark.parametrize("ask", INSPECTIONS)
async def test_with_tokens_the_apiserver_decides_who_inspects(start_fleet: StartFleet, ask) -> None:
    fleet = await start_fleet()
    fleet.api.allowed = {
        (VIEWER, "/rulecast.v1.*"),
        (VIEWER, "/grpc.*"),
    }
    viewer = fleet.api.issue("ops/viewer")
    agent = fleet.api.issue(node="n1")
    async with fleet.dial() as channel:
        for token, code in (
            (viewer, Code.OK),
            (agent, Code.PERMISSION_DENIED),
            ("garbage", Code.UNAUTHENTICATED),
            (None, Code.UNAUTHENTICATED),
        ):
            metadata = (("authorization", f"Bearer {token}"),) if token else None
            assert await ask(channel, metadata) is code
    assert fleet.server.rpc.counters.refused == {"permission_denied": 1, "unauthenticated": 2}


async def test_a_right_that_cannot_be_reviewed_is_no_right(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    fleet.api.allowed = {(VIEWER, "/rulecast.v1.Rules/ListAgents")}
    metadata = (("authorization", f"Bearer {fleet.api.issue('ops/viewer')}"),)
    async with fleet.dial() as channel:
        assert await reflection(channel, metadata) is Code.PERMISSION_DENIED
        fleet.api.out_of_order = True
        assert await list_agents(channel, metadata) is Code.UNAVAILABLE
        fleet.api.out_of_order = False
        assert await list_agents(channel, metadata) is Code.OK


async def test_a_stream_of_inspection_ends_with_the_token(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(fresh=0.1)
    fleet.api.allowed = {(VIEWER, "/rulecast.v1.Nodes/*")}
    token = fleet.api.issue("ops/viewer")
    async with fleet.dial() as channel:
        call = rules_pb2_grpc.NodesStub(channel).Watch(
            pb.WatchNodesRequest(interval_ms=100), metadata=(("authorization", f"Bearer {token}"),)
        )
        await call.read()
        fleet.api.revoke(token)
        with pytest.raises(grpc.aio.AioRpcError, match="does not accept the token"):
            await call.read()


async def test_inspection_calls_are_bounded(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(limits=Limits(inspections=3))
    fleet.api.allowed = {(VIEWER, "/rulecast.v1.Nodes/*")}
    metadata = (("authorization", f"Bearer {fleet.api.issue('ops/viewer')}"),)
    async with fleet.dial() as channel:
        stub = rules_pb2_grpc.NodesStub(channel)
        calls = [stub.Watch(pb.WatchNodesRequest(), metadata=metadata) for _ in range(3)]
        for call in calls:
            await call.read()
        assert await list_nodes(channel, metadata) is Code.RESOURCE_EXHAUSTED
        calls[0].cancel()
        for _ in range(500):
            if (code := await list_nodes(channel, metadata)) is Code.OK:
                break
            await asyncio.sleep(0.01)
        assert code is Code.OK


@pytest.mark.parametrize("ask", INSPECTIONS)
async def test_with_certificates_a_group_inspects(start_server, authority, tmp_path, ask) -> None:
    server = await start_server(
        contents=CONTENTS,
        tls=server_files(authority, tmp_path),
        authorizer=CertificateNames(inspect_groups=("viewers",)),
    )
    for name, code in (("ann/O=viewers", Code.OK), ("system:node:n1", Code.PERMISSION_DENIED)):
        tls = client(authority, name).tls
        credentials = grpc.ssl_channel_credentials(
            tls.server_ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
        )
        async with grpc.aio.secure_channel(server.address, credentials) as channel:
            assert await ask(channel, None) is code


async def test_health_is_for_everybody(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    async with fleet.dial() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await stub.Check(health_pb2.HealthCheckRequest()).code() is Code.OK


@pytest.mark.parametrize(
    ("subject", "found"),
    [
        ("CN=ann,O=viewers", ("viewers",)),
        ("O=b,OU=c,O=a,CN=ann", ("b", "a")),
        ("CN=ann\\,O=viewers", ()),
        ("CN=a\\+O=viewers+O=x", ("x",)),
        ("CN=O=viewers", ()),
        ("O=a\\,b\\\\", ("a,b\\",)),
        ("O=\\C3\\A9t\\C3\\A9", ("été",)),
        ("OU=viewers", ()),
        ("", ()),
        ("O=", ("",)),
        ("O=a\\", ("a",)),
    ],
)
async def test_groups_are_read_from_subjects_as_they_are_escaped(subject: str, found) -> None:
    assert organizations(subject) == found


@pytest.mark.parametrize(
    ("version", "let_in"),
    [
        (ssl.TLSVersion.TLSv1, False),
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_tls_is_1_2_or_newer(start_fleet: StartFleet, version: ssl.TLSVersion, let_in: bool) -> None:
    fleet = await start_fleet()
    context = ssl.create_default_context(cafile=str(fleet.ca))
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    connection = socket.create_connection(("127.0.0.1", fleet.server.rpc.port), timeout=5)
    with connection:
        try:
            with context.wrap_socket(connection, server_hostname="127.0.0.1") as wrapped:
                assert let_in
                assert wrapped.selected_alpn_protocol() == "h2"
        except ssl.SSLError:
            assert not let_in
