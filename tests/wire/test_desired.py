"""The agent's state commits whole steps, hands on differences, and never trusts what it cannot prove."""

import pytest

from rulecast.model import FLEET, ClusterInfo, Endpoint, NodeInfo, ServiceKey, node_scope, zone_scope
from rulecast.v1 import rules_pb2 as pb
from rulecast.view import ServiceView
from rulecast.wire.decode import decode_frame
from rulecast.wire.messages import Frame, Resync, Slot, WireError
from rulecast_agent.feed.desired import Commit, Desired
from rulecast_server.feed import DeltaLog, Session
from tests.wire import values

NODE = "n1"
WEB = values.cluster_set("web")


class Pair:
    """An agent's state and its server, and what lies between."""

    def __init__(self, contents: values.Contents | None = None) -> None:
        self.log = DeltaLog()
        self.contents: values.Contents = {}
        self.desired = Desired(NODE)
        self.put({FLEET: {values.CLUSTER: ClusterInfo()}, **(contents or {})})
        self.session = Session(self.log, node=NODE)

    def put(self, assignment) -> None:
        step = values.changes(assignment, self.contents)
        values.apply(self.contents, step)
        self.log.apply(step)

    def frames(self, *, idle: bool = False) -> list[Frame]:
        step = self.session.idle_step(0.0) if idle else self.session.next_step(0.0)
        return [decode_frame(data) for data in step]

    def step(self, *, idle: bool = False) -> Commit | None:
        commit = None
        for frame in self.frames(idle=idle):
            commit = self.desired.frame(frame)
        return commit

    def settle(self) -> list[Commit]:
        """Answer questions until there are none."""
        commits = []
        while (commit := self.step(idle=not commits)) is not None:
            commits.append(commit)
            if commit.resync is not None:
                self.session.resync(commit.resync)
        return commits

    def damage(self, slot: Slot = Slot.FLEET) -> None:
        self.desired._stores[slot].load(values.service("ghost"), values.port("ghost"))


def start(**fields) -> Pair:
    fleet = {values.service("web"): values.port("web"), WEB: values.endpoints("10.0.0.1:80")}
    pair = Pair({FLEET: fleet, **fields})
    pair.step()
    return pair


def test_the_first_update_is_full_and_later_ones_name_what_changed() -> None:
    pair = Pair({FLEET: {values.service("web"): values.port("web"), WEB: values.endpoints("10.0.0.1:80")}})
    first = pair.step().update
    assert first.full
    assert first.revision == 1
    assert first.services == {
        values.key("web"): ServiceView(service=values.port("web"), cluster=(Endpoint("10.0.0.1", 80),))
    }
    pair.put({FLEET: {values.service("api"): values.port("api")}})
    second = pair.step().update
    assert not second.full
    assert second.revision == 2
    assert second.services.keys() == {values.key("api")}
    pair.put({FLEET: {values.service("api"): None}})
    assert pair.step().update.services == {values.key("api"): None}


def test_a_service_without_a_frontend_is_no_service() -> None:
    pair = Pair({FLEET: {WEB: values.endpoints("10.0.0.1:80")}})
    assert pair.step().update.services == {}
    pair.put({FLEET: {WEB: values.endpoints("10.0.0.2:80")}})
    assert pair.step().update is None


@pytest.mark.parametrize(
    ("zone", "node", "expected"),
    [
        (None, None, ("10.0.0.1",)),
        (values.endpoints("10.0.1.1:80"), None, ("10.0.1.1",)),
        (None, values.endpoints("10.0.2.1:80"), ("10.0.2.1",)),
        (values.endpoints("10.0.1.1:80"), values.endpoints("10.0.2.1:80"), ("10.0.2.1",)),
        (values.endpoints(), None, ()),
        (values.endpoints("10.0.1.1:80"), values.endpoints(), ()),
    ],
)
def test_the_most_specific_scope_wins_even_when_it_is_empty(zone, node, expected) -> None:
    pair = start()
    pair.put({node_scope(NODE): {values.NODE: NodeInfo(name=NODE, zone="x")}})
    pair.put({zone_scope("x"): {WEB: zone}, node_scope(NODE): {WEB: node}})
    pair.step()
    view = pair.desired.views[values.key("web")]
    assert tuple(ip for ip, _ in view.cluster) == expected


def test_a_node_that_moves_gets_its_new_zone_and_forgets_the_old_one() -> None:
    pair = start()
    pair.put(
        {
            node_scope(NODE): {values.NODE: NodeInfo(name=NODE, zone="x")},
            zone_scope("x"): {WEB: values.endpoints("10.0.1.1:80")},
            zone_scope("y"): {WEB: values.endpoints("10.0.2.1:80")},
        }
    )
    pair.step()
    pair.put({node_scope(NODE): {values.NODE: NodeInfo(name=NODE, zone="y")}})
    update = pair.step().update
    assert update.node.zone == "y"
    assert update.services[values.key("web")].cluster == (Endpoint("10.0.2.1", 80),)
    pair.put({zone_scope("x"): {WEB: values.endpoints()}})
    assert pair.step() is None, "the old zone's changes are no longer ours"
    pair.put({node_scope(NODE): {values.NODE: None}})
    update = pair.step().update
    assert update.node is None
    assert update.services[values.key("web")].cluster == (Endpoint("10.0.0.1", 80),)


def test_nothing_takes_effect_before_the_mark() -> None:
    pair = Pair({FLEET: {values.service("web"): values.port("web")}})
    (frame,) = pair.frames()
    assert pair.desired.frame(Frame(steps=frame.steps, mark=None)) is None
    assert not pair.desired.views
    assert pair.desired.position() == {}
    # The stream is cut here; another server begins anew.
    pair.desired.begin()
    pair.session = Session(pair.log, node=NODE, position=pair.desired.position())
    assert pair.step().update.full


def test_what_was_staged_of_a_cut_stream_has_no_part_in_the_next() -> None:
    pair = start()
    pair.put({FLEET: {values.service("ghost"): values.port("ghost")}})
    (frame,) = pair.frames()
    pair.desired.frame(Frame(steps=frame.steps, mark=None))
    pair.put({FLEET: {values.service("ghost"): None}})
    pair.desired.begin()
    pair.session = Session(pair.log, node=NODE, position=pair.desired.position())
    commit = pair.step()
    assert (commit.committed, commit.update) == (True, None)
    assert pair.desired.views.keys() == {values.key("web")}


def test_a_lost_change_is_noticed_not_applied_around_and_mended_by_buckets() -> None:
    pair = start()
    pair.put({FLEET: {values.service("api"): values.port("api")}})
    pair.frames()
    pair.put({FLEET: {WEB: values.endpoints("10.0.0.2:80")}})
    commit = pair.step()
    assert not commit.committed
    assert commit.update is None
    assert pair.desired.waiting
    assert pair.desired.problems
    assert pair.desired.views[values.key("web")].cluster == (Endpoint("10.0.0.1", 80),)
    pair.session.resync(commit.resync)
    commit = pair.step()
    assert commit.committed
    assert commit.update.services.keys() == {values.key("api"), values.key("web")}
    assert pair.desired.views == values.node_view(pair.contents, NODE)
    assert pair.desired.counters["resets"] == 3, "those of the first snapshot"
    assert pair.desired.counters["mismatches"] == 1
    assert not pair.desired.problems


@pytest.mark.parametrize("slot", Slot)
def test_damage_is_found_by_an_idle_mark(slot: Slot) -> None:
    pair = start()
    pair.damage(slot)
    commits = pair.settle()
    assert [commit.committed for commit in commits] == [False, True]
    assert pair.desired.views == values.node_view(pair.contents, NODE)
    assert pair.desired.counters["bucket_resets"] == 1


def test_changes_go_on_while_a_question_is_open() -> None:
    pair = start()
    pair.damage()
    question = pair.step(idle=True).resync
    for number in range(3):
        pair.put({FLEET: {WEB: values.endpoints(f"10.0.1.{number}:80")}})
        commit = pair.step()
        assert (commit.committed, commit.resync) == (False, None), "asked once"
    pair.session.resync(question)
    assert pair.step().update.services.keys() == {values.key("web")}
    assert pair.desired.views == values.node_view(pair.contents, NODE)


def test_a_question_that_stays_unanswered_is_put_again() -> None:
    pair = start()
    pair.damage()
    questions = [pair.step(idle=True).resync is not None for _ in range(21)]
    assert questions == [number % 10 == 0 for number in range(21)]


def test_when_buckets_do_not_help_everything_is_asked_for() -> None:
    pair = start()
    pair.damage()
    commit = pair.step(idle=True)
    # An answer that confirms what is wrong.
    pair.session.resync(commit.resync)
    frames = pair.frames()
    wrong = [Frame(steps=[_without_reset(step) for step in frame.steps], mark=frame.mark) for frame in frames]
    commit = [pair.desired.frame(frame) for frame in wrong][-1]
    assert commit.resync == Resync(id=2, position={})
    pair.session.resync(commit.resync)
    assert pair.step().committed
    assert pair.desired.views == values.node_view(pair.contents, NODE)


def _without_reset(step):
    return type(step)(slot=step.slot, scope=step.scope, digest=step.digest)


def test_content_that_cannot_be_verified_is_used_and_reported() -> None:
    """A newer server counts something in its digest that this version does not read."""
    pair = start()

    def newer(frame: Frame) -> Frame:
        steps = [
            type(step)(
                slot=step.slot,
                scope=step.scope,
                reset=step.reset,
                operations=step.operations,
                unknown=1,
                digest=99,
            )
            for step in frame.steps
        ]
        return Frame(steps=steps, mark=frame.mark)

    pair.put({FLEET: {WEB: values.endpoints("10.0.0.9:80")}})
    commits = []
    for _ in range(5):
        for frame in pair.frames(idle=True):
            commits.append(pair.desired.frame(newer(frame)))
            if commits[-1].resync is not None:
                pair.session.resync(commits[-1].resync)
    assert [commit.committed for commit in commits] == [False, False, True, True, True]
    assert commits[2].update.services.keys() == {values.key("web")}
    assert pair.desired.counters["unverified"] == 1
    assert any("does not match" in line for line in pair.desired.problems)
    assert any("does not know" in line for line in pair.desired.problems)


def test_unknown_fields_do_not_disturb_the_digest() -> None:
    """The server is newer: its Service has a field that this version has never heard of."""
    pair = start()
    known = pb.Service(key=values.key("web"), cluster_ip="10.96.0.1", port=81)
    newer = pb.Service.FromString(known.SerializeToString() + b"\x92\x03\x03new")
    frame = pb.Frame(fleet=pb.ScopeFrame(changes=[pb.Change(service=newer)]), mark=pb.Mark(revision=9))
    pair.desired.frame(decode_frame(frame.SerializeToString()))
    seen = pair.desired._stores[Slot.FLEET].digest
    # The same again changes nothing, and taking it away leaves what there was.
    pair.desired.frame(decode_frame(frame.SerializeToString()))
    assert pair.desired._stores[Slot.FLEET].digest == seen
    plain = pb.Frame(fleet=pb.ScopeFrame(changes=[pb.Change(service=known)]), mark=pb.Mark(revision=9))
    pair.desired.frame(decode_frame(plain.SerializeToString()))
    assert pair.desired._stores[Slot.FLEET].digest != seen
    service = dict(pair.desired._stores[Slot.FLEET].resources())[values.service("web")]
    assert service.port == 81


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (pb.Frame(mark=pb.Mark(revision=1)), "before all scopes"),
        (pb.Frame(fleet=pb.ScopeFrame(scope="node/n1"), mark=pb.Mark()), "in the fleet field"),
        (pb.Frame(node=pb.ScopeFrame(reset=pb.Reset()), mark=pb.Mark()), "without the scope's name"),
        (pb.Frame(zone=pb.ScopeFrame(scope="zone/far", digest="0" * 16), mark=pb.Mark()), "upon 'zone/'"),
        (pb.Frame(fleet=pb.ScopeFrame(digest="0" * 16), mark=pb.Mark()), "that was not sent"),
    ],
)
def test_what_no_server_would_send_is_an_error(frame: pb.Frame, words: str) -> None:
    desired = Desired(NODE)
    with pytest.raises(WireError, match=words):
        desired.frame(decode_frame(frame.SerializeToString()))
    assert not desired.views


def test_trigger_times_come_with_the_services_that_moved() -> None:
    pair = start()
    step = values.changes({FLEET: {WEB: values.endpoints("10.0.0.5:80")}}, pair.contents)
    pair.log.apply(step, trigger_times={values.key("web"): 1700000000.5, ServiceKey("other"): 3.0})
    assert pair.step().update.trigger_times == {values.key("web"): 1700000000.5}


def test_restored_content_is_a_full_update_and_a_position() -> None:
    pair = start()
    restored = Desired(NODE)
    update = restored.restore(pair.desired.contents())
    assert update.full
    assert restored.views == pair.desired.views
    assert restored.position() == pair.desired.position()
    pair.session = Session(pair.log, node=NODE, position=restored.position())
    pair.desired = restored
    assert pair.step().update is None
    pair.put({FLEET: {values.service("web"): None}})
    update = pair.step().update
    assert (update.full, update.services) == (False, {values.key("web"): None})


def test_an_answer_holds_whatever_is_on_its_way_before_it() -> None:
    pair = start()
    pair.put({FLEET: {values.service("api"): values.port("api")}})
    pair.frames()
    # What was lost leaves the agent at a revision that the server knows well.
    question = pair.step(idle=True).resync
    pair.put({FLEET: {WEB: values.endpoints("10.0.0.1:80", "10.0.0.2:80")}})
    on_its_way = pair.frames()
    pair.put({FLEET: {WEB: values.endpoints("10.0.0.1:80")}})
    pair.session.resync(question)
    answer = pair.frames()
    for frame in (*on_its_way, *answer):
        commit = pair.desired.frame(frame)
    assert commit.committed
    assert pair.desired.views == values.node_view(pair.contents, NODE)
    assert pair.desired.counters["resets"] == 3, "those of the first snapshot"
