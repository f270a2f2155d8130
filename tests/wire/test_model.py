"""Any interleaving of changes, cuts, replicas, restarts and damage: what an agent commits is what its server
meant.

One agent, two replicas that count revisions differently and forget after few, and a link on which frames and
requests wait to be carried.
"""

from collections import deque

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rulecast.model import FLEET, Changes, ClusterInfo, Digest, NodeInfo, node_scope
from rulecast.view import Receipt, ServiceView, Update
from rulecast.wire import frames
from rulecast.wire.messages import Ack, Hello, Resync, ScopePosition
from rulecast.wire.requests import decode_request
from rulecast_agent.feed.session import AgentIdentity, AgentSession
from rulecast_server.feed import DeltaLog, LogLimits, Session
from tests.wire import values

NODE = "n1"
_LIMITS = frames.CHUNK, frames.COMPRESS_FROM


class Replica:
    """A server: a log that has seen a prefix of all changes, in steps of its own."""

    def __init__(self, limits: LogLimits) -> None:
        self.limits = limits
        self.log = DeltaLog(limits)
        self.contents: values.Contents = {}
        self.seen = 0

    def catch_up(self, history: list[Changes], count: int) -> None:
        step = values.merged(history[self.seen : self.seen + count])
        self.seen = min(len(history), self.seen + count)
        values.apply(self.contents, step)
        self.log.apply(step, resource_versions={"services": self.seen})

    def restart(self) -> None:
        self.log = DeltaLog(self.limits)
        self.log.apply(values.changes(self.contents), resource_versions={"services": self.seen})


class Link:
    """A stream: frames that were written and not read, requests likewise."""

    def __init__(self, replica: Replica, session: Session) -> None:
        self.replica = replica
        self.log = replica.log
        self.session = session
        self.frames: deque[bytes] = deque()
        self.requests: deque[bytes] = deque()
        self.meant: values.Contents = {}
        """The server's content at the step that is being written."""
        self.marks = 0
        self.acked = 0


class WireMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Changes] = []
        self.truth: values.Contents = {}
        self.agent = AgentSession(AgentIdentity(node_name=NODE), clock=lambda: 0.0)
        self.link: Link | None = None
        self.told: dict[str, ServiceView] = {}
        self.node: NodeInfo | None = None
        self.cluster = ClusterInfo()
        self.updates = 0
        self.digests: list[int] = [0]

    @initialize(
        revisions=st.integers(0, 6),
        weight=st.integers(0, 12),
        chunk=st.sampled_from((100, 400, frames.CHUNK)),
        first=values.assignments(most=12),
    )
    def start(self, revisions: int, weight: int, chunk: int, first: dict) -> None:
        # Small enough that steps of this small world come in several frames, some of them compressed.
        frames.CHUNK, frames.COMPRESS_FROM = chunk, chunk // 2
        self.record({FLEET: {values.CLUSTER: ClusterInfo()}})
        self.record(first)
        limits = LogLimits(revisions=revisions, weight=weight)
        self.replicas = [Replica(limits), Replica(LogLimits(revisions=1, weight=1000))]
        for replica in self.replicas:
            replica.catch_up(self.history, 2)

    def record(self, assignment: dict) -> None:
        step = values.changes(assignment, self.truth)
        values.apply(self.truth, step)
        self.history.append(step)

    # The cluster and its servers.

    @rule(assignment=values.assignments())
    def change(self, assignment: dict) -> None:
        self.record(assignment)

    @rule(which=st.integers(0, 1), count=st.integers(1, 4))
    def replica_learns(self, which: int, count: int) -> None:
        self.replicas[which].catch_up(self.history, count)
        self.digests += [state.digest for state in self.replicas[which].log.scopes.values()]
        del self.digests[:-40]

    @rule(which=st.integers(0, 1))
    def replica_restarts(self, which: int) -> None:
        replica = self.replicas[which]
        if self.link is not None and self.link.replica is replica:
            self.cut()
        replica.restart()

    # The stream.

    @precondition(lambda self: self.link is None)
    @rule(which=st.integers(0, 1))
    def connect(self, which: int) -> None:
        self.open(which, decode_request(self.agent.hello("server")))

    @precondition(lambda self: self.link is None)
    @rule(which=st.integers(0, 1), data=st.data())
    def connect_with_wrong_position(self, which: int, data: st.DataObject) -> None:
        hello = decode_request(self.agent.hello("server"))
        assert isinstance(hello, Hello)
        position = {
            slot: ScopePosition(
                scope=held.scope,
                # The worst is a digest that the server knows, of content that the agent does not have.
                digest=Digest(data.draw(st.sampled_from(self.digests))),
                buckets=data.draw(st.sampled_from((held.buckets, held.buckets[::-1], ()))),
            )
            for slot, held in hello.position.items()
        }
        self.open(which, msgspec.structs.replace(hello, position=position))

    def open(self, which: int, hello: object) -> None:
        assert isinstance(hello, Hello)
        replica = self.replicas[which]
        session = Session(
            replica.log, node=hello.node_name, zstd=hello.zstd, position=hello.position, mark_interval=10
        )
        self.link = Link(replica, session)

    @precondition(lambda self: self.link is not None)
    @rule()
    def cut(self) -> None:
        self.link = None
        self.agent.lost("cut")

    @precondition(lambda self: self.link is not None and not self.link.frames)
    @rule(idle=st.booleans())
    def server_writes(self, idle: bool) -> None:
        link = self.link
        step = link.session.idle_step(0.0) if idle else link.session.next_step(0.0)
        assert all(len(frame) < frames.MAX_FRAME for frame in step)
        link.frames += step
        link.meant = values.copy(link.replica.contents)

    @precondition(lambda self: self.link is not None and self.link.frames)
    @rule()
    def agent_reads(self) -> None:
        link = self.link
        data = link.frames.popleft()
        marks = self.agent.desired.counters["marks"]
        update = self.agent.frame(data)
        if update is not None:
            self.take(update)
        if self.agent.desired.counters["marks"] > marks:
            assert not link.frames, "a mark is the end of a step"
            if not self.agent.desired.waiting:
                self.check(link.meant)
        while (request := self.agent.request()) is not None:
            link.requests.append(request)

    @precondition(lambda self: self.link is not None and self.link.requests)
    @rule()
    def server_reads(self) -> None:
        request = decode_request(self.link.requests.popleft())
        if isinstance(request, Resync):
            self.link.session.resync(request)
        else:
            assert isinstance(request, Ack)
            assert self.link.acked <= request.revision <= self.link.log.revision
            self.link.acked = request.revision

    # The agent.

    @rule(behind=st.integers(0, 2))
    def kernel_applies(self, behind: int) -> None:
        if self.updates > behind:
            self.agent.ack(Receipt(revision=self.updates - behind, seconds=0.0))

    @precondition(lambda self: self.agent.desired.position())
    @rule(
        slot=st.integers(0, 2),
        resource=values.slots(),
        data=st.data(),
    )
    def memory_is_damaged(self, slot: int, resource: tuple, data: st.DataObject) -> None:
        store = list(self.agent.desired._stores.values())[slot]
        value = data.draw(values.resource_values(resource[1]))
        if resource[1] in dict(store.resources()):
            return
        if value is not None:
            store.load(resource[1], value)

    def take(self, update: Update) -> None:
        self.updates += 1
        assert update.revision == self.updates
        assert update.full == (self.updates == 1)
        for key, view in update.services.items():
            assert self.told.get(key) != view, "an update names what changed, and nothing else"
            if view is None:
                del self.told[key]
            else:
                self.told[key] = view
        self.node, self.cluster = update.node, update.cluster

    def check(self, meant: values.Contents) -> None:
        assert self.told == values.node_view(meant, NODE)
        assert self.node == meant.get(node_scope(NODE), {}).get(values.NODE)
        assert self.cluster == meant[FLEET].get(values.CLUSTER, ClusterInfo())

    @invariant()
    def updates_add_up_to_the_views(self) -> None:
        assert self.told == self.agent.desired.views
        assert not self.agent.desired.counters["unverified"]

    def teardown(self) -> None:
        try:
            if self.history:
                self.come_to_rest()
        finally:
            frames.CHUNK, frames.COMPRESS_FROM = _LIMITS

    def come_to_rest(self) -> None:
        # Left alone, it always ends well, and soon.
        if self.link is None:
            self.connect(0)
        while self.link.frames:
            self.agent_reads()
        while self.link.requests:
            self.server_reads()
        for _ in range(10):
            # Idle marks find what was damaged behind the digests' back.
            self.server_writes(idle=True)
            while self.link.frames:
                self.agent_reads()
            while self.link.requests:
                self.server_reads()
        assert not self.agent.desired.waiting
        self.check(self.link.replica.contents)
        self.agent.ack(Receipt(revision=self.updates, seconds=0.0))
        self.agent.request()
        assert self.agent.status.acked_revision == self.link.log.revision


WireMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWire = WireMachine.TestCase
