"""What a server knows from a real apiserver by watching is what it would know from a fresh list."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.realapi.cluster import NAMESPACE, NODES, Follower, endpoint_slice, follow, node, service, until
from tests.realapi.control_plane import ApiServer, ControlPlane, Object

pytestmark = [
    pytest.mark.realapi,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not {"KUBE_APISERVER", "ETCD"} <= os.environ.keys(),
        reason="KUBE_APISERVER and ETCD do not name the programs (`make conformance` builds them)",
    ),
]
SERVICES = 200
NO_ADDRESSES = {"clusterIP": None, "clusterIPs": None, "internalTrafficPolicy": None}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.close()


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[ApiServer]:
    """The apiserver that is watched, with a cluster in it."""
    api = ApiServer(plane, 16443)
    api.start()
    api.apply(node(number) for number in range(NODES))
    api.apply(service(number) for number in range(SERVICES))
    api.apply(endpoint_slice(number, number % 200, (number + 1) % 200) for number in range(SERVICES))
    yield api
    api.stop()


@pytest.fixture(scope="module")
def other(plane: ControlPlane) -> Iterator[ApiServer]:
    """Another apiserver on the same etcd, which streams no lists."""
    other = ApiServer(plane, 16444, "--feature-gates=WatchList=false")
    other.start()
    yield other
    other.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def follower(plane: ControlPlane, api: ApiServer) -> AsyncIterator[Follower]:
    """It watches `api` all the time."""
    async with follow(plane.kubeconfig(api)) as follower:
        yield follower


async def same_as_listed(follower: Follower, plane: ControlPlane, api: ApiServer) -> None:
    """Wait until a follower has what one that has just listed has."""
    async with follow(plane.kubeconfig(api)) as fresh:
        assert len(set(fresh.content())) > 1
        await until(lambda: follower.content() == fresh.content())


async def test_the_first_list_is_streamed(follower: Follower, plane: ControlPlane, api: ApiServer) -> None:
    assert follower.source.status["services"].streamed_lists == follower.source.status["services"].lists == 1
    assert follower.source.problems() == []
    await same_as_listed(follower, plane, api)


async def test_an_apiserver_that_streams_no_lists_gives_the_same_in_pages(
    follower: Follower, plane: ControlPlane, other: ApiServer
) -> None:
    async with follow(plane.kubeconfig(other)) as paged:
        status = paged.source.status["services"]
        # The streamed one was refused.
        assert (status.lists, status.streamed_lists) == (2, 1)
        await until(lambda: follower.content() == paged.content())


@pytest.mark.parametrize(
    ("change", "item"),
    [
        ("endpoints", endpoint_slice(1, 5, 6, 7)),
        ("no endpoints", endpoint_slice(2)),
        ("type", service(8, type="ClusterIP", externalTrafficPolicy=None, healthCheckNodePort=None)),
        ("port", service(4, ports=[{"name": "http", "port": 81, "protocol": "TCP", "targetPort": 8080}])),
        ("no addresses", service(3, type="ExternalName", externalName="example.invalid", **NO_ADDRESSES)),
        (
            "another proxy's",
            {
                **service(6),
                "metadata": {
                    "name": "web-6",
                    "namespace": NAMESPACE,
                    "labels": {"service.kubernetes.io/service-proxy-name": "other"},
                },
            },
        ),
        ("new", service(SERVICES + 1)),
    ],
)
async def test_a_change_arrives(
    change: str, item: Object, follower: Follower, plane: ControlPlane, api: ApiServer
) -> None:
    before = follower.content()
    api.apply([item])
    await until(lambda: follower.content() != before)
    await same_as_listed(follower, plane, api)


async def test_deletions_arrive(follower: Follower, plane: ControlPlane, api: ApiServer) -> None:
    before = follower.content()
    api.delete(service(number) for number in range(10, 60))
    api.delete(endpoint_slice(number) for number in range(10, 70))
    await until(lambda: follower.content() != before)
    await same_as_listed(follower, plane, api)


async def test_a_node_that_moves_to_another_zone_arrives(
    follower: Follower, plane: ControlPlane, api: ApiServer
) -> None:
    before = follower.content()
    api.apply(
        [{**node(1), "metadata": {"name": "node-1", "labels": {"topology.kubernetes.io/zone": "zone-2"}}}]
    )
    await until(lambda: follower.content() != before)
    await same_as_listed(follower, plane, api)


async def test_a_node_that_only_beats_changes_nothing(follower: Follower, api: ApiServer) -> None:
    revision = follower.log.revision
    received = follower.source.status["nodes"].received
    status = {
        "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]
    }
    api.request(
        "PATCH", "/api/v1/nodes/node-0/status", {"status": status}, kind="application/merge-patch+json"
    )
    await until(lambda: follower.source.status["nodes"].received > received)
    assert follower.log.revision == revision


async def test_a_crash_of_the_apiserver_loses_nothing(
    follower: Follower, plane: ControlPlane, api: ApiServer, other: ApiServer
) -> None:
    before = follower.content()
    api.stop()
    other.delete([service(80)])
    other.apply([endpoint_slice(81, 9)])
    assert follower.content() == before
    api.start()
    await until(lambda: follower.content() != before)
    await same_as_listed(follower, plane, api)


async def test_a_position_that_was_compacted_away_is_listed_again(
    follower: Follower, plane: ControlPlane, api: ApiServer, other: ApiServer
) -> None:
    relists = follower.source.status["services"].relists
    api.stop()
    other.delete(service(number) for number in range(90, 100))
    other.apply(endpoint_slice(number, 3) for number in range(100, 110))
    plane.compact()
    api.start()
    await until(lambda: follower.source.status["services"].relists > relists)
    await same_as_listed(follower, plane, api)
    assert follower.source.problems() == []
