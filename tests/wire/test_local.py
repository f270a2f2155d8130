"""One process, both sides: the same protocol by call."""

import asyncio

import pytest

from rulecast.model import FLEET, NodeInfo, node_scope
from rulecast.view import Receipt, Update
from rulecast.wire.messages import WireError
from rulecast_agent.feed.local import LocalFeed
from rulecast_agent.feed.session import AgentIdentity, AgentSession
from rulecast_server.feed import DeltaLog, LocalSession
from tests.wire import values


@pytest.mark.asyncio
async def test_updates_come_as_they_are_published_and_receipts_go_back() -> None:
    contents: values.Contents = {}
    feed = LocalFeed(AgentSession(AgentIdentity(node_name="n1", mode="nftables")))
    server = LocalSession(DeltaLog(), feed.deliver)
    feed.connect(server.receive)
    updates: list[Update] = []

    def publish(assignment) -> None:
        step = values.changes(assignment, contents)
        values.apply(contents, step)
        server.publish(step, resource_versions={"services": len(updates) + 1})

    task = asyncio.create_task(feed.run(updates.append))
    await asyncio.sleep(0)
    assert not updates
    publish({FLEET: values.fleet_of(2000), node_scope("n1"): {values.NODE: NodeInfo(name="n1")}})
    assert [update.full for update in updates] == [True]
    assert len(updates[0].services) == 2000
    publish({FLEET: {values.cluster_set(3): values.endpoints("10.0.0.1:80")}})
    assert updates[1].services.keys() == {values.key(3)}
    assert server.acks.acked == 0
    feed.ack(Receipt(revision=2, seconds=0.001))
    assert server.acks.acked == 2
    server.pump(idle=True)
    assert feed.status.counters["marks"] == 3
    assert feed.status.connected
    assert feed.status.resource_versions == {"services": 2}
    # Damage is mended within the call.
    feed._session.desired._stores[1].load(values.service("ghost"), values.port("ghost"))
    server.pump(idle=True)
    assert feed.status.counters["mismatches"] == 1
    assert not feed.status.problems
    assert feed._session.desired.views == values.node_view(contents, "n1")
    task.cancel()
    await asyncio.wait((task,))


def test_a_session_begins_with_a_hello() -> None:
    server = LocalSession(DeltaLog(), lambda data: None)
    with pytest.raises(WireError, match="not a hello"):
        server.receive(b"\x12\x00")
