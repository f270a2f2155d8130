"""The hub wakes whom a change concerns, at once after quiet and merged under load."""

import asyncio

import pytest

from rulecast.model import FLEET, NodeInfo, node_scope, zone_scope
from rulecast.wire.decode import decode_frame
from rulecast.wire.messages import Ack, Hello, Resync
from rulecast_server.feed import DeltaLog, Hub, HubSettings, Stream
from tests.wire import values
from tests.wire.waiting import eventually

WEB = values.cluster_set("web")


class Agent:
    """Reads a stream into lists."""

    def __init__(self, hub: Hub, node: str, **hello: object) -> None:
        self.stream: Stream = hub.attach(Hello(node_name=node, **hello), peer=f"peer of {node}")
        self.hub = hub
        self.revisions: list[int] = []
        self.sizes: list[int] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while frames := await self.stream.frames():
            await self.reading.wait()
            self.revisions.append(decode_frame(frames[-1]).mark.revision)
            self.sizes.append(sum(map(len, frames)))
        self.hub.detach(self.stream)

    def ack(self, revision: int, **fields: object) -> None:
        self.stream.receive(Ack(revision=revision, **fields))


class World:
    def __init__(self, **settings: float) -> None:
        self.contents: values.Contents = {}
        self.hub = Hub(DeltaLog(), HubSettings(**{"spacing_per_stream": 0.0, **settings}))
        self.number = 0

    def put(self, assignment) -> None:
        step = values.changes(assignment, self.contents)
        values.apply(self.contents, step)
        self.hub.publish(step)

    def change(self, scope=FLEET) -> None:
        self.number += 1
        self.put({scope: {WEB: values.endpoints(f"10.0.{self.number // 250}.{self.number % 250}:80")}})

    def nodes(self, **zones: str) -> None:
        self.put(
            {node_scope(name): {values.NODE: NodeInfo(name=name, zone=zone)} for name, zone in zones.items()}
        )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.002)


@pytest.mark.asyncio
async def test_nothing_is_sent_before_the_first_projection() -> None:
    world = World(mark_interval=0.02)
    agent = Agent(world.hub, "n1")
    await asyncio.sleep(0.05)
    assert agent.revisions == []
    world.put({})
    await eventually(lambda: agent.revisions)
    world.hub.close("end")
    await agent.task


@pytest.mark.asyncio
async def test_a_change_wakes_the_streams_of_its_scope_only() -> None:
    world = World()
    world.nodes(n1="x", n2="x", n3="y")
    agents = {name: Agent(world.hub, name) for name in ("n1", "n2", "n3")}
    await settle()

    async def woken(scope) -> set[str]:
        before = {name: len(agent.revisions) for name, agent in agents.items()}
        steps = world.hub.counters.steps
        world.change(scope)
        await settle()
        told = {name for name, agent in agents.items() if len(agent.revisions) > before[name]}
        assert world.hub.counters.steps - steps == len(told)
        return told

    assert await woken(FLEET) == {"n1", "n2", "n3"}
    assert await woken(zone_scope("x")) == {"n1", "n2"}
    assert await woken(node_scope("n3")) == {"n3"}
    assert await woken(node_scope("n9")) == set()
    world.nodes(n1="y")
    await settle()
    assert await woken(zone_scope("y")) == {"n1", "n3"}
    assert await woken(zone_scope("x")) == {"n2"}
    world.hub.close("end")
    await asyncio.gather(*(agent.task for agent in agents.values()))
    assert world.hub.streams == 0
    assert not world.hub._by_scope


@pytest.mark.asyncio
async def test_under_load_changes_merge_and_the_first_one_does_not_wait() -> None:
    world = World(spacing_per_stream=0.2, max_spacing=0.2)
    world.put({FLEET: {WEB: values.endpoints()}})
    agent = Agent(world.hub, "n1")
    await settle()
    loop = asyncio.get_running_loop()
    start = loop.time()
    world.change()
    await eventually(lambda: len(agent.revisions) == 2)
    assert loop.time() - start < 0.19
    for _ in range(20):
        world.change()
        await asyncio.sleep(0.001)
    assert len(agent.revisions) == 2
    await eventually(lambda: agent.revisions[-1] == world.hub.log.revision)
    assert len(agent.revisions) == 3
    world.hub.close("end")
    await agent.task


@pytest.mark.asyncio
async def test_a_stream_that_does_not_read_merges_and_holds_up_no_other() -> None:
    world = World()
    world.put({FLEET: {WEB: values.endpoints()}})
    slow, fast = Agent(world.hub, "n1"), Agent(world.hub, "n2")
    await settle()
    slow.reading.clear()
    for _ in range(50):
        world.change()
        await asyncio.sleep(0.001)
    await eventually(lambda: fast.revisions[-1] == 51)
    assert len(fast.revisions) > 10
    slow.reading.set()
    await eventually(lambda: slow.revisions[-1] == 51)
    assert len(slow.revisions) <= 3
    assert max(slow.sizes[1:]) < 200
    world.hub.close("end")
    await asyncio.gather(slow.task, fast.task)


@pytest.mark.asyncio
async def test_marks_tell_silence_from_idleness() -> None:
    world = World(mark_interval=0.05)
    world.put({FLEET: {WEB: values.endpoints("10.0.0.1:80")}})
    agent = Agent(world.hub, "n1")
    await eventually(lambda: len(agent.revisions) >= 4)
    assert set(agent.revisions) == {1}
    assert max(agent.sizes[1:]) < 150
    world.hub.close("end")
    await agent.task


@pytest.mark.asyncio
async def test_a_question_is_answered_at_once() -> None:
    world = World()
    world.put({FLEET: {WEB: values.endpoints("10.0.0.1:80")}})
    agent = Agent(world.hub, "n1")
    await settle()
    agent.stream.receive(Resync(id=1, position={}))
    await eventually(lambda: len(agent.revisions) == 2)
    assert world.hub.counters.resyncs == 1
    world.hub.close("end")
    await agent.task


@pytest.mark.asyncio
async def test_a_new_stream_of_the_same_agent_ends_the_half_open_one() -> None:
    world = World()
    world.put({})
    old = Agent(world.hub, "n1", instance="a")
    stranger = Agent(world.hub, "n1", instance="b")
    person = Agent(world.hub, "n1")
    await settle()
    new = Agent(world.hub, "n1", instance="a")
    await old.task
    assert "took over" in old.stream.closed
    assert [agent.stream.closed for agent in (stranger, person, new)] == [None] * 3
    assert world.hub.counters.superseded == 1
    world.hub.close("end")
    await asyncio.gather(*(agent.task for agent in (stranger, person, new)))
    assert not world.hub._by_instance


@pytest.mark.asyncio
async def test_lag_is_the_age_of_the_oldest_unacknowledged_mark() -> None:
    now = 100.0
    hub = Hub(DeltaLog(), clock=lambda: now)
    contents: values.Contents = {}
    hub.publish({})
    agent = Agent(hub, "n1", mode="nftables", agent_version="1")
    await settle()

    def state():
        (state,) = hub.agents()
        return state

    agent.ack(1, apply_ms=7)
    assert (state().acked_revision, state().lag) == (1, 0.0)
    for number in range(3):
        step = values.changes({FLEET: {WEB: values.endpoints(f"10.0.0.{number}:80")}}, contents)
        values.apply(contents, step)
        hub.publish(step)
        await settle()
        now += 1.0
    assert (state().sent_revision, state().acked_revision, state().lag) == (4, 1, 3.0)
    agent.ack(2)
    assert state().lag == 2.0
    agent.ack(99, errors=(("k", "refused"),), error_count=1)
    assert (state().acked_revision, state().lag) == (4, 0.0), "no more than what was sent"
    assert state().ack.errors == (("k", "refused"),)
    # What does not concern the node leaves it at the head.
    hub.publish(values.changes({node_scope("n2"): {WEB: values.endpoints()}}))
    await settle()
    assert (state().sent_revision, state().acked_revision, state().lag) == (5, 5, 0.0)
    assert (state().peer, state().mode, state().agent_version, state().zone) == (
        "peer of n1",
        "nftables",
        "1",
        "",
    )
    hub.close("end")
    await agent.task


@pytest.mark.asyncio
async def test_an_agent_that_acknowledges_nothing_costs_no_memory() -> None:
    world = World()
    world.put({})
    agent = Agent(world.hub, "n1")
    for _ in range(300):
        world.change()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await settle()
    assert len(agent.revisions) > 100
    assert len(agent.stream._acks._waiting) <= 64
    agent.ack(world.hub.log.revision)
    assert not agent.stream._acks.waits()
    world.hub.close("end")
    await agent.task
