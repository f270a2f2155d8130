"""The Nodes service: what nodes' kernels have, as anyone with grpcurl sees it."""

import asyncio
from collections.abc import Mapping

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from rulecast.model import FLEET, NodeInfo, node_scope
from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from tests.wire import values
from tests.wire.conftest import Server
from tests.wire.test_rpc import hello, read_step
from tests.wire.waiting import eventually

pytestmark = pytest.mark.asyncio
Code = grpc.StatusCode


def cluster(*nodes: str) -> values.Contents:
    return {
        FLEET: {**values.fleet_of(3), values.service("web"): values.port("web")},
        **{node_scope(name): {values.NODE: NodeInfo(name=name, zone="z")} for name in nodes},
    }


class Kernel:
    """A stream whose acknowledgments are the test's to give."""

    def __init__(self, stub: rules_pb2_grpc.RulesStub, node: str) -> None:
        self.node = node
        self.call = stub.Watch()
        self.revision = 0

    async def start(self) -> "Kernel":
        await self.call.write(hello(self.node, agent_version="1", mode="nftables"))
        await self.read()
        return self

    async def read(self) -> None:
        self.revision = (await read_step(self.call)).mark.revision

    async def ack(self, errors: Mapping[str, str] | None = None, **fields: object) -> None:
        named = [pb.ServiceError(key=key, message=text) for key, text in (errors or {}).items()]
        ack = pb.Ack(revision=self.revision, errors=named, error_count=len(named))
        for name, value in fields.items():
            setattr(ack, name, value)
        await self.call.write(pb.WatchRequest(ack=ack))


class Ask:
    """A channel to one server."""

    def __init__(self, server: Server) -> None:
        self.channel = grpc.aio.insecure_channel(server.address)
        self.rules = rules_pb2_grpc.RulesStub(self.channel)
        self.nodes = rules_pb2_grpc.NodesStub(self.channel)
        # A call that is forgotten is cancelled.
        self._kernels: list[Kernel] = []

    async def __aenter__(self) -> "Ask":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def kernel(self, node: str, *, acked: bool = True) -> Kernel:
        kernel = await Kernel(self.rules, node).start()
        self._kernels.append(kernel)
        if acked:
            await kernel.ack()
        return kernel

    async def wait(self, service: str = "default/web", **fields: object) -> pb.WaitAppliedResponse:
        request = pb.WaitAppliedRequest(service=service, **{"timeout_ms": 20_000, **fields})
        return await self.nodes.WaitApplied(request)

    async def current(self, *names: str) -> None:
        """Wait until just these nodes are."""

        found: set[str] = set()
        for _ in range(1000):
            answer = await self.nodes.List(pb.ListNodesRequest())
            found = {node.name for node in answer.nodes if node.current}
            if found == set(names):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"current are {found}")


async def test_a_list_tells_every_node_connected_or_not(start_server) -> None:
    server = await start_server(contents=cluster("a", "b", "c"))
    async with Ask(server) as ask:
        await ask.kernel("a")
        await ask.kernel("b", acked=False)
        await ask.kernel("stranger")
        await ask.current("a", "stranger")
        answer = await ask.nodes.List(pb.ListNodesRequest())
        assert (answer.revision, answer.total, answer.current) == (1, 4, 2)
        assert [
            (node.name, node.registered, node.connected, node.current, node.zone, len(node.agents))
            for node in answer.nodes
        ] == [
            ("a", True, True, True, "z", 1),
            ("b", True, True, False, "z", 1),
            ("c", True, False, False, "z", 0),
            ("stranger", False, True, True, "", 1),
        ]
        assert answer.nodes[0].agents[0].mode == "nftables"
        behind = await ask.nodes.List(pb.ListNodesRequest(behind=True))
        assert [node.name for node in behind.nodes] == ["b", "c"]
        named = await ask.nodes.List(pb.ListNodesRequest(names=["c", "a", "nobody"]))
        assert [node.name for node in named.nodes] == ["a", "c"]
        assert named.total == 4


async def test_one_node_with_all_its_errors(start_server) -> None:
    server = await start_server(contents=cluster("a"))
    async with Ask(server) as ask:
        kernel = await ask.kernel("a", acked=False)
        await kernel.ack(errors={values.key(number): "no such family" for number in range(30)})
        await eventually(lambda: server.hub.counters.acks)
        node = await ask.nodes.Get(pb.GetNodeRequest(name="a"))
        assert not node.current
        assert len(node.agents[0].errors) == 30
        (listed,) = (await ask.nodes.List(pb.ListNodesRequest())).nodes
        assert len(listed.agents[0].errors) == 10
        assert listed.agents[0].error_count == 30
        text = MessageToDict(node)
        assert text["agents"][0]["errors"][0] == {"key": values.key(0), "message": "no such family"}
        with pytest.raises(grpc.aio.AioRpcError, match="no Node and no agent 'b'") as caught:
            await ask.nodes.Get(pb.GetNodeRequest(name="b"))
        assert caught.value.code() is Code.NOT_FOUND


async def test_a_watch_tells_all_and_then_what_changed(start_server) -> None:
    server = await start_server(contents=cluster("a", "b"))
    async with Ask(server) as ask:
        kernel = await ask.kernel("a")
        await ask.current("a")
        watch = ask.nodes.Watch(pb.WatchNodesRequest(interval_ms=100))
        first = await watch.read()
        assert [(node.name, node.current) for node in first.nodes] == [("a", True), ("b", False)]
        server.set(0, "10.0.0.1:80")
        await kernel.read()
        await kernel.ack(errors={values.key(0): "refused"})
        change = await watch.read()
        while not (change.nodes and change.nodes[0].agents[0].errors):
            change = await watch.read()
        assert [node.name for node in change.nodes] == ["a"]
        assert change.revision == 2
        server.put({node_scope("b"): {values.NODE: None}})
        change = await watch.read()
        while not change.removed:
            change = await watch.read()
        assert list(change.removed) == ["b"]
        kernel.call.cancel()
        change = await watch.read()
        while not (change.nodes and not change.nodes[0].connected):
            change = await watch.read()
        watch.cancel()


async def test_a_watch_of_named_nodes_tells_of_no_others(start_server) -> None:
    server = await start_server(contents=cluster("a", "b"))
    async with Ask(server) as ask:
        watch = ask.nodes.Watch(pb.WatchNodesRequest(names=["b"], interval_ms=100))
        assert [node.name for node in (await watch.read()).nodes] == ["b"]
        await ask.kernel("a")
        await ask.kernel("b")
        change = await watch.read()
        assert [node.name for node in change.nodes] == ["b"]
        watch.cancel()
        too_often = ask.nodes.Watch(pb.WatchNodesRequest(interval_ms=5))
        assert await too_often.code() is Code.INVALID_ARGUMENT


async def test_waiting_ends_when_every_node_has_it(start_server) -> None:
    server = await start_server(contents=cluster("a", "b"))
    async with Ask(server) as ask:
        a, b = await ask.kernel("a"), await ask.kernel("b")
        server.put({FLEET: {values.cluster_set("web"): values.endpoints("10.9.9.9:80")}})
        await a.read()
        await b.read()
        waiting = asyncio.create_task(ask.wait())
        await a.ack()
        some = await ask.wait(timeout_ms=200)
        assert (some.applied, some.nodes, some.nodes_applied) == (False, 2, 1)
        assert some.reason == "1 of 2 nodes have it"
        assert [node.name for node in some.missing] == ["b"]
        assert not waiting.done()
        await b.ack()
        answer = await waiting
        assert (answer.applied, answer.reason, answer.revision) == (True, "", 2)
        assert (answer.nodes, answer.nodes_applied, answer.ports) == (2, 2, 1)


async def test_a_share_of_the_nodes_can_be_enough(start_server) -> None:
    server = await start_server(contents=cluster("a", "b", "c", "d"))
    async with Ask(server) as ask:
        for name in ("a", "b", "c"):
            await ask.kernel(name)
        assert (await ask.wait(percent=75)).applied
        answer = await ask.wait(percent=76, timeout_ms=100)
        assert not answer.applied
        assert [node.name for node in answer.missing] == ["d"]


async def test_nodes_without_an_agent_here_can_be_left_out(start_server) -> None:
    server = await start_server(contents=cluster("a", "b"))
    async with Ask(server) as ask:
        await ask.kernel("a")
        assert not (await ask.wait(timeout_ms=100)).applied
        answer = await ask.wait(connected_only=True)
        assert (answer.applied, answer.nodes) == (True, 1)


async def test_no_nodes_at_all_are_not_all_nodes(start_server) -> None:
    server = await start_server(contents=cluster())
    async with Ask(server) as ask:
        for connected_only in (False, True):
            answer = await ask.wait(timeout_ms=100, connected_only=connected_only)
            assert not answer.applied
            assert answer.reason == "0 of 0 nodes have it"


async def test_a_kernel_that_refused_the_service_does_not_have_it(start_server) -> None:
    server = await start_server(contents=cluster("a"))
    async with Ask(server) as ask:
        kernel = await ask.kernel("a", acked=False)
        await kernel.ack(errors={values.key("web-2"): "no", values.key(1): "no"})
        assert (await ask.wait()).applied
        await kernel.ack(errors={values.key("web"): "no"})
        await eventually(lambda: server.hub.counters.acks == 2)
        answer = await ask.wait(timeout_ms=100)
        assert not answer.applied
        assert answer.missing[0].agents[0].errors[0].message == "no"
        await kernel.ack()
        assert (await ask.wait()).applied
        # Errors that are counted and not named could be this Service's.
        await kernel.ack(error_count=101)
        await eventually(lambda: server.hub.counters.acks == 4)
        assert not (await ask.wait(timeout_ms=100)).applied


async def test_waiting_begins_once_the_server_has_seen_the_write(start_server) -> None:
    server = await start_server(contents=cluster("a"))
    seen = {"services": 10}
    server.hub.seen = lambda: seen
    async with Ask(server) as ask:
        await ask.kernel("a")
        answer = await ask.wait(resource_versions={"services": 11}, timeout_ms=100)
        assert not answer.applied
        assert answer.reason == "the server has seen services up to version 10 only"
        waiting = asyncio.create_task(ask.wait(resource_versions={"services": 11}))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        seen["services"] = 12
        assert (await waiting).applied


async def test_waiting_for_a_service_to_come_and_to_go(start_server) -> None:
    server = await start_server(contents=cluster("a"))
    async with Ask(server) as ask:
        kernel = await ask.kernel("a")
        answer = await ask.wait("default/late", timeout_ms=100)
        assert answer.reason == "there is no Service default/late that has a cluster IP"
        assert answer.nodes_applied == 0
        waiting = asyncio.create_task(ask.wait("default/late"))
        server.put({FLEET: {values.service("late"): values.port("late")}})
        await kernel.read()
        await kernel.ack()
        assert (await waiting).applied
        answer = await ask.wait("default/late", gone=True, timeout_ms=100)
        assert answer.reason == "there still is a Service default/late"
        waiting = asyncio.create_task(ask.wait("default/late", gone=True))
        server.put({FLEET: {values.service("late"): None}})
        await kernel.read()
        assert not waiting.done()
        await kernel.ack()
        answer = await waiting
        assert (answer.applied, answer.ports) == (True, 0)


async def test_what_a_kernel_had_counts_when_its_agent_leaves(start_server) -> None:
    server = await start_server(contents=cluster("a", "b"))
    async with Ask(server) as ask:
        a, b = await ask.kernel("a"), await ask.kernel("b", acked=False)
        waiting = asyncio.create_task(ask.wait())
        await ask.current("a")
        await asyncio.sleep(0.15)
        a.call.cancel()
        await eventually(lambda: server.hub.streams == 1)
        await b.ack()
        assert (await waiting).applied


@pytest.mark.parametrize(
    "fields",
    [
        {"service": "web"},
        {"service": ""},
        {"service": "a/b/c"},
        {"service": "a/b:http"},
        {"percent": 101},
        {"timeout_ms": 600_001},
    ],
)
async def test_questions_that_make_no_sense_are_told_so(start_server, fields: dict[str, object]) -> None:
    server = await start_server(contents=cluster("a"))
    async with Ask(server) as ask:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask.wait(**fields)
        assert caught.value.code() is Code.INVALID_ARGUMENT


async def test_many_nodes_come_in_messages_that_clients_take(start_server, monkeypatch) -> None:
    monkeypatch.setattr("rulecast_server.rpc.nodes._MESSAGE", 100)
    server = await start_server(contents=cluster(*(f"n{number:04}" for number in range(250))))
    async with Ask(server) as ask:
        watch = ask.nodes.Watch(pb.WatchNodesRequest())
        sizes = [len((await watch.read()).nodes) for _ in range(3)]
        assert sizes == [100, 100, 50]
        watch.cancel()
