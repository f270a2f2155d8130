"""After any failure of the API server the objects are right again, without an empty state in between."""

from pathlib import Path

import pytest

from rulecast.backoff import Backoff
from tests.fakes.apiserver import FakeApiServer
from tests.fakes.apiserver_refusals import Refusal, gone, too_large
from tests.watch.harness import Recorder, Watching, eventually, node, piece, service, watching

pytestmark = pytest.mark.asyncio


def five_changes(api: FakeApiServer) -> list[tuple[str, str, str]]:
    """Make them while nobody looks; returns what must come out."""
    api.put(service("s1", "10.96.9.1"), service("new", "10.96.9.2"))
    api.delete(service("s2"))
    api.put(piece("a", ["10.244.2.5"]))
    api.delete(piece("b", []))
    return sorted(
        [
            ("services", "s1", "set"),
            ("services", "new", "set"),
            ("services", "s2", "gone"),
            ("endpointslices", "a", "set"),
            ("endpointslices", "b", "gone"),
        ]
    )


def fill(api: FakeApiServer) -> None:
    api.put(node(), *(service(f"s{i}", f"10.96.0.{i}") for i in range(1, 6)))
    api.put(piece("a", ["10.244.1.5", "10.244.2.5"]), piece("b", ["10.244.1.6"]))


async def comes_to(line: Watching, mark: int, expected: list[tuple[str, str, str]]) -> None:
    await eventually(lambda: len(line.seen.log) - mark >= len(expected))
    await line.settled()
    assert sorted(line.seen.since(mark)) == expected


@pytest.mark.parametrize("watch_list", [True, False], ids=["streamed", "paged"])
@pytest.mark.parametrize("as_event", [True, False], ids=["event", "http"])
async def test_an_expired_version_costs_one_list_and_gives_exactly_what_changed(
    tmp_path: Path, as_event: bool, watch_list: bool
) -> None:
    """kubernetes/kubernetes#3216: the same too old version was asked for, for ever."""
    async with FakeApiServer() as api:
        api.gone_as_event, api.watch_list = as_event, watch_list
        fill(api)
        async with watching(tmp_path, api) as line:
            await line.synced()
            for i in range(100):
                api.put(node("n1", labels={"topology.kubernetes.io/zone": f"z{i}"}))
            await line.settled()
            mark = len(line.seen.log)
            await api.stop()
            expected = five_changes(api)
            api.compact()
            await api.start(port=api.port)
            await comes_to(line, mark, expected)
            for plural in ("services", "endpointslices", "nodes"):
                assert api.counters[f"list {plural}"] == 2
                assert line.source.status[plural].relists == 1
                assert line.source.status[plural].errors["expired"] == 1


async def test_a_server_that_expires_every_watch_is_listed_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubernetes/kubernetes#85342: lists by the thousand killed the control plane."""
    waits: list[float] = []
    draw = Backoff.next

    def drawn(backoff: Backoff) -> float:
        waits.append(draw(backoff))
        return waits[-1]

    monkeypatch.setattr(Backoff, "next", drawn)
    async with FakeApiServer() as api:
        fill(api)
        api.refuse("watch", "services", *[gone()] * 6)
        async with watching(tmp_path, api, streaming_lists=False, backoff=(0.01, 10.0)) as line:
            await line.synced()
            await eventually(lambda: api.watching("services") == 1)
            assert api.counters["list services"] == 7
            assert line.source.status["services"].errors == {"expired": 6}
    assert len(waits) == 6
    for doubled, wait in enumerate(waits):
        assert 0.005 * 2**doubled <= wait <= 0.01 * 2**doubled


async def test_what_was_deleted_while_away_is_gone_without_a_further_write(tmp_path: Path) -> None:
    """antrea#580, cilium#48050: stale backends until the next write, half an hour later."""
    async with FakeApiServer() as api:
        fill(api)
        async with watching(tmp_path, api) as line:
            await line.synced()
            mark = len(line.seen.log)
            await api.stop()
            api.put(piece("a", ["10.244.2.5"]))
            api.delete(piece("b", []))
            api.delete(service("s2"))
            api.compact()
            await eventually(lambda: bool(line.source.problems()))
            assert line.seen.since(mark) == []
            await api.start(port=api.port)
            await eventually(lambda: len(line.seen.log) == mark + 3)
            assert line.seen.addresses("a") == ["10.244.2.5"]
            assert line.seen.names("endpointslices") == {"a"}
            assert "s2" not in line.seen.names("services")


async def test_a_cut_connection_resumes_where_it_was_without_a_list(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        fill(api)
        async with watching(tmp_path, api) as line:
            await line.synced()
            mark = len(line.seen.log)
            await api.stop()
            expected = five_changes(api)
            await eventually(lambda: not line.source.status["services"].connected)
            assert any("services: " in problem for problem in line.source.problems())
            await api.start(port=api.port)
            await comes_to(line, mark, expected)
            assert {api.counters[f"list {plural}"] for plural in ("services", "endpointslices")} == {1}
            await eventually(lambda: line.source.problems() == [])


async def test_a_connection_cut_in_the_middle_of_a_line_loses_nothing(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        fill(api)
        async with watching(tmp_path, api) as line:
            await line.synced()
            mark = len(line.seen.log)
            await eventually(lambda: api.watching("services") == 1)
            api.send_line("services", b'{"type":"MODIFIED","object":{"metadata":{"name":"s1","na')
            await eventually(lambda: api.counters["raw services"] == 1)
            api.cut("services")
            expected = five_changes(api)
            await comes_to(line, mark, expected)
            assert api.counters["list services"] == 1


async def test_a_silent_watch_is_given_up_and_the_difference_listed(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        fill(api)
        async with watching(tmp_path, api, inactivity=0.3) as line:
            await line.synced()
            mark = len(line.seen.log)
            await eventually(lambda: api.watching("services") == 1)
            api.stalled.add("services")
            api.put(service("s1", "10.96.9.1"))
            api.delete(service("s2"))
            await eventually(lambda: api.counters["watch services"] >= 2)
            api.stalled.clear()
            await eventually(lambda: len(line.seen.log) >= mark + 2)
            assert sorted(line.seen.since(mark)) == [("services", "s1", "set"), ("services", "s2", "gone")]
            assert line.source.status["services"].errors["silent"] >= 1


async def test_a_watch_with_bookmarks_is_not_silent(tmp_path: Path) -> None:
    async with FakeApiServer(bookmark_interval=0.05) as api, watching(tmp_path, api, inactivity=0.5) as line:
        await line.synced()
        await eventually(lambda: line.source.status["services"].bookmarks >= 25)
        assert line.source.status["services"].errors == {}
        assert api.counters["list services"] == 1


@pytest.mark.parametrize("code", [500, 503, 504])
async def test_server_errors_are_waited_out(tmp_path: Path, code: int) -> None:
    async with FakeApiServer() as api:
        fill(api)
        broken = [Refusal(code, "InternalError", "etcd has no leader")] * 3
        api.refuse("watch", "services", *broken)
        async with watching(tmp_path, api) as line:
            await line.synced()
            assert line.source.status["services"].errors == {str(code): 3}
            api.refuse("watch", "services", *broken)
            api.cut("services")
            api.put(service("late"))
            await eventually(lambda: "late" in line.seen.names("services"))
            assert api.counters["list services"] == 1


async def test_a_server_behind_our_version_is_waited_for_and_then_asked_for_a_consistent_list(
    tmp_path: Path,
) -> None:
    """kubernetes/kubernetes#91073: "Too large resource version" for an hour."""
    async with FakeApiServer() as api:
        fill(api)
        async with watching(tmp_path, api) as line:
            await line.synced()
            mark = len(line.seen.log)
            api.refuse("watch", "services", gone(), *[too_large(200, 150)] * 2)
            api.cut("services")
            expected = five_changes(api)
            await comes_to(line, mark, expected)
            asked = [query for plural, query in api.requests if plural == "services"][-1]
            assert "sendInitialEvents" in asked
            assert "resourceVersion" not in asked


async def test_a_lagging_replica_brings_no_old_state_back(tmp_path: Path) -> None:
    """kubernetes/kubernetes#97294: traffic went to dead endpoints again."""
    async with FakeApiServer() as api:
        api.put(node(), service(), piece("a", ["10.244.1.5"]), piece("old", ["10.244.1.9"]))
        past = api.state.version
        async with watching(tmp_path, api) as line:
            await line.synced()
            api.put(piece("a", ["10.244.2.5"]))
            api.delete(piece("old", []))
            await line.settled()
            mark = len(line.seen.log)
            api.lagging_at, api.lagging_consistent = past, True
            # One answer from a stale copy even for the consistent list, then the replica has caught up.
            api.refuse("watch", "endpointslices", gone(), too_large(1, 0), too_large(1, 0))
            api.cut()
            await eventually(lambda: line.source.status["endpointslices"].errors["older-list"] == 1)
            api.lagging_at = None
            api.put(service("after"))
            await line.settled()
            assert line.seen.since(mark) == [("services", "after", "set")]
            assert line.seen.addresses("a") == ["10.244.2.5"]


async def test_a_cluster_restored_from_a_backup_is_followed(tmp_path: Path) -> None:
    """Its versions are lower than what was seen, for good."""
    async with FakeApiServer(bookmark_interval=0.1) as api:
        fill(api)
        backup = api.state.backup()
        async with watching(tmp_path, api) as line:
            await line.synced()
            for i in range(50):
                api.put(node("n1", annotations={"beat": str(i)}))
            expected = five_changes(api)
            await line.settled()
            assert len(line.seen.log) == 8 + len(expected)
            mark = len(line.seen.log)
            api.restore(backup)
            await eventually(lambda: line.seen.names("services") == {f"s{i}" for i in range(1, 6)})
            await eventually(lambda: line.seen.names("endpointslices") == {"a", "b"})
            assert line.seen.addresses("a") == ["10.244.1.5", "10.244.2.5"]
            # Differences only: what is the same before and after is not touched.
            assert ("services", "s3", "gone") not in line.seen.since(mark)
            api.put(service("after"))
            await eventually(lambda: "after" in line.seen.names("services"))


async def test_a_garbled_line_leads_to_a_list(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        fill(api)
        async with watching(tmp_path, api) as line:
            await line.synced()
            await eventually(lambda: api.watching("services") == 1)
            api.send_line("services", b"<html>proxy error</html>\n")
            await eventually(lambda: line.source.status["services"].relists == 1)
            assert line.source.status["services"].errors == {"malformed": 1}
            api.put(service("after"))
            await line.settled()
            assert "after" in line.seen.names("services")


async def test_an_event_that_the_sink_chokes_on_costs_no_other_and_is_tried_again(tmp_path: Path) -> None:
    """kubernetes/kubernetes#28674: a crash in a handler lost one update, and nobody was told."""
    async with FakeApiServer() as api:
        fill(api)
        seen = Recorder()
        async with watching(tmp_path, api, seen=seen) as line:
            await line.synced()
            seen.refuse = lambda event: event.name == "a"
            api.put(piece("a", ["10.244.9.9"]), *(piece(f"good{i}", []) for i in range(100)))
            await eventually(lambda: len(seen.names("endpointslices")) == 102)
            assert line.source.failures >= 2
            assert any("default/a" in problem for problem in line.source.problems())
            assert seen.addresses("a") != ["10.244.9.9"]
            seen.refuse = lambda event: False
            await eventually(lambda: seen.addresses("a") == ["10.244.9.9"])
            assert line.source.problems() == []
