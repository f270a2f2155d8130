"""Hundreds of peers that misbehave in every known way, beside agents that do not."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable

import pytest

from rulecast.v1 import rules_pb2 as pb
from rulecast_server.rpc.limits import Limits
from tests.security import peers
from tests.security.conftest import CONTENTS
from tests.security.peers import RawPeer
from tests.wire.waiting import eventually

HONEST = 20
OF_EACH_KIND = 30
LIMITS = Limits(
    handshake=1.0,
    hello=1.0,
    idle_connection=1.0,
    unread=1.0,
    requests_rate=50.0,
    requests_burst=20.0,
    flood=1.0,
    streams_per_connection=20,
    greetings_per_host=2_000,
)


async def says_nothing(peer: RawPeer, number: int) -> None:
    await peer.ended()


async def sends_noise(peer: RawPeer, number: int) -> None:
    peer.send(os.urandom(10_000))
    await peer.ended()


async def opens_no_stream(peer: RawPeer, number: int) -> None:
    peer.send(peers.PREFACE + peers.settings())
    await peer.answers_pings()


async def sends_no_hello(peer: RawPeer, number: int) -> None:
    peer.send(peers.PREFACE + peers.settings())
    for stream in range(1, 20, 2):
        peer.send(peers.call(stream))
    await peer.answers_pings()


async def never_reads_its_stream(peer: RawPeer, number: int) -> None:
    peer.send(peers.PREFACE + peers.settings({peers.INITIAL_WINDOW_SIZE: 0}))
    peer.send(peers.call(1) + peers.message(1, peers.hello(f"lazy-{number}")))
    await peer.answers_pings()


async def never_reads_its_socket(peer: RawPeer, number: int) -> None:
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    peer.send(peers.PREFACE + peers.settings({peers.INITIAL_WINDOW_SIZE: 0}))
    peer.send(peers.call(1) + peers.message(1, peers.hello(f"deaf-{number}")))
    while not peer.writer.transport.is_closing():
        peer.send(peers.frame(peers.WINDOW_UPDATE, (1).to_bytes(4, "big")))
        await asyncio.sleep(0.05)


async def floods_with_acks(peer: RawPeer, number: int) -> None:
    peer.send(peers.PREFACE + peers.settings())
    peer.send(peers.call(1) + peers.message(1, peers.hello(f"eager-{number}")))
    # As much as flow control lets through without reading a window update.
    ack = peers.message(1, pb.WatchRequest(ack=pb.Ack(revision=1)))
    peer.send(ack * (60_000 // len(ack)))
    await peer.answers_pings()


async def pings_all_the_time(peer: RawPeer, number: int) -> None:
    peer.send(peers.PREFACE + peers.settings())
    for _ in range(1000):
        peer.send(peers.frame(peers.PING, bytes(8)))
    await peer.ended()


async def sends_nonsense_in_a_stream(peer: RawPeer, number: int) -> None:
    peer.send(peers.PREFACE + peers.settings() + peers.call(1))
    peer.send(peers.frame(peers.DATA, b"\0\0\0\0\4\xff\xff\xff\xff", stream=1))
    await peer.answers_pings()


async def announces_a_gigabyte(peer: RawPeer, number: int) -> None:
    peer.send(peers.PREFACE + peers.settings() + peers.call(1))
    peer.send(peers.frame(peers.DATA, b"\0\x40\0\0\0" + bytes(1000), stream=1))
    await peer.answers_pings()


async def comes_and_goes(peer: RawPeer, number: int) -> None:
    peer.send(peers.PREFACE + peers.settings())
    for stream in range(1, 200, 2):
        peer.send(peers.call(stream) + peers.message(stream, peers.hello(f"flap-{number}")))
        peer.send(peers.frame(peers.RST_STREAM, (8).to_bytes(4, "big"), stream=stream))
        await asyncio.sleep(0)
    await peer.close()


Behavior = Callable[[RawPeer, int], Awaitable[None]]
CUT: list[Behavior] = [
    says_nothing,
    sends_noise,
    opens_no_stream,
    sends_no_hello,
    never_reads_its_stream,
    never_reads_its_socket,
    floods_with_acks,
    pings_all_the_time,
    sends_nonsense_in_a_stream,
    announces_a_gigabyte,
    comes_and_goes,
]


@pytest.mark.asyncio
async def test_honest_agents_do_not_notice_them_and_they_are_cut(start_server, start_agent) -> None:
    server = await start_server(contents=CONTENTS, limits=LIMITS, max_connection_age_grace=0.1)
    agents = [start_agent(server.address, node=f"honest-{number}") for number in range(HONEST)]
    await eventually(lambda: all(agent.holds(server) for agent in agents))

    async def misbehave(behavior: Behavior, number: int) -> str:
        peer = await RawPeer.connect(server.rpc.port)
        try:
            async with asyncio.timeout(40):
                await behavior(peer, number)
        except TimeoutError:
            return behavior.__name__
        finally:
            with contextlib.suppress(OSError):
                peer.writer.close()
        return ""

    crowd = [
        asyncio.create_task(misbehave(behavior, number)) for number in range(OF_EACH_KIND) for behavior in CUT
    ]
    changes = 0
    while not all(task.done() for task in crowd):
        changes += 1
        server.set(changes % 3, f"10.1.{changes >> 8}.{changes & 255}:80")
        await eventually(lambda: all(agent.holds(server) for agent in agents))
        await asyncio.sleep(0.02)
    assert [name for task in crowd if (name := task.result())] == []
    assert changes > 3
    # Nobody's stream was lost, nothing had to be sent twice.
    assert {agent.counters["connects"] for agent in agents} == {1}
    assert not any(agent.counters["disconnects"] + agent.counters["mismatches"] for agent in agents)
    await eventually(lambda: server.hub.streams == HONEST and server.rpc.greeting == 0)
    await eventually(lambda: server.rpc.service.readers == HONEST)
    counters = server.rpc.counters
    # How many by which limit depends on which strikes first, and that on the machine.
    assert counters.unread_cuts
    assert counters.throttled
    assert counters.refused["invalid_argument"]
    assert counters.refused["deadline_exceeded"] or counters.refused["resource_exhausted"]
