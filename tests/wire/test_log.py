"""The delta log merges, remembers as far as its budget goes, and encodes once."""

import pytest

from rulecast.digest import bucket_of
from rulecast.model import FLEET, Changes, ClusterInfo, EndpointSet, NodeInfo, node_scope, zone_scope
from rulecast.wire.decode import decode_frame
from rulecast.wire.frames import CHUNK, COMPRESS_FROM, NOTHING
from rulecast.wire.messages import SetChange
from rulecast_server.feed import DeltaLog, LogLimits
from tests.wire import values

WEB = values.cluster_set("web")
ONE = values.endpoints("10.0.0.1:80")
TWO = values.endpoints("10.0.0.1:80", "10.0.0.2:80")
THREE = values.endpoints("10.0.0.2:80", "10.0.0.3:80")


class Driver:
    """A log and the content that it was given."""

    def __init__(self, **limits: int) -> None:
        self.log = DeltaLog(LogLimits(**limits))
        self.contents: values.Contents = {}

    def set(self, *, scope=FLEET, triggers=None, **fields) -> None:
        self.put({scope: {values.cluster_set(name): value for name, value in fields.items()}}, triggers)

    def put(self, assignment, triggers=None, versions=None) -> None:
        step: Changes = values.changes(assignment, self.contents)
        values.apply(self.contents, step)
        self.log.apply(step, trigger_times=triggers, resource_versions=versions)


def operations(encoded):
    frames = [decode_frame(data) for data in (*encoded.large, encoded.small)]
    return [operation for frame in frames for step in frame.steps for operation in step.operations]


def test_the_first_step_makes_a_revision_even_when_there_is_nothing() -> None:
    log = DeltaLog()
    assert not log.synced
    assert log.apply({}) == {FLEET}
    assert log.synced
    assert log.revision == 1
    assert log.apply({}) == frozenset()
    assert log.revision == 1


def test_several_steps_are_one_difference() -> None:
    driver = Driver()
    driver.set(web=ONE)
    driver.set(web=TWO)
    driver.set(web=THREE)
    state = driver.log.scope(FLEET)
    assert operations(state.delta(1)) == [SetChange(WEB, list(THREE.members), list(ONE.members), 0, 0)]
    assert operations(state.delta(2)) == [SetChange(WEB, [THREE.members[1]], [ONE.members[0]], 0, 0)]


def test_what_was_undone_is_not_sent() -> None:
    driver = Driver()
    driver.set(web=ONE)
    driver.set(web=TWO)
    driver.set(web=ONE)
    assert driver.log.scope(FLEET).delta(1) is NOTHING
    driver.set(web=None)
    assert driver.log.scope(FLEET).delta(3) is not NOTHING


def test_a_set_that_came_and_went_is_not_sent() -> None:
    driver = Driver()
    driver.set(api=ONE)
    driver.set(web=ONE)
    driver.set(web=None)
    assert driver.log.scope(FLEET).delta(1) is NOTHING


def test_the_earliest_trigger_of_merged_steps_counts() -> None:
    driver = Driver()
    driver.set(web=ONE)
    driver.set(web=TWO, triggers={values.key("web"): 100.5})
    driver.set(web=THREE, triggers={values.key("web"): 101.5})
    (operation,) = operations(driver.log.scope(FLEET).delta(1))
    assert operation.trigger_time_ms == 100_500
    (operation,) = operations(driver.log.scope(FLEET).delta(2))
    assert operation.trigger_time_ms == 101_500


def test_a_delta_is_encoded_once() -> None:
    driver = Driver()
    driver.set(web=ONE)
    driver.set(web=TWO)
    state = driver.log.scope(FLEET)
    first = state.delta(1)
    assert state.delta(1) is first
    driver.set(scope=zone_scope("x"), web=ONE)
    assert state.delta(1) is first, "another scope's change is not ours"
    driver.set(web=THREE)
    assert state.delta(1) is not first


def test_a_digest_names_the_newest_revision_that_had_it() -> None:
    driver = Driver()
    driver.set(web=ONE)
    state = driver.log.scope(FLEET)
    digests = [state.digest]
    for value in (TWO, THREE, ONE, TWO):
        driver.set(web=value)
        digests.append(state.digest)
    assert digests[0] == digests[3]
    assert state.revision_of(digests[0]) == 4
    assert state.revision_of(digests[2]) == 3
    assert state.revision_of(digests[1]) == 5, "the head's"
    assert state.revision_of(12345) is None


@pytest.mark.parametrize("limits", [{"revisions": 3}, {"weight": 3}])
def test_history_is_bounded(limits: dict[str, int]) -> None:
    driver = Driver(**limits)
    driver.set(web=ONE)
    state = driver.log.scope(FLEET)
    old = state.digest
    for number in range(2, 12):
        driver.set(web=values.endpoints(f"10.0.0.{number}:80"))
    assert driver.log.revision == 11
    assert driver.log.horizon == 8
    assert driver.log.retained[0] == 3
    assert state.revision_of(old) is None
    assert operations(state.delta(8))


def test_large_sets_weigh_more() -> None:
    driver = Driver(weight=1000)
    driver.set(web=values.many(4000), api=values.many(4000, port=1))
    for number in range(1, 20):
        driver.set(web=EndpointSet(members=values.many(4000).members[number:]))
    revisions, weight = driver.log.retained
    assert revisions == 2, "of 19"
    assert weight <= 1000


def test_a_step_beyond_the_budget_leaves_no_history() -> None:
    driver = Driver(weight=4)
    driver.set(web=ONE)
    driver.put({FLEET: values.fleet_of(20)})
    assert driver.log.horizon == driver.log.revision == 2


def test_scopes_of_nodes_that_are_gone_are_forgotten() -> None:
    driver = Driver(revisions=5)
    driver.set(web=ONE)
    for number in range(50):
        scope = node_scope(f"n{number}")
        driver.put({scope: {values.NODE: NodeInfo(name=f"n{number}")}})
        driver.put({scope: {values.NODE: None}})
    assert len(driver.log.scopes) <= 6


def test_a_snapshot_is_shared_while_it_is_not_far_behind() -> None:
    driver = Driver()
    driver.put({FLEET: values.fleet_of(1000)})
    state = driver.log.scope(FLEET)
    first = state.snapshot(driver.log.horizon)
    assert first.revision == 1
    driver.set(web=ONE)
    assert state.snapshot(driver.log.horizon) is first
    assert len(operations(state.delta(first.revision))) == 1
    for number in range(400):
        driver.set(**{str(number): ONE})
    assert state.snapshot(driver.log.horizon).revision == driver.log.revision


def test_a_snapshot_behind_the_horizon_is_made_anew() -> None:
    driver = Driver(revisions=2)
    driver.put({FLEET: values.fleet_of(1000)})
    state = driver.log.scope(FLEET)
    first = state.snapshot(driver.log.horizon)
    for value in (ONE, TWO, THREE):
        driver.set(web=value)
    second = state.snapshot(driver.log.horizon)
    assert second is not first
    assert second.revision >= driver.log.horizon


def test_large_parts_are_cut_and_compressed_once() -> None:
    driver = Driver()
    driver.put({FLEET: values.fleet_of(3000)})
    encoded = driver.log.scope(FLEET).snapshot(1).encoded
    assert len(encoded.large) > 1
    assert all(len(frame) <= CHUNK + 64 for frame in encoded.large)
    assert encoded.size > COMPRESS_FROM
    assert encoded.compressed is encoded.compressed
    assert sum(map(len, encoded.compressed)) < encoded.size / 4
    assert [decode_frame(data) for data in encoded.compressed] == [
        decode_frame(data) for data in encoded.large
    ]


def test_only_differing_buckets_are_sent() -> None:
    driver = Driver()
    driver.put({FLEET: values.fleet_of(2000)})
    state = driver.log.scope(FLEET)
    before = state.buckets
    driver.set(**{"7": TWO, "8": THREE})
    encoded = state.catch_up(before)
    (step,) = [step for data in (*encoded.large, encoded.small) for step in decode_frame(data).steps]
    assert len(step.reset) == 2
    assert {values.cluster_set(7), values.cluster_set(8)} < {each.resource for each in step.operations}
    assert len(step.operations) < 2 * 2000 * 5 / 256 * 2
    assert state.catch_up(before) is encoded, "all agents that were there ask for the same"


def test_each_bucket_is_told_from_the_others() -> None:
    driver = Driver()
    scope = zone_scope("x")
    found = set()
    for number in range(100):
        driver.set(scope=scope, **{str(number): ONE})
        state = driver.log.scope(scope)
        before = state.buckets
        driver.set(scope=scope, **{str(number): TWO})
        index = bucket_of(values.key(number), 16)
        encoded = state.catch_up(before)
        (step,) = decode_frame(encoded.small).steps
        assert step.reset == (index,)
        found.add(index)
    assert found == set(range(16))


def test_a_bucket_is_left_alone_only_when_what_was_sent_is_the_heads_as_well() -> None:
    driver = Driver()
    scope = zone_scope("x")
    driver.set(scope=scope, web=ONE)
    state = driver.log.scope(scope)
    at_head = state.buckets
    driver.set(scope=scope, web=TWO)
    on_its_way = state.buckets
    driver.set(scope=scope, web=ONE)
    assert state.catch_up(at_head) is state.confirmation()
    (step,) = decode_frame(state.catch_up(at_head, on_its_way).small).steps
    assert step.reset == (bucket_of(values.key("web"), 16),)


def test_what_was_encoded_of_an_older_head_is_not_sent() -> None:
    driver = Driver()
    driver.put({FLEET: values.fleet_of(2000)})
    state = driver.log.scope(FLEET)
    before = state.buckets
    driver.set(web=ONE)
    encoded = (state.proof(), state.confirmation(), state.catch_up(before), state.delta(1))
    driver.set(web=TWO)
    for old, new in zip(
        encoded, (state.proof(), state.confirmation(), state.catch_up(before), state.delta(1)), strict=True
    ):
        (step,) = decode_frame(new.small or new.large[0]).steps
        assert step.digest == state.digest
        assert new is not old


def test_when_most_buckets_differ_a_snapshot_is_cheaper() -> None:
    driver = Driver()
    driver.put({FLEET: values.fleet_of(2000)})
    state = driver.log.scope(FLEET)
    assert state.catch_up((0,) * 256) is None
    assert state.catch_up(state.buckets[:16]) is None


def test_marks_name_the_resource_versions_that_moved() -> None:
    driver = Driver()
    driver.put({FLEET: {values.CLUSTER: ClusterInfo()}}, versions={"services": 1, "nodes": 1})
    driver.put({FLEET: {WEB: ONE}}, versions={"services": 2, "nodes": 1})
    driver.put({FLEET: {WEB: TWO}}, versions={"services": 2, "nodes": 3})

    def mark(since: int):
        return decode_frame(driver.log.mark(since, 123_456, 10_000)).mark

    assert mark(2).resource_versions == {"nodes": 3}
    assert mark(3).resource_versions == {"services": 2, "nodes": 3}, "an idle mark tells all"
    assert mark(0).interval_ms == 10_000
    assert mark(2).interval_ms == 0
    assert mark(2).time_ms == 123_400
    driver.put({}, versions={"services": 9, "nodes": 3})
    assert mark(2).resource_versions == {"services": 9, "nodes": 3}
    assert mark(2).revision == 3
