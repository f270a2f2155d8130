"""What a reconnect costs, in bytes both ways: the gap, on whichever replica."""

from collections.abc import Callable

import pytest

from rulecast.model import FLEET, EndpointSet, NodeInfo, node_scope
from rulecast.view import Receipt
from rulecast.wire.requests import decode_request
from rulecast_agent.feed.session import AgentIdentity, AgentSession
from rulecast_server.feed import DeltaLog, LogLimits, Session
from tests.wire import values

NODE = "n1"
SERVICES = 10_000


class Server:
    """A replica."""

    def __init__(self, contents: values.Contents, limits: LogLimits | None = None) -> None:
        self.contents = contents
        self.log = DeltaLog(limits)
        self.log.apply(values.changes(contents))

    def change(self, *names: object, times: int = 1) -> None:
        for round_ in range(times):
            for name in names:
                new = values.endpoints(f"10.9.{round_}.9:8080")
                step = values.changes({FLEET: {values.cluster_set(name): new}}, self.contents)
                values.apply(self.contents, step)
                self.log.apply(step)

    def serve(self, agent: AgentSession) -> int:
        """One stream until it is quiet; returns the bytes both ways."""
        hello = agent.hello("server")
        request = decode_request(hello)
        session = Session(self.log, node=NODE, zstd=True, position=request.position)
        size = len(hello)
        while frames := session.next_step(0.0):
            for frame in frames:
                size += len(frame)
                agent.frame(frame)
        agent.ack(Receipt(revision=agent.desired.revision, seconds=0.0))
        while (data := agent.request()) is not None:
            size += len(data)
        assert agent.connected
        assert not agent.desired.waiting
        assert agent.desired.views == values.node_view(self.contents, NODE)
        agent.lost("end")
        return size


@pytest.fixture(scope="module")
def contents() -> values.Contents:
    return {
        FLEET: values.fleet_of(SERVICES),
        node_scope(NODE): {values.NODE: NodeInfo(name=NODE, zone="x")},
    }


@pytest.fixture
def server(contents: values.Contents) -> Server:
    return Server(values.copy(contents))


@pytest.fixture
def agent(server: Server) -> AgentSession:
    agent = AgentSession(AgentIdentity(node_name=NODE))
    server.serve(agent)
    return agent


def replica(server: Server) -> Server:
    """Another server that has seen the same, and remembers nothing."""
    return Server(values.copy(server.contents))


@pytest.mark.parametrize("other", [lambda server: server, replica], ids=["same server", "other replica"])
def test_when_nothing_changed_under_5_kb(
    server: Server, agent: AgentSession, other: Callable[[Server], Server]
) -> None:
    assert other(server).serve(agent) < 5 << 10


def test_after_a_few_changes_those_changes(server: Server, agent: AgentSession) -> None:
    server.change(1, 2, 3)
    assert server.serve(agent) < 5 << 10


def test_many_changes_of_few_services_cost_those_services(server: Server, agent: AgentSession) -> None:
    server.change(1, 2, times=200)
    assert server.serve(agent) < 5 << 10


def test_on_a_replica_without_our_history_the_differing_buckets(server: Server, agent: AgentSession) -> None:
    full = server.serve(AgentSession(AgentIdentity(node_name=NODE)))
    server.change(1, 2, 3)
    cost = replica(server).serve(agent)
    assert cost < full / 15
    assert agent.desired.counters["bucket_resets"] == 3
    assert agent.desired.counters["mismatches"] == 0


def test_a_service_that_went_meanwhile_goes_with_its_bucket(server: Server, agent: AgentSession) -> None:
    gone = {FLEET: {values.service(4): None, values.cluster_set(4): None}}
    step = values.changes(gone, server.contents)
    values.apply(server.contents, step)
    replica(server).serve(agent)
    assert values.key(4) not in agent.desired.views
    assert agent.desired.counters["bucket_resets"] == 1


def test_beyond_the_log_the_differing_buckets(contents: values.Contents) -> None:
    server = Server(values.copy(contents), LogLimits(revisions=5))
    agent = AgentSession(AgentIdentity(node_name=NODE))
    server.serve(agent)
    server.change(1, 2, times=10)
    server.serve(agent)
    assert agent.desired.counters["bucket_resets"] == 2
    assert agent.desired.counters["resets"] == 3, "those of the first snapshot"


def test_a_slow_reader_beyond_the_log_gets_the_differing_buckets(contents: values.Contents) -> None:
    server = Server(values.copy(contents), LogLimits(revisions=5))
    session = Session(server.log, node=NODE, zstd=True)
    full = sum(map(len, session.next_step(0.0)))
    server.change(1, 2, times=100)
    (*frames,) = session.next_step(0.0)
    assert sum(map(len, frames)) < full / 20
    assert session.next_step(0.0) == ()


def test_a_slow_reader_gets_the_newest_values_only(server: Server) -> None:
    session = Session(server.log, node=NODE)
    session.next_step(0.0)
    server.change(1, times=1)
    one = sum(map(len, session.next_step(0.0)))
    server.change(1, times=500)
    many = sum(map(len, session.next_step(0.0)))
    assert many < one + 100


def test_another_nodes_change_costs_nothing(server: Server) -> None:
    session = Session(server.log, node=NODE)
    session.next_step(0.0)
    server.log.apply(
        values.changes({node_scope("n2"): {values.local_set(1): values.endpoints("10.0.0.1:80")}})
    )
    assert session.next_step(0.0) == ()
    assert session.revision == server.log.revision


def test_a_change_of_a_label_or_a_lease_costs_nothing(server: Server) -> None:
    """The projection of such a change is empty (kubernetes/kubernetes#26637)."""
    session = Session(server.log, node=NODE)
    session.next_step(0.0)
    for version in range(600):
        server.log.apply({}, resource_versions={"endpointslices": version})
        assert session.next_step(0.0) == ()


def test_all_agents_are_sent_the_very_same_bytes(server: Server) -> None:
    sessions = [Session(server.log, node=f"m{number}", zstd=True) for number in range(3)]
    steps = [session.next_step(0.0) for session in sessions]
    assert len(steps[0]) > 1
    for frames in zip(*(step[:-1] for step in steps), strict=True):
        assert len({id(frame) for frame in frames}) == 1


def test_no_frame_is_near_the_limit_of_a_message(contents: values.Contents) -> None:
    big = values.copy(contents)
    big[FLEET] = {
        **big[FLEET],
        values.service("big"): values.port("big"),
        values.cluster_set("big"): values.many(40_000),
    }
    server = Server(big)
    session = Session(server.log, node=NODE, zstd=False)
    frames = session.next_step(0.0)
    server.log.apply(
        values.changes({FLEET: {values.cluster_set("big"): values.many(40_000, port=1)}}, server.contents)
    )
    frames += session.next_step(0.0)
    assert sum(map(len, frames)) > 4 << 20
    assert max(map(len, frames)) < 1 << 20


def test_one_endpoint_is_150_bytes(server: Server) -> None:
    log = server.log
    session = Session(log, node=NODE, zstd=True)
    versions = {"services": 100_000, "endpointslices": 100_000, "nodes": 100_000}
    log.apply(
        values.changes({FLEET: {values.service("frontend"): values.port("frontend")}}),
        resource_versions=versions,
    )
    session.next_step(0.0)
    old = log.scope(FLEET).get(values.cluster_set(77))
    assert isinstance(old, EndpointSet)
    new = values.endpoints("10.244.133.17:8080", *(f"{ip}:{port}" for ip, port in old.members[1:]))
    log.apply(
        values.changes({FLEET: {values.cluster_set(77): new}}, server.contents),
        trigger_times={values.key(77): 1.8e9},
        resource_versions={**versions, "endpointslices": 100_001},
    )
    (frame,) = session.next_step(1.8e9)
    assert len(frame) <= 150


def test_acknowledgments_name_the_servers_own_revision_of_what_the_kernel_holds(server: Server) -> None:
    agent = AgentSession(AgentIdentity(node_name=NODE))

    def read(log: DeltaLog, session: Session) -> list[int]:
        for frame in session.next_step(0.0):
            agent.frame(frame)
        return acks()

    def acks() -> list[int]:
        requests = []
        while (data := agent.request()) is not None:
            requests.append(decode_request(data).revision)
        return requests

    session = Session(server.log, node=NODE, position=decode_request(agent.hello("one")).position)
    assert read(server.log, session) == [], "the kernel holds nothing yet"
    agent.ack(Receipt(revision=1, seconds=0.0))
    assert acks() == [1]
    server.change(1, 2)
    assert read(server.log, session) == []
    agent.ack(Receipt(revision=2, seconds=0.0))
    assert acks() == [3], "two of the server's revisions were one of ours"
    # Another replica counts differently; the kernel holds what it says already.
    other = replica(server)
    agent.lost("cut")
    session = Session(other.log, node=NODE, position=decode_request(agent.hello("two")).position)
    assert read(other.log, session) == [1]
    # A late receipt of something older says nothing new, and takes nothing back.
    agent.ack(Receipt(revision=1, seconds=0.0))
    assert acks() == [1]
    other.log.apply(
        values.changes({node_scope("n2"): {values.local_set(1): values.endpoints("10.0.0.1:80")}})
    )
    for frame in session.idle_step(0.0):
        agent.frame(frame)
    assert acks() == [2]


def test_what_one_stream_owed_is_not_acknowledged_on_the_next(server: Server) -> None:
    agent = AgentSession(AgentIdentity(node_name=NODE))
    server.change(1, 2, 3)
    for name in (server, replica(server)):
        session = Session(name.log, node=NODE, position=decode_request(agent.hello("server")).position)
        for frame in session.next_step(0.0):
            agent.frame(frame)
    agent.ack(Receipt(revision=1, seconds=0.0))
    assert decode_request(agent.request()).revision == 1
    assert agent.request() is None
    assert agent.status.acked_revision == 1
