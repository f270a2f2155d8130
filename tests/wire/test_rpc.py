"""The gRPC service as any client sees it: grpcurl, health checkers, and those who get it wrong."""

import asyncio

import grpc
import pytest
from google.protobuf.json_format import MessageToDict, MessageToJson
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rulecast.errors import UsageError
from rulecast.flags import HostPort
from rulecast.model import FLEET, NodeInfo, node_scope
from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from rulecast_server.feed import DeltaLog, Hub
from rulecast_server.rpc.limits import Limits
from rulecast_server.rpc.server import RpcServer, RpcSettings
from tests.wire import values
from tests.wire.proxy import Proxy
from tests.wire.waiting import eventually

pytestmark = pytest.mark.asyncio

FLEET_OF_TWO = {FLEET: {**values.fleet_of(2), values.service("web"): values.port("web")}}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def hello(node: str = "n1", **fields: object) -> pb.WatchRequest:
    return pb.WatchRequest(hello=pb.Hello(node_name=node, **fields))


async def read_step(call) -> pb.Frame:
    """All frames up to the next mark, as one."""
    step = pb.Frame()
    while not step.HasField("mark"):
        frame = await call.read()
        assert frame is not grpc.aio.EOF
        step.MergeFrom(frame)
    return step


async def read_to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_client_that_closes_its_side_goes_on_reading(start_server) -> None:
    """What `grpcurl -d '{"hello": …}'` does."""
    server = await start_server(contents=FLEET_OF_TWO)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(hello())
        await call.done_writing()
        step = await read_step(call)
        assert step.fleet.scope == "fleet"
        assert step.node.scope == "node/n1"
        assert step.zone.scope == "zone/"
        assert not step.zstd
        server.set(0, "10.0.0.1:80")
        step = await read_step(call)
        assert step.mark.revision == 2
        call.cancel()
    await eventually(lambda: not server.hub.streams)


async def test_frames_read_well_as_json(start_server) -> None:
    server = await start_server(contents=FLEET_OF_TWO)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(hello())
        text = MessageToJson(await read_step(call))
        assert '"clusterIp": "10.96.0.1"' in text
        assert '"10.0.1.2"' in text
        assert '"serviceCidrs"' in text
        call.cancel()


async def test_a_gap_is_sent_to_who_names_a_position(start_server) -> None:
    server = await start_server(contents=FLEET_OF_TWO)
    state = server.hub.log.scope(FLEET)
    position = pb.Position(fleet=pb.ScopePosition(scope="fleet", digest=f"{state.digest:016x}"))
    server.set(0, "10.0.0.1:80")
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(hello(position=position))
        step = await read_step(call)
        assert not step.fleet.HasField("reset")
        assert [change.cluster_endpoints.key for change in step.fleet.changes] == [values.key(0)]
        call.cancel()


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([b"\xff\xff\xff"], "not a WatchRequest"),
        ([pb.WatchRequest(ack=pb.Ack(revision=1))], "the first request is not a hello"),
        ([hello("")], "without node_name"),
        ([hello("x" * 300)], "300 characters"),
        ([hello("a/b")], "not a node's name"),
        ([], "ended before a hello"),
        ([hello(), hello()], "a second hello"),
        ([hello(), b"\xff\xff\xff"], "not a WatchRequest"),
    ],
)
async def test_mistakes_are_told_in_clear_words(start_server, requests, words) -> None:
    server = await start_server(contents=FLEET_OF_TWO)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/rulecast.v1.Rules/Watch")()
        for request in requests:
            await call.write(request if isinstance(request, bytes) else request.SerializeToString())
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await read_to_the_end(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: not server.hub.streams)


async def test_an_oversize_request_is_refused_and_leaks_nothing(start_server) -> None:
    server = await start_server(contents=FLEET_OF_TWO)
    async with grpc.aio.insecure_channel(server.address) as channel:
        for _ in range(5):
            call = channel.stream_stream("/rulecast.v1.Rules/Watch")()
            await call.write(b"\x0a" * (1 << 20))
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
    await eventually(lambda: not server.rpc.service.readers)
    assert not server.hub.streams


async def test_a_stream_without_a_hello_is_ended(start_server) -> None:
    server = await start_server(contents=FLEET_OF_TWO, limits=Limits(hello=0.05))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        with pytest.raises(grpc.aio.AioRpcError, match="no hello came"):
            await call.read()
    await eventually(lambda: not server.rpc.service.readers)


async def test_a_server_without_its_first_projection_sends_agents_away(start_server, monkeypatch) -> None:
    monkeypatch.setattr("rulecast_server.rpc.service.SYNC_TIMEOUT", 0.02)
    server = await start_server()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(hello())
        with pytest.raises(grpc.aio.AioRpcError, match="not synchronized") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_agent_that_comes_during_the_start_is_served_when_it_is_done(start_server) -> None:
    server = await start_server()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(hello())
        step = asyncio.create_task(read_step(call))
        await eventually(lambda: server.rpc.service.readers)
        await asyncio.sleep(0.02)
        server.put(FLEET_OF_TWO)
        assert (await step).fleet.changes
        call.cancel()


async def test_clients_that_vanish_leave_nothing_behind(start_server) -> None:
    server = await start_server(contents=FLEET_OF_TWO)
    for _ in range(10):
        async with grpc.aio.insecure_channel(server.address) as channel:
            calls = [rules_pb2_grpc.RulesStub(channel).Watch() for _ in range(5)]
            for call in calls:
                await call.write(hello())
                await read_step(call)
            server.set(0, "10.0.0.1:80")
            server.set(0, "10.0.0.2:80")
            for call in calls:
                call.cancel()
    await eventually(lambda: not server.hub.streams)
    await eventually(lambda: not server.rpc.service.readers)
    assert server.hub.counters.connects == 50


async def test_connections_that_break_leave_nothing_behind(start_server) -> None:
    server = await start_server(contents=FLEET_OF_TWO)
    proxy = await Proxy(server.rpc.port).start()
    for _ in range(5):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            call = rules_pb2_grpc.RulesStub(channel).Watch()
            await call.write(hello())
            await read_step(call)
            proxy.cut()
            server.set(0, "10.0.0.1:80")
            server.set(0, "10.0.0.2:80")
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
    await eventually(lambda: not server.hub.streams)
    await eventually(lambda: not server.rpc.service.readers)
    await proxy.stop()


async def test_agents_are_listed_with_what_they_acknowledged(start_server) -> None:
    server = await start_server(
        contents={**FLEET_OF_TWO, node_scope("n1"): {values.NODE: NodeInfo(name="n1", zone="x")}}
    )
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = rules_pb2_grpc.RulesStub(channel)
        call = stub.Watch()
        await call.write(hello(agent_version="1.2", mode="ipvs"))
        await read_step(call)
        errors = [pb.ServiceError(key="k", message="refused")]
        await call.write(
            pb.WatchRequest(
                ack=pb.Ack(
                    revision=1,
                    apply_ms=12,
                    errors=errors,
                    error_count=3,
                    node_error="no nft",
                )
            )
        )
        await eventually(lambda: server.hub.agents()[0].ack)
        answer = MessageToDict(await stub.ListAgents(pb.ListAgentsRequest()))
        (agent,) = answer["agents"]
        assert agent.pop("peer").startswith("ipv4:127.0.0.1")
        agent.pop("connectedSeconds", None)
        assert (answer["revision"], agent) == (
            "1",
            {
                "nodeName": "n1",
                "zone": "x",
                "agentVersion": "1.2",
                "mode": "ipvs",
                "sentRevision": "1",
                "ackedRevision": "1",
                "applyMs": 12,
                "errors": [{"key": "k", "message": "refused"}],
                "errorCount": 3,
                "nodeError": "no nft",
            },
        )
        call.cancel()


async def test_health_follows_readiness(start_server) -> None:
    server = await start_server()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert [await check(name) for name in ("", "rulecast.v1.Rules")] == [NOT_SERVING] * 2
        await server.rpc.set_serving(serving=True)
        assert [await check(name) for name in ("", "rulecast.v1.Rules")] == [SERVING] * 2


async def test_reflection_lists_and_describes_the_service(start_server) -> None:
    server = await start_server()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {each.name for each in (await call.read()).list_services_response.service}
        assert names == {
            "rulecast.v1.Rules",
            "rulecast.v1.Nodes",
            "grpc.health.v1.Health",
            "grpc.channelz.v1.Channelz",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="rulecast.v1.Rules"))
        (described, *_) = (await call.read()).file_descriptor_response.file_descriptor_proto
        assert b"ListAgents" in described
        call.cancel()


async def test_channelz_shows_the_servers_connections(start_server) -> None:
    server = await start_server()
    async with grpc.aio.insecure_channel(server.address) as channel:
        answer = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
        assert answer.server


async def test_a_server_that_stops_says_so(start_server) -> None:
    server = await start_server(contents=FLEET_OF_TWO)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(hello())
        await read_step(call)
        stopping = asyncio.create_task(server.rpc.stop())
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await stopping


async def test_a_taken_port_is_one_clear_line(start_server) -> None:
    server = await start_server()
    other = RpcServer(Hub(DeltaLog()), RpcSettings(listen=HostPort("127.0.0.1", server.rpc.port)))
    with pytest.raises(UsageError, match=f"--listen 127.0.0.1:{server.rpc.port}: in use"):
        await other.start()
    await other.stop(0)
