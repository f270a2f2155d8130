"""Which state is newer: the store's rules, as values."""

import pytest

from rulecast_server.kube.decode import Gone, Seen
from rulecast_server.kube.objects import EndpointSlice, Meta, ObjectEvent, SliceEndpoint
from rulecast_server.kube.store import Store

A, B, C = ("default", "a"), ("default", "b"), ("default", "c")


def seen(key: tuple[str, str], version: int, ip: str = "10.0.0.1", uid: str = "u") -> Seen:
    endpoints = [SliceEndpoint(addresses=[ip])]
    item = EndpointSlice(metadata=Meta(name=key[1], namespace=key[0]), endpoints=endpoints)
    return Seen(key, uid, version, item)


def said(events: list[ObjectEvent] | None) -> list[tuple[str, str]] | None:
    if events is None:
        return None
    return [(event.name, "gone" if event.object is None else _ip(event)) for event in events]


def _ip(event: ObjectEvent) -> str:
    assert isinstance(event.object, EndpointSlice)
    assert event.object.endpoints
    return (event.object.endpoints[0].addresses or [""])[0]


@pytest.fixture
def store() -> Store:
    """a at 10, b at 20, complete up to 30."""
    made = Store("endpointslices")
    made.replace([seen(A, 10), seen(B, 20)], 30)
    return made


def test_a_list_gives_what_differs_deletions_first(store: Store) -> None:
    events = store.replace([seen(A, 10), seen(C, 35, "10.0.0.3")], 40)
    assert said(events) == [("b", "gone"), ("c", "10.0.0.3")]
    assert store.version == 40


def test_the_same_list_again_is_silent(store: Store) -> None:
    assert store.replace([seen(A, 10), seen(B, 20)], 31) == []


@pytest.mark.parametrize("uid", ["u", "another"])
def test_an_older_event_never_replaces_a_newer_object(store: Store, uid: str) -> None:
    assert store.upsert(seen(B, 19, "10.9.9.9", uid)) is None
    assert store.stale == 1
    entry = store.get(B)
    assert entry is not None
    assert entry.version == 20


def test_an_older_event_does_not_bring_back_what_was_deleted(store: Store) -> None:
    assert store.delete(Gone(B, 33)) is not None
    assert store.upsert(seen(B, 32)) is None
    assert store.get(B) is None
    assert store.upsert(seen(B, 34)) is not None


def test_an_older_deletion_does_not_remove_a_newer_object(store: Store) -> None:
    assert store.delete(Gone(B, 19)) is None
    assert store.get(B) is not None


def test_a_deletion_of_what_is_not_held_is_silent(store: Store) -> None:
    assert store.delete(Gone(C, 40)) is None
    assert store.version == 40


@pytest.mark.parametrize("lists", [1, 2, 5])
def test_older_lists_from_a_cache_are_never_taken(store: Store, lists: int) -> None:
    for _ in range(lists):
        assert store.replace([seen(A, 9, "10.9.9.9"), seen(C, 8)], 25, consistent=False) is None
    assert store.version == 30
    assert store.get(C) is None


def test_the_second_older_consistent_list_in_a_row_is_the_truth(store: Store) -> None:
    """etcd was restored from a backup."""
    assert store.replace([seen(A, 9, "10.9.9.9")], 25) is None
    assert said(store.replace([seen(A, 9, "10.9.9.9")], 26)) == [("b", "gone"), ("a", "10.9.9.9")]
    assert store.version == 26
    assert store.upsert(seen(A, 27)) is not None


@pytest.mark.parametrize("between", ["a list from a cache", "a list that is not older"])
def test_older_consistent_lists_count_only_in_a_row(store: Store, between: str) -> None:
    assert store.replace([], 25) is None
    if between == "a list from a cache":
        assert store.replace([], 26, consistent=False) is None
    else:
        assert store.replace([seen(A, 10), seen(B, 20)], 30) == []
    assert store.replace([], 27) is None


def test_in_a_list_that_is_not_older_a_lower_object_version_counts(store: Store) -> None:
    """A restored history that has passed our version; nothing else can produce it."""
    assert said(store.replace([seen(A, 10), seen(B, 15, "10.9.9.9")], 45)) == [("b", "10.9.9.9")]


def test_versions_that_are_no_numbers_are_taken_as_they_come(store: Store) -> None:
    assert store.upsert(seen(A, 0, "10.9.9.9")) is not None
    assert store.replace([seen(A, 0)], 0) is not None


def test_an_object_in_the_list_that_cannot_be_read_keeps_its_last_state(store: Store) -> None:
    assert store.replace([seen(A, 10)], 40, keep=[B]) == []
    assert store.get(B) is not None


def test_an_equal_object_moves_its_version_on_in_silence(store: Store) -> None:
    assert store.upsert(seen(A, 50)) is None
    assert store.upsert(seen(A, 49, "10.9.9.9")) is None
    assert store.stale == 1


def test_the_newest_object_or_deletion_is_told_apart_from_what_was_seen(store: Store) -> None:
    """A bookmark or a list moves on what was seen, though nothing came."""
    assert (store.changed, store.version) == (20, 30)
    store.reach(50)
    assert (store.changed, store.version) == (20, 50)
    store.delete(Gone(B, 55))
    store.replace([seen(A, 10)], 60)
    assert (store.changed, store.version) == (55, 60)
    for _ in range(2):
        store.replace([seen(A, 9)], 26)
    assert (store.changed, store.version) == (9, 26)
