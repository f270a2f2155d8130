"""What one peer may cost, and what becomes of those who take more."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
import pytest_asyncio

from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from rulecast_server.rpc.connections import PeerAddress, end_connection, parse_peer
from rulecast_server.rpc.limits import Bucket, Budgets, Limits
from tests.security import peers
from tests.security.conftest import CONTENTS
from tests.security.peers import RawPeer
from tests.wire.conftest import Server
from tests.wire.test_rpc import hello, read_step, read_to_the_end
from tests.wire.waiting import eventually

Code = grpc.StatusCode


@pytest_asyncio.fixture
async def connect() -> AsyncIterator[Callable[[Server], Awaitable[RawPeer]]]:
    """Raw connections, closed in the end."""
    made: list[RawPeer] = []

    async def one(server: Server) -> RawPeer:
        made.append(await RawPeer.connect(server.rpc.port))
        return made[-1]

    yield one
    for peer in made:
        await peer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [1, 8])
async def test_a_node_has_so_many_streams(start_server, count: int) -> None:
    server = await start_server(contents=CONTENTS, limits=Limits(streams_per_node=count))
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = rules_pb2_grpc.RulesStub(channel)
        calls = [stub.Watch() for _ in range(count)]
        for call in calls:
            await call.write(hello())
            await read_step(call)
        more = stub.Watch()
        await more.write(hello())
        assert await more.code() is Code.RESOURCE_EXHAUSTED
        assert await more.details() == f"node n1 has {count} streams already"
        other = stub.Watch()
        await other.write(hello("n2"))
        await read_step(other)
        calls[0].cancel()
        await eventually(lambda: server.hub.streams == count)
        again = stub.Watch()
        await again.write(hello())
        await read_step(again)


@pytest.mark.asyncio
async def test_a_connection_has_so_many_streams(start_server, connect) -> None:
    server = await start_server(contents=CONTENTS, limits=Limits(streams_per_connection=5))
    peer = await connect(server)
    reset: set[int] = set()
    announced = asyncio.Event()

    async def read() -> None:
        async for kind, stream, payload in peer.frames():
            if kind == peers.SETTINGS and payload:
                announced.set()
            if kind == peers.RST_STREAM:
                reset.add(stream)

    reading = asyncio.create_task(read())
    peer.send(peers.PREFACE + peers.settings())
    await announced.wait()
    # The limit holds once its acknowledgment is in.
    peer.send(peers.frame(peers.PING, bytes(8)))
    for stream in range(1, 41, 2):
        peer.send(peers.call(stream) + peers.message(stream, peers.hello(f"n{stream}")))
    await eventually(lambda: server.hub.streams == 5 and (reset or reading.done()))
    assert server.hub.streams <= 5
    await peer.close()
    await reading


@pytest.mark.asyncio
async def test_streams_that_wait_to_be_let_in_are_bounded(start_server) -> None:
    server = await start_server(contents=CONTENTS, limits=Limits(greetings_per_host=10, greetings=10))
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = rules_pb2_grpc.RulesStub(channel)
        silent = [stub.Watch() for _ in range(10)]
        await eventually(lambda: server.rpc.greeting == 10)
        more = stub.Watch()
        assert await more.code() is Code.RESOURCE_EXHAUSTED
        assert "wait to be let in already" in (await more.details() or "")
        silent[0].cancel()
        await eventually(lambda: server.rpc.greeting == 9)
        honest = stub.Watch()
        await honest.write(hello())
        await read_step(honest)
    await eventually(lambda: server.rpc.greeting == 0)


@pytest.mark.asyncio
async def test_all_streams_together_are_bounded(start_server) -> None:
    server = await start_server(contents=CONTENTS, limits=Limits(streams=3))
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = rules_pb2_grpc.RulesStub(channel)
        calls = [stub.Watch() for _ in range(3)]
        for number, call in enumerate(calls):
            await call.write(hello(f"n{number}"))
            await read_step(call)
        assert await stub.Watch().code() is Code.RESOURCE_EXHAUSTED


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        os.urandom(4096),
        peers.PREFACE,
        peers.PREFACE + bytes(1000),
        peers.PREFACE + peers.settings() + peers.frame(peers.DATA, b"x" * 9, stream=0),
    ],
    ids=["silence", "http1", "tls", "noise", "preface-only", "zeros", "data-on-no-stream"],
)
async def test_a_connection_that_speaks_no_http2_is_ended(start_server, connect, first) -> None:
    server = await start_server(
        contents=CONTENTS, limits=Limits(handshake=0.3, idle_connection=0.3), max_connection_age_grace=0.1
    )
    peer = await connect(server)
    peer.send(first)
    await asyncio.wait_for(peer.ended(), 20)
    assert not server.hub.counters.connects


@pytest.mark.asyncio
async def test_a_connection_without_a_stream_is_ended(start_server, connect) -> None:
    server = await start_server(
        contents=CONTENTS, limits=Limits(idle_connection=0.3), max_connection_age_grace=0.1
    )
    peer = await connect(server)
    peer.send(peers.PREFACE + peers.settings())
    await asyncio.wait_for(peer.answers_pings(), 20)


@pytest.mark.asyncio
async def test_probes_that_come_too_often_end_the_connection(start_server, connect) -> None:
    server = await start_server(contents=CONTENTS)
    peer = await connect(server)
    ping = peers.frame(peers.PING, bytes(8))
    peer.send(peers.PREFACE + peers.settings() + ping)
    code = None
    async with asyncio.timeout(20):
        async for kind, _, payload in peer.frames():
            # One at a time: what is unread when the server closes would reset the connection.
            if kind == peers.PING:
                peer.send(ping)
            if kind == peers.GOAWAY:
                code = int.from_bytes(payload[4:8], "big")
    assert code == peers.ENHANCE_YOUR_CALM


@pytest.mark.asyncio
async def test_too_much_metadata_is_refused(start_server) -> None:
    server = await start_server(contents=CONTENTS)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch(metadata=(("authorization", "x" * 40_000),))
        assert await call.code() in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.INTERNAL)
    assert not server.hub.counters.connects


@pytest.mark.asyncio
async def test_an_address_has_so_many_connections_without_an_agent(
    start_server, start_agent, connect, caplog
) -> None:
    # `unread` also says how often the server looks.
    server = await start_server(contents=CONTENTS, limits=Limits(strangers_per_host=10, unread=0.4))
    agents = [start_agent(server.address, node=f"n{number}") for number in range(20)]
    await eventually(lambda: all(agent.feed.status.connected for agent in agents))
    # On a machine so busy that agents take longer than a look to be let in, some of them were cut on the way.
    cut = server.rpc.counters.excess_cuts
    connects = [agent.counters["connects"] for agent in agents]
    strangers = [await connect(server) for _ in range(60)]
    for peer in strangers:
        peer.send(peers.PREFACE + peers.settings())
    ends = [asyncio.create_task(peer.ended()) for peer in strangers]
    await eventually(lambda: sum(end.done() for end in ends) == 50)
    await eventually(lambda: server.rpc.counters.excess_cuts == cut + 50)
    assert "had more than 10 connections without an agent that was let in" in caplog.text
    server.set(0, "10.0.0.1:80")
    await eventually(lambda: all(agent.holds(server) for agent in agents))
    assert [agent.counters["connects"] for agent in agents] == connects
    for end in ends:
        end.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize("window", [0, 100])
async def test_a_peer_that_never_reads_is_cut_after_a_while(
    start_server, connect, caplog, window: int
) -> None:
    server = await start_server(contents=CONTENTS, limits=Limits(unread=0.4))
    peer = await connect(server)
    peer.send(peers.PREFACE + peers.settings({peers.INITIAL_WINDOW_SIZE: window}))
    peer.send(peers.call(1) + peers.message(1, peers.hello("lazy")))
    # It answers probes: the connection itself looks well.
    await asyncio.wait_for(peer.answers_pings(), 20)
    await eventually(lambda: not server.hub.streams and not server.rpc.service.readers)
    assert server.rpc.counters.unread_cuts == 1
    assert "node lazy, took nothing for 0.4 s: its connection is ended" in caplog.text


@pytest.mark.asyncio
async def test_a_peer_that_there_is_nothing_to_send_to_is_not_cut(start_server) -> None:
    server = await start_server(contents=CONTENTS, limits=Limits(unread=0.2))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(hello())
        await read_step(call)
        await asyncio.sleep(0.5)
        server.set(0, "10.0.0.1:80")
        await read_step(call)
    assert not server.rpc.counters.unread_cuts


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("request_", "limits", "most"),
    [
        (
            pb.WatchRequest(ack=pb.Ack(revision=1)),
            Limits(requests_rate=200.0, requests_burst=50.0, flood=0.5),
            1000,
        ),
        (
            pb.WatchRequest(resync=pb.Resync(id=1)),
            Limits(resyncs_rate=20.0, resyncs_burst=5.0, flood=0.5),
            100,
        ),
    ],
    ids=["acks", "resyncs"],
)
async def test_a_flood_is_held_back_and_then_ended(start_server, caplog, request_, limits, most) -> None:
    server = await start_server(contents=CONTENTS, limits=limits)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch()
        await call.write(hello())

        async def flood() -> None:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                while True:
                    await call.write(request_)

        flooding = asyncio.create_task(flood())
        # What gRPC's client says of a stream that is ended while it writes is one of several things.
        with pytest.raises(grpc.aio.AioRpcError):
            await read_to_the_end(call)
        await flooding
    counters = server.rpc.counters
    assert counters.refused == {"resource_exhausted": 1}
    assert "requests or" in caplog.text
    assert counters.throttled
    assert server.hub.counters.acks + server.hub.counters.resyncs < most


@pytest.mark.asyncio
async def test_refusals_do_not_fill_the_log(start_server, caplog) -> None:
    server = await start_server(contents=CONTENTS)
    async with grpc.aio.insecure_channel(server.address) as channel:
        for _ in range(100):
            call = rules_pb2_grpc.RulesStub(channel).Watch()
            await call.write(hello(""))
            assert await call.code() is Code.INVALID_ARGUMENT
    assert server.rpc.counters.refused["invalid_argument"] == 100
    assert 20 <= len([record for record in caplog.records if "was refused" in record.message]) < 60


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ipv4:192.0.2.1:5000", PeerAddress("192.0.2.1", 5000)),
        ("ipv6:%5B2001:db8::1%5D:5000", PeerAddress("2001:db8::1", 5000)),
        ("ipv6:[2001:DB8:0::1]:5000", PeerAddress("2001:db8::1", 5000)),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", PeerAddress("fe80::1", 1)),
        ("ipv6:%5B::ffff:192.0.2.1%5D:2", PeerAddress("192.0.2.1", 2)),
        ("unix:/run/socket", None),
        ("unix:", None),
        ("", None),
        ("ipv4:nonsense:x", None),
    ],
)
def test_names_of_peers(name: str, address: PeerAddress | None) -> None:
    assert parse_peer(name) == address


def test_a_connection_that_is_not_ours_is_not_ended() -> None:
    assert not end_connection("ipv4:192.0.2.1:5000")
    assert not end_connection("unix:/run/socket")


def test_a_bucket_refills_with_time_up_to_its_size() -> None:
    bucket = Bucket(burst=3, rate=2.0, now=0.0)
    assert [bucket.take(0.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert bucket.level(1.0) == 0.0
    assert not bucket.half(1.5)
    assert bucket.half(1.75)
    assert bucket.level(100.0) == 3.0
    assert bucket.full(100.0)
    assert bucket.take(100.0, 10) == 3.5


def test_budgets_are_of_each_name_and_forgotten_when_whole() -> None:
    now = 0.0
    budgets = Budgets(burst=2, rate=1.0, clock=lambda: now)
    for _ in range(3):
        budgets.take("a")
    assert not budgets.left("a")
    assert budgets.left("b")
    now = 2.5
    assert budgets.left("a")
    now = 100.0
    budgets._forget(now)
    assert not budgets._buckets
