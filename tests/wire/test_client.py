"""The agent's client through everything that a network and its servers do."""

import asyncio
import logging
import random

import grpc
import pytest

from rulecast.model import FLEET, ClusterInfo, NodeInfo, node_scope
from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from rulecast.wire.encode import MAX_MEMBERS
from rulecast_agent.feed.channels import ChannelSettings
from rulecast_agent.feed.checkpoint import CheckpointFile
from tests.wire import values
from tests.wire.proxy import Proxy
from tests.wire.waiting import eventually

SMALL = {FLEET: {**values.fleet_of(5), values.service("web"): values.port("web")}}
LARGE = {FLEET: values.fleet_of(4000, members=10)}


@pytest.mark.asyncio
async def test_updates_arrive_and_are_acknowledged(start_server, start_agent) -> None:
    server = await start_server(contents=SMALL)
    agent = start_agent(server.address)
    await eventually(lambda: agent.holds(server))
    server.set(0, "10.0.0.1:80")
    await eventually(lambda: agent.holds(server))
    assert [update.full for update in agent.updates] == [True, False]
    await eventually(lambda: server.hub.agents()[0].acked_revision == 2)
    (state,) = server.hub.agents()
    assert (state.node, state.mode, state.agent_version, state.lag) == ("n1", "nftables", "test", 0.0)
    assert state.ack.apply_ms == 3


@pytest.mark.asyncio
async def test_every_kind_of_resource_arrives_after_every_reconnect(start_server, start_agent) -> None:
    """envoyproxy/envoy#36951: one kind was never asked for again."""
    server = await start_server(contents=SMALL)
    proxy = await Proxy(server.rpc.port).start()
    agent = start_agent(f"127.0.0.1:{proxy.port}")
    await eventually(lambda: agent.holds(server))
    node = node_scope("n1")
    for round_ in range(12):
        proxy.cut()
        await eventually(lambda count=round_: agent.counters["disconnects"] > count)
        if round_ % 3:
            await eventually(lambda: agent.feed.status.connected)
        server.put({FLEET: {values.service(0): values.port(0, port=1000 + round_)}})
        server.put({FLEET: {values.cluster_set(0): values.endpoints(f"10.1.0.{round_}:80")}})
        server.put({node: {values.local_set(0): values.endpoints(f"10.2.0.{round_}:80", ready=1)}})
        server.put({node: {values.NODE: next_node(round_)}})
        server.put({FLEET: {values.CLUSTER: next_cluster(round_)}})
        await eventually(lambda: agent.holds(server))
        await eventually(lambda number=round_: agent.updates[-1].node == next_node(number))
        await eventually(lambda number=round_: agent.updates[-1].cluster == next_cluster(number))
    assert agent.counters["resets"] == 3, "those of the first snapshot"
    assert agent.counters["mismatches"] == 0
    await proxy.stop()


def next_node(number: int) -> NodeInfo:
    return NodeInfo(name="n1", addresses=(f"10.3.0.{number}",))


def next_cluster(number: int) -> ClusterInfo:
    return ClusterInfo(service_cidrs=(f"10.{number}.0.0/16",))


@pytest.mark.asyncio
async def test_a_reconnect_after_which_nothing_changed_is_no_update(start_server, start_agent) -> None:
    """projectcalico/typha#291: kernels were programmed anew after each rebalancing."""
    one = await start_server(contents=LARGE)
    two = await start_server(contents=LARGE)
    proxy = await Proxy(one.rpc.port).start()
    agent = start_agent(f"127.0.0.1:{proxy.port}")
    await eventually(lambda: agent.holds(one))
    received = agent.counters["bytes_received"]
    for round_ in range(6):
        proxy.upstream = (two, one)[round_ % 2].rpc.port
        proxy.cut()
        await eventually(lambda count=round_: agent.counters["connects"] == count + 2)
    assert agent.holds(one)
    assert len(agent.updates) == 1
    assert (agent.counters["bytes_received"] - received) / 6 < 500
    await eventually(lambda: one.hub.agents() and one.hub.agents()[-1].acked_revision == 1)
    await proxy.stop()


@pytest.mark.asyncio
async def test_a_server_that_is_killed_and_restarted_is_resumed_from(start_server, start_agent) -> None:
    first = await start_server(contents=LARGE)
    agent = start_agent(first.address)
    await eventually(lambda: agent.holds(first))
    received = agent.counters["bytes_received"]
    await first.kill()
    await eventually(lambda: not agent.feed.status.connected)
    assert agent.views, "rules stay"
    assert agent.feed.status.stale_since
    changed = {**LARGE[FLEET], values.cluster_set(7): values.endpoints("10.0.0.1:80")}
    second = await start_server(contents={FLEET: changed}, port=first.rpc.port)
    await eventually(lambda: agent.holds(second))
    assert agent.updates[-1].services.keys() == {values.key(7)}
    assert len(agent.updates) == 2
    assert agent.counters["bytes_received"] - received < 20_000
    assert agent.counters["mismatches"] == 0


@pytest.mark.asyncio
async def test_when_one_server_is_gone_the_next_one_serves(start_server, start_agent) -> None:
    servers = [await start_server(contents=SMALL) for _ in range(3)]
    agent = start_agent(*(server.address for server in servers))
    await eventually(lambda: agent.holds(servers[0]))
    for _ in range(2):
        serving = next(server for server in servers if server.hub.streams)
        assert serving.address == agent.feed.status.server
        await serving.rpc.stop(grace=0)
        await eventually(lambda gone=serving: any(each.hub.streams for each in servers if each is not gone))
        await eventually(lambda: agent.feed.status.connected)
    assert len(agent.updates) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(8))
async def test_a_snapshot_that_is_cut_anywhere_leaves_no_trace(start_server, start_agent, seed: int) -> None:
    """istio/istio#31943."""
    server = await start_server(contents=LARGE)
    whole = sum(map(len, server.hub.log.scope(FLEET).snapshot(1).encoded.compressed))
    proxy = await Proxy(server.rpc.port).start()
    proxy.cut_after = random.Random(seed).randrange(200, whole)
    agent = start_agent(f"127.0.0.1:{proxy.port}")
    await eventually(lambda: proxy.accepted >= 3)
    assert not agent.updates
    assert not agent.feed.status.connected
    proxy.cut_after = None
    await eventually(lambda: agent.holds(server))
    assert len(agent.updates) == 1
    await proxy.stop()


@pytest.mark.asyncio
async def test_a_cut_in_the_middle_of_changes_is_made_good(start_server, start_agent) -> None:
    server = await start_server(contents=LARGE)
    proxy = await Proxy(server.rpc.port).start()
    agent = start_agent(f"127.0.0.1:{proxy.port}")
    choice = random.Random(7)
    for _ in range(10):
        for _ in range(5):
            name = choice.randrange(4000)
            server.set(name, *(f"10.{choice.randrange(250)}.0.{i}:80" for i in range(choice.randrange(9))))
            await asyncio.sleep(0.002)
        proxy.cut()
        server.set(choice.randrange(4000))
    await eventually(lambda: agent.holds(server))
    assert agent.counters["mismatches"] == 0
    await proxy.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("servers", [1, 2])
async def test_a_connection_that_goes_silent_is_left_for_a_new_one(
    start_server, start_agent, caplog, servers: int
) -> None:
    """projectcalico/felix#1537: no FIN, no RST, no error; the agent waited for ever."""
    caplog.set_level(logging.WARNING)
    timing = {"mark_interval": 0.1, "keepalive_time": 0.3, "keepalive_timeout": 0.3}
    running = [await start_server(contents=SMALL, **timing) for _ in range(servers)]
    proxies = [await Proxy(server.rpc.port).start() for server in running]
    agent = start_agent(*(f"127.0.0.1:{proxy.port}" for proxy in proxies))
    await eventually(lambda: agent.holds(running[0]))
    first = next(server for server in running if server.hub.streams)
    stream = next(iter(first.hub._streams))
    for proxy in proxies:
        proxy.stall()
    for server in running:
        server.set(0, "10.0.0.1:80")
    await eventually(lambda: agent.counters["silences"] == 1)
    assert agent.views, "rules stay"
    await eventually(lambda: agent.holds(running[0]))
    second = next(proxy for proxy in proxies if agent.feed.status.server.endswith(f":{proxy.port}"))
    assert (second.upstream == first.rpc.port) == (servers == 1)
    # The server notices as well, by keepalive or since the agent is here again, and keeps no dead stream.
    await eventually(lambda: stream not in first.hub._streams)
    assert len([record for record in caplog.records if "silent" in record.message]) == 1
    for proxy in proxies:
        await proxy.stop()


@pytest.mark.asyncio
async def test_a_server_ends_the_stream_of_an_agent_that_is_gone_without_a_word(start_server) -> None:
    server = await start_server(contents=SMALL, mark_interval=0.1, keepalive_time=0.3, keepalive_timeout=0.3)
    proxy = await Proxy(server.rpc.port).start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(pb.WatchRequest(hello=pb.Hello(node_name="n1")))
        await call.read()
        proxy.stall()
        await eventually(lambda: not server.hub.streams)
        await eventually(lambda: not server.rpc.service.readers)
        call.cancel()
    await proxy.stop()


@pytest.mark.asyncio
async def test_a_stream_on_which_nothing_can_be_acknowledged_is_left_for_a_new_one(
    start_server, start_agent, caplog
) -> None:
    server = await start_server(contents=SMALL)
    agent = start_agent(server.address)
    await eventually(lambda: agent.holds(server))
    request, agent.session.request = agent.session.request, lambda: 1 / 0
    server.set(0, "10.0.0.1:80")
    await eventually(lambda: "ZeroDivisionError" in caplog.text)
    agent.session.request = request
    await eventually(lambda: agent.holds(server))
    await eventually(lambda: server.hub.agents()[0].lag == 0.0)
    assert agent.counters["disconnects"] >= 1


@pytest.mark.asyncio
async def test_a_promise_to_be_silent_for_long_is_not_believed(start_server, start_agent) -> None:
    server = await start_server(contents=SMALL, mark_interval=1e6)
    agent = start_agent(server.address)
    await eventually(lambda: agent.holds(server))
    assert agent.session.mark_interval == 60.0


@pytest.mark.asyncio
async def test_an_idle_stream_is_not_silent(start_server, start_agent) -> None:
    server = await start_server(contents=SMALL, mark_interval=0.05)
    agent = start_agent(server.address)
    await eventually(lambda: agent.counters["marks"] > 10)
    assert agent.counters["connects"] == 1
    assert len(agent.updates) == 1


@pytest.mark.asyncio
async def test_keepalive_of_both_sides_agrees(start_server, start_agent) -> None:
    """grpc/grpc-go#5063: pings faster than the server allows end in GOAWAY, again and again."""
    server = await start_server(
        contents=SMALL, mark_interval=60.0, keepalive_time=60.0, min_ping_interval=0.1
    )
    agent = start_agent(server.address, channel=ChannelSettings(keepalive_time=0.2, keepalive_timeout=1.0))
    await eventually(lambda: agent.holds(server))
    await asyncio.sleep(2.0)
    assert agent.counters["disconnects"] == 0
    assert agent.feed.status.connected


@pytest.mark.asyncio
async def test_more_state_than_a_default_grpc_message_arrives(start_server, start_agent) -> None:
    """grpc/grpc-go#1809: RESOURCE_EXHAUSTED, for ever."""
    huge = values.many(5 * MAX_MEMBERS)
    contents = {FLEET: {**values.fleet_of(3000, members=10), values.cluster_set(1): huge}}
    server = await start_server(contents=contents)
    assert sum(1 for _ in server.hub.log.scope(FLEET).resources()) == 6001
    agent = start_agent(server.address)
    await eventually(lambda: agent.holds(server))
    assert len(agent.views[values.key(1)].cluster) == len(huge.members)
    assert agent.counters["disconnects"] == 0
    async with grpc.aio.insecure_channel(server.address) as channel:
        # With gRPC's own limit of 4 MiB, and without compression.
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(pb.WatchRequest(hello=pb.Hello(node_name="n2")))
        sizes = []
        while True:
            frame = await call.read()
            sizes.append(frame.ByteSize())
            if frame.HasField("mark"):
                break
        assert max(sizes) < 1 << 20
        call.cancel()


@pytest.mark.asyncio
async def test_a_reader_that_stops_costs_the_server_nothing_and_the_others_nothing(
    start_server, start_agent
) -> None:
    """istio/istio#12664: one slow client made the server's queue grow until it died."""
    server = await start_server(contents=SMALL)
    agent = start_agent(server.address)
    await eventually(lambda: agent.holds(server))
    wide = [f"10.{i >> 8}.{i & 255}.{{}}:80" for i in range(1500)]
    async with grpc.aio.insecure_channel(
        server.address, options=[("grpc.http2.lookahead_bytes", 1 << 14), ("grpc.http2.bdp_probe", 0)]
    ) as channel:
        stopped = rules_pb2_grpc.RulesStub(channel).Watch()
        await stopped.write(pb.WatchRequest(hello=pb.Hello(node_name="stopped")))
        frame = await stopped.read()
        assert frame.HasField("mark")
        await eventually(lambda: server.hub.streams == 2)
        for round_ in range(120):
            server.set("web", *(each.format(round_) for each in wide))
            await asyncio.sleep(0.002)
        await eventually(lambda: agent.holds(server))
        (state,) = [each for each in server.hub.agents() if each.node == "stopped"]
        assert state.sent_revision < server.hub.log.revision
        # What it has not read is a few frames, not the hundred and more that were due since.
        messages = 0
        while True:
            frame = await stopped.read()
            messages += 1
            if frame.mark.revision == server.hub.log.revision:
                break
        assert messages < 60
        stopped.cancel()


@pytest.mark.asyncio
async def test_errors_are_logged_once_a_kind(start_server, start_agent, caplog, monkeypatch) -> None:
    monkeypatch.setattr("rulecast_server.rpc.service.SYNC_TIMEOUT", 0.0)
    caplog.set_level(logging.INFO)
    server = await start_server()
    agent = start_agent(server.address)
    await eventually(lambda: server.rpc.service.rejected >= 4)
    lines = [record.message for record in caplog.records if "rules stay" in record.message]
    assert len(lines) == 1
    assert "UNAVAILABLE: not synchronized" in lines[0]
    assert "UNAVAILABLE" in agent.feed.status.last_error
    server.put(SMALL)
    await eventually(lambda: agent.holds(server))
    assert any("connected" in record.message for record in caplog.records)
    assert agent.feed.status.last_error == ""


@pytest.mark.asyncio
async def test_damaged_frames_end_the_stream_and_state_survives(start_server, start_agent) -> None:
    server = await start_server(contents=SMALL)
    agent = start_agent(server.address)
    await eventually(lambda: agent.holds(server))
    (stream,) = server.hub._streams
    stream._session.next_step = lambda _now: (b"\xff\xff",)
    stream.wake()
    await eventually(lambda: agent.counters["invalid_frames"] == 1)
    await eventually(lambda: agent.holds(server))
    assert len(agent.updates) == 1


@pytest.mark.asyncio
async def test_without_a_server_the_last_good_state_is_used_and_called_stale(
    start_server, start_agent, tmp_path, caplog
) -> None:
    server = await start_server(contents=SMALL)
    file = CheckpointFile(tmp_path, "n1")
    agent = start_agent(server.address, checkpoint=file)
    await eventually(lambda: agent.holds(server))
    server.set(1, "10.0.0.1:80")
    await eventually(lambda: agent.holds(server))
    held = dict(agent.views)
    await agent.stop()
    await server.kill()

    agent = start_agent(server.address, checkpoint=file)
    await eventually(lambda: agent.updates)
    assert agent.views == held
    assert agent.updates[0].full
    status = agent.feed.status
    assert (status.connected, status.from_checkpoint) == (False, True)
    assert status.stale_since == pytest.approx(file.load().saved_at)

    again = await start_server(contents=SMALL, port=server.rpc.port)
    await eventually(lambda: agent.holds(again))
    assert [update.full for update in agent.updates] == [True, False]
    assert agent.updates[1].services.keys() == {values.key(1)}
    assert not agent.feed.status.from_checkpoint
    assert agent.counters["resets"] == 0
    await agent.stop()

    file.path.write_bytes(file.path.read_bytes()[:-5])
    agent = start_agent(server.address, checkpoint=file)
    await eventually(lambda: agent.holds(again))
    assert any("not used" in line for line in agent.feed.status.problems)
    assert any("not used" in record.message for record in caplog.records)
