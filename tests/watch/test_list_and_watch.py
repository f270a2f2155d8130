"""What comes out of a watched API server, whatever the server can and whatever it does."""

from pathlib import Path

import pytest

from rulecast_server.kube.objects import ServiceCIDR
from tests.fakes.apiserver import FakeApiServer
from tests.fakes.apiserver_refusals import Refusal, too_many
from tests.watch.harness import Recorder, cidr, eventually, node, piece, service, watching

pytestmark = pytest.mark.asyncio

EACH_WAY = pytest.mark.parametrize("watch_list", [True, False], ids=["streamed", "paged"])


@EACH_WAY
async def test_everything_listed_is_delivered_and_then_each_change(tmp_path: Path, watch_list: bool) -> None:
    async with FakeApiServer() as api:
        api.watch_list = watch_list
        api.put(node(), cidr(), *(service(f"s{i}", f"10.96.0.{i}") for i in range(1, 11)), piece("a", []))
        async with watching(tmp_path, api) as line:
            await line.synced()
            assert line.seen.names("services") == {f"s{i}" for i in range(1, 11)}
            assert line.seen.names("nodes") == {"n1"}
            await line.settled()
            mark = len(line.seen.log)
            api.put(piece("a", ["10.244.1.5"]))
            api.delete(service("s3"))
            await line.settled()
            assert sorted(line.seen.since(mark)) == [
                ("endpointslices", "a", "set"),
                ("services", "s3", "gone"),
            ]
            assert api.counters["page services"] == (0 if watch_list else 4)
            assert line.source.problems() == []


async def test_a_server_without_streamed_lists_is_asked_for_one_once(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.watch_list = False
        async with watching(tmp_path, api) as line:
            await line.synced()
            api.compact()
            api.cut("services")
            await eventually(
                lambda: line.source.status["services"].relists == 1 or api.watching("services") == 1
            )
            streamed = [query for plural, query in api.requests if "sendInitialEvents" in query]
            assert len(streamed) == 4  # one for each resource


async def test_streamed_lists_that_never_end_are_given_up_for_paged_ones(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.initial_end = False
        api.put(service())
        async with watching(tmp_path, api, inactivity=0.2) as line:
            await line.synced()
            assert line.seen.names("services") == {"web"}


@EACH_WAY
async def test_synced_comes_once_and_only_after_the_last_required_list(
    tmp_path: Path, watch_list: bool
) -> None:
    """kubernetes/kubernetes#126468: rules of late objects were removed."""
    async with FakeApiServer() as api:
        api.watch_list = watch_list
        api.put(service(), node(), *(piece(f"p{i}", ["10.244.1.5"]) for i in range(7)))
        unavailable = [Refusal(503, "ServiceUnavailable", "starting")] * 6
        api.refuse("watch" if watch_list else "list", "endpointslices", *unavailable)
        async with watching(tmp_path, api) as line:
            await eventually(lambda: line.source.status["endpointslices"].errors["503"] >= 3)
            assert line.seen.names("services") == {"web"}
            assert line.seen.synced_after == []
            await line.synced()
            assert len(line.seen.names("endpointslices")) == 7
            api.cut()
            await line.settled()
            assert len(line.seen.synced_after) == 1


async def test_empty_collections_sync_too(tmp_path: Path) -> None:
    async with FakeApiServer() as api, watching(tmp_path, api) as line:
        await line.synced()
        assert line.seen.synced_after == [0]


@pytest.mark.parametrize("code", [403, 404])
async def test_a_cluster_without_service_cidrs_syncs_and_is_healthy(tmp_path: Path, code: int) -> None:
    async with FakeApiServer() as api:
        refusal = Refusal(code, "Forbidden" if code == 403 else "NotFound", "no")
        api.refuse("watch", "servicecidrs", *[refusal] * 2)
        async with watching(tmp_path, api, optional_retry=0.5) as line:
            await line.synced()
            await eventually(lambda: line.source.status["servicecidrs"].disabled)
            assert line.source.problems() == []
            api.put(cidr())
            await eventually(lambda: ("servicecidrs", "", "kubernetes") in line.seen.objects)
            found = line.seen.objects["servicecidrs", "", "kubernetes"]
            assert isinstance(found, ServiceCIDR)
            assert not line.source.status["servicecidrs"].disabled


async def test_a_refused_field_selector_is_left_out_and_headless_services_stay_away(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.watch_list = False
        api.refuse_field_selector = True
        api.put(service("web"), service("headless", "None"))
        async with watching(tmp_path, api) as line:
            await line.synced()
            api.put(service("later", "None"))
            await line.settled()
            assert line.seen.names("services") == {"web"}


@pytest.mark.parametrize("expiries", [1, 3])
async def test_a_continue_token_that_expires_costs_nothing_but_another_list(
    tmp_path: Path, expiries: int
) -> None:
    async with FakeApiServer() as api:
        api.watch_list = False
        api.expire_continue = expiries
        api.put(*(service(f"s{i}", f"10.96.0.{i}") for i in range(1, 9)))
        async with watching(tmp_path, api) as line:
            await line.synced()
            assert len(line.seen.log) == 8
            assert line.seen.names("services") == {f"s{i}" for i in range(1, 9)}


async def test_retry_after_is_honored(tmp_path: Path) -> None:
    """kubernetes/kubernetes#85342: the load that broke the server came back at once."""
    async with FakeApiServer() as api:
        api.refuse("watch", "services", too_many(1))
        async with watching(tmp_path, api) as line:
            await line.synced()
            status = line.source.status["services"]
            assert status.errors == {"429": 1}
            # With backoff alone, a second of waiting would have held dozens of requests.
            assert sum(plural == "services" for plural, _ in api.requests) == 2


async def test_lines_cut_at_any_byte_are_whole_again(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.split = 7
        api.put(piece("a", ["10.244.1.5"], of="wäb"))
        async with watching(tmp_path, api) as line:
            await line.synced()
            for i in range(5):
                api.put(service(f"s{i}", f"10.96.0.{i}"))
            await line.settled()
            assert line.seen.addresses("a") == ["10.244.1.5"]
            assert len(line.seen.names("services")) == 5


async def test_a_line_of_megabytes_is_no_problem(tmp_path: Path) -> None:
    async with FakeApiServer() as api, watching(tmp_path, api) as line:
        await line.synced()
        api.put(service("web", annotations={"note": "x" * 3_000_000}))
        await line.settled()
        assert line.seen.names("services") == {"web"}


async def test_watches_that_end_in_time_are_followed_by_others_without_a_list(tmp_path: Path) -> None:
    async with FakeApiServer() as api, watching(tmp_path, api, watch_seconds=(1.0, 1.0)) as line:
        await line.synced()
        await eventually(lambda: api.counters["watch nodes"] >= 3)
        api.put(service())
        await line.settled()
        assert line.seen.names("services") == {"web"}
        assert api.counters["list services"] == 1


async def test_bookmarks_move_the_point_from_which_a_watch_resumes(tmp_path: Path) -> None:
    """So that a quiet resource does not expire while a busy one moves the version on."""
    async with FakeApiServer(bookmark_interval=0.05) as api, watching(tmp_path, api) as line:
        await line.synced()
        for i in range(20):
            api.put(node("n1", annotations={"beat": str(i)}))
        version = api.state.version
        await eventually(lambda: line.source.status["services"].version == version)
        api.compact()
        api.cut("services")
        api.put(service())
        await eventually(lambda: "web" in line.seen.names("services"))
        assert api.counters["list services"] == 1


async def test_two_hundred_services_created_at_once_all_arrive_whole(tmp_path: Path) -> None:
    """kpng#8: some endpoints of services that were made together stayed away."""
    async with FakeApiServer() as api, watching(tmp_path, api) as line:
        await line.synced()
        for i in range(200):
            api.put(piece(f"s{i}-x", [f"10.244.{i}.{j}" for j in range(4)], of=f"s{i}"))
            api.put(service(f"s{i}", f"10.96.1.{i}"))
        await line.settled()
        assert len(line.seen.names("services")) == 200
        assert all(len(line.seen.addresses(f"s{i}-x")) == 4 for i in range(200))


async def test_a_busy_resource_does_not_starve_another(tmp_path: Path) -> None:
    """kubernetes/kubernetes#36281: a stream of endpoints held services up."""
    busy = 3000
    order: list[str] = []

    class Order(Recorder):
        def events(self, events) -> None:  # type: ignore[no-untyped-def]
            order.extend(event.resource for event in events)

    async with FakeApiServer() as api, watching(tmp_path, api, seen=Order(), batch=50) as line:
        await line.synced()
        for i in range(busy):
            api.put(piece("busy", [f"10.{i >> 8}.{i & 255}.1"]))
        api.put(service())
        await eventually(lambda: order.count("endpointslices") == busy and "services" in order)
        assert order.index("services") < busy / 2
