"""Merging updates equals applying them one after the other."""

from hypothesis import given
from hypothesis import strategies as st

from rulecast.model import ServiceKey
from rulecast.view import ServiceView, Update
from rulecast_agent.pending import Pending
from tests.agent.values import key, update, view

KEYS = [key(name) for name in "abc"]
VIEWS = [view(key(), f"10.0.0.{number}:80") for number in range(3)]


@st.composite
def updates(draw: st.DrawFn) -> list[Update]:
    made = []
    for revision in range(1, draw(st.integers(1, 8)) + 1):
        full = draw(st.booleans()) if made else True
        values = st.sampled_from(VIEWS) if full else st.one_of(st.none(), st.sampled_from(VIEWS))
        made.append(update(revision, draw(st.dictionaries(st.sampled_from(KEYS), values)), full=full))
    return made


def apply(kernel: dict[ServiceKey, ServiceView], each: Update) -> None:
    if each.full:
        kernel.clear()
    for name, value in each.services.items():
        if value is None:
            kernel.pop(name, None)
        else:
            kernel[name] = value


@given(st.data(), updates())
def test_any_merging_and_any_failures_end_at_the_same_kernel(
    data: st.DataObject, given: list[Update]
) -> None:
    pending = Pending()
    kernel: dict[ServiceKey, ServiceView] = {}
    expected: dict[ServiceKey, ServiceView] = {}
    for each in given:
        apply(expected, each)
        if data.draw(st.booleans(), label="fails while this one comes"):
            taken = pending.take()
            pending.add(each)
            if taken is not None:
                pending.restore(taken)
        else:
            pending.add(each)
        if data.draw(st.booleans(), label="applied"):
            taken = pending.take()
            assert taken is not None
            apply(kernel, taken)
    last = pending.take()
    if last is not None:
        assert last.revision == len(given)
        apply(kernel, last)
    assert kernel == expected
    assert not pending


def test_a_merged_full_update_holds_no_removals() -> None:
    pending = Pending()
    pending.add(update(1, {KEYS[0]: VIEWS[0], KEYS[1]: VIEWS[0]}, full=True))
    pending.add(update(2, {KEYS[0]: None}))
    taken = pending.take()
    assert taken is not None
    assert taken.full
    assert taken.services == {KEYS[1]: VIEWS[0]}


def test_the_earliest_trigger_of_a_service_counts() -> None:
    pending = Pending()
    pending.add(update(1, triggers={KEYS[0]: 10.0}))
    pending.add(update(2, triggers={KEYS[0]: 12.0, KEYS[1]: 13.0}))
    taken = pending.take()
    assert taken is not None
    assert taken.trigger_times == {KEYS[0]: 10.0, KEYS[1]: 13.0}


def test_what_the_feed_delivered_is_never_changed() -> None:
    delivered = {KEYS[0]: VIEWS[0]}
    pending = Pending()
    pending.add(update(1, delivered, full=True))
    pending.add(update(2, {KEYS[1]: VIEWS[1]}))
    assert delivered == {KEYS[0]: VIEWS[0]}
