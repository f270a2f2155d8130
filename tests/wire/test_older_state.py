"""A node never goes back: what a replica sends that is behind what the node has waits (G13)."""

import pytest

from rulecast.model import FLEET, EndpointSet
from rulecast.view import Receipt, Update
from rulecast.wire.requests import decode_request
from rulecast_agent.feed.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from rulecast_agent.feed.desired import Desired
from rulecast_agent.feed.session import AgentIdentity, AgentSession
from rulecast_server.feed import DeltaLog, Session
from tests.wire import values
from tests.wire.proxy import Proxy
from tests.wire.waiting import eventually

NODE = "n1"
OLD, NEW = values.endpoints("10.0.0.1:80"), values.endpoints("10.0.0.2:80")


class Replica:
    """A server: its content, up to where it has seen the cluster, and the newest object that it saw."""

    def __init__(self, endpoints: EndpointSet, *, seen: int, changed: int | None = None) -> None:
        self.contents = {
            FLEET: {values.service("web"): values.port("web"), values.cluster_set("web"): endpoints}
        }
        self.log = DeltaLog()
        self.log.apply(values.changes(self.contents), **versions(seen, changed))
        self.session: Session | None = None

    def see(self, version: int, endpoints: EndpointSet | None = None, *, changed: int | None = None) -> None:
        content = {FLEET: {values.cluster_set("web"): endpoints}} if endpoints else {}
        step = values.changes(content, self.contents) if content else {}
        values.apply(self.contents, step)
        self.log.apply(step, **versions(version, changed))

    def greet(self, agent: AgentSession) -> list[Update]:
        request = decode_request(agent.hello("a replica"))
        self.session = Session(self.log, node=NODE, position=request.position)
        return self.serve(agent)

    def serve(self, agent: AgentSession, *, idle: bool = False) -> list[Update]:
        assert self.session is not None
        updates = []
        frames = self.session.idle_step(0.0) if idle else self.session.next_step(0.0)
        while frames:
            updates += [update for frame in frames if (update := agent.frame(frame)) is not None]
            frames = self.session.next_step(0.0)
        return updates


def versions(seen: int, changed: int | None) -> dict[str, dict[str, int]]:
    changed = seen if changed is None else changed
    return {
        "resource_versions": {"endpointslices": seen, "services": 50},
        "changed_versions": {"endpointslices": changed, "services": 50},
    }


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def agent(clock: Clock) -> AgentSession:
    return AgentSession(AgentIdentity(node_name=NODE), Desired(NODE, clock=clock))


def endpoints_of(agent: AgentSession) -> EndpointSet:
    (view,) = agent.desired.views.values()
    return EndpointSet(members=view.cluster)


def acked(agent: AgentSession) -> int:
    """The newest revision of the server that the agent says is in its kernel."""
    agent.ack(Receipt(revision=agent.desired.revision, seconds=0.0))
    revision = 0
    while (request := agent.request()) is not None:
        revision = decode_request(request).revision
    return revision


def test_older_content_is_neither_handed_on_nor_acknowledged_until_the_replica_has_caught_up(
    agent: AgentSession,
) -> None:
    ahead, behind = Replica(NEW, seen=110), Replica(OLD, seen=100)
    ahead.greet(agent)
    assert behind.greet(agent) == []
    assert (endpoints_of(agent), agent.desired.holding) == (NEW, True)
    assert "endpointslices at 100, not 110" in " ".join(agent.status.problems)
    assert acked(agent) == 0
    behind.see(110, NEW)
    assert behind.serve(agent) == [], "it is what the node has"
    assert (endpoints_of(agent), agent.desired.holding) == (NEW, False)
    assert acked(agent) == 2
    assert agent.status.problems == ()


def test_the_step_that_takes_a_replica_beyond_what_the_node_has_is_handed_on(agent: AgentSession) -> None:
    newest = values.endpoints("10.0.0.3:80")
    Replica(NEW, seen=110).greet(agent)
    behind = Replica(OLD, seen=100)
    behind.greet(agent)
    behind.see(111, newest)
    (update,) = behind.serve(agent)
    assert not update.full
    assert endpoints_of(agent) == newest


def test_a_replica_that_has_seen_the_same_by_bookmarks_is_not_behind(agent: AgentSession) -> None:
    """A list is at the cluster's version, a watch at its last event's, though nothing came in between."""
    listed, watched = Replica(NEW, seen=500, changed=110), Replica(NEW, seen=110)
    listed.greet(agent)
    watched.greet(agent)
    watched.see(120, OLD)
    assert len(watched.serve(agent)) == 1
    assert endpoints_of(agent) == OLD
    assert agent.desired.counters["held"] == 0


def test_a_replica_that_has_seen_a_deletion_in_its_list_is_not_behind(agent: AgentSession) -> None:
    """The newest object is gone: what is left is older, and the list is not."""
    Replica(NEW, seen=110).greet(agent)
    listed = Replica(OLD, seen=130, changed=90)
    assert len(listed.greet(agent)) == 1
    assert endpoints_of(agent) == OLD


def test_a_cluster_that_has_gone_back_is_followed_after_a_while_and_counted(
    agent: AgentSession, clock: Clock
) -> None:
    Replica(NEW, seen=110).greet(agent)
    restored = Replica(OLD, seen=70)
    restored.greet(agent)
    clock.now = 29.0
    assert restored.serve(agent, idle=True) == []
    clock.now = 30.0
    assert len(restored.serve(agent, idle=True)) == 1
    assert endpoints_of(agent) == OLD
    assert agent.desired.counters["went_back"] == 1
    restored.see(71, NEW)
    assert len(restored.serve(agent)) == 1, "from here on as ever"


def test_patience_is_not_renewed_by_reconnecting(agent: AgentSession, clock: Clock) -> None:
    Replica(NEW, seen=110).greet(agent)
    for clock.now in (0.0, 15.0, 29.0):
        assert Replica(OLD, seen=70).greet(agent) == []
    clock.now = 31.0
    assert len(Replica(OLD, seen=70).greet(agent)) == 1


def test_a_source_without_comparable_versions_is_always_followed(agent: AgentSession) -> None:
    """Files have no resourceVersions: each server counts its own readings."""
    Replica(NEW, seen=9, changed=0).greet(agent)
    assert len(Replica(OLD, seen=3, changed=0).greet(agent)) == 1


def test_a_restart_remembers_up_to_where_the_node_was(agent: AgentSession) -> None:
    Replica(NEW, seen=110).greet(agent)
    desired = agent.desired
    saved = decode_checkpoint(
        encode_checkpoint(
            Checkpoint(node_name=NODE, saved_at=0.0, contents=desired.contents(), reached=desired.reached)
        )
    )
    again = AgentSession(AgentIdentity(node_name=NODE))
    again.desired.restore(saved.contents, saved.reached)
    assert Replica(OLD, seen=100).greet(again) == []
    assert endpoints_of(again) == NEW


@pytest.mark.asyncio
async def test_two_replicas_at_different_lag_under_one_agent(start_server, start_agent, caplog) -> None:
    """The agent moves to a replica that is behind, and its rules stay until that one has caught up."""
    first = {FLEET: {values.service("web"): values.port("web"), values.cluster_set("web"): NEW}}
    older = {FLEET: {values.service("web"): values.port("web"), values.cluster_set("web"): OLD}}
    ahead, behind = await start_server(contents=first), await start_server(contents=older)
    for server, version in ((ahead, 110), (behind, 100)):
        server.hub.publish({}, resource_versions={"endpointslices": version})
    proxy = await Proxy(ahead.rpc.port).start()
    agent = start_agent(f"127.0.0.1:{proxy.port}")
    await eventually(lambda: agent.holds(ahead))
    proxy.upstream = behind.rpc.port
    proxy.cut()
    await eventually(lambda: "is behind what this node has" in caplog.text)
    assert agent.views == values.node_view(ahead.contents, NODE)
    assert len(agent.updates) == 1
    behind.set("web", "10.0.0.2:80")
    behind.set("other", "10.0.0.9:80")
    behind.hub.publish({}, resource_versions={"endpointslices": 111})
    behind.put({FLEET: {values.service("other"): values.port("other")}})
    await eventually(lambda: agent.holds(behind))
    assert [list(update.services) for update in agent.updates[1:]] == [[values.key("other")]]
    assert agent.counters["held"] == 1
    await proxy.stop()
