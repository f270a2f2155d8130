"""What the pipeline says of resourceVersions is never ahead of what it has published."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rulecast_server.kube.objects import Meta, ObjectEvent, Service, ServicePortSpec, ServiceSpec
from rulecast_server.pipeline import Pipeline


class Cluster:
    """A source's versions, and what was published."""

    def __init__(self) -> None:
        self.versions = {"services": 0}
        self.published: list[tuple[bool, Mapping[str, int]]] = []
        self.pipeline = Pipeline(
            publish=self.publish, versions=lambda: dict(self.versions), changed=lambda: {"services": 7}
        )

    def publish(self, changes: Any, *, resource_versions: Mapping[str, int], **others: Any) -> None:
        assert others["changed_versions"] == {"services": 7}
        self.published.append((bool(changes), resource_versions))

    def deliver(self, name: str, version: int) -> None:
        spec = ServiceSpec(cluster_ip="172.30.0.1", ports=[ServicePortSpec(port=80)])
        service = Service(metadata=Meta(name=name, namespace="default"), spec=spec)
        self.versions["services"] = version
        self.pipeline.events([ObjectEvent("services", "default", name, service)])


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.mark.asyncio
async def test_nothing_is_said_before_the_first_whole_state(cluster: Cluster) -> None:
    cluster.deliver("a", 1)
    cluster.pipeline.refresh()
    assert cluster.published == []
    cluster.pipeline.synced()
    assert [versions for _, versions in cluster.published] == [{"services": 1}]


@pytest.mark.asyncio
async def test_a_refresh_waits_for_events_that_are_not_projected_yet(cluster: Cluster) -> None:
    cluster.pipeline.synced()
    cluster.published.clear()
    cluster.versions["services"] = 5
    cluster.pipeline.refresh()
    assert cluster.published == [(False, {"services": 5})]
    cluster.deliver("a", 6)
    cluster.pipeline.refresh()
    assert len(cluster.published) == 1
    await asyncio.sleep(0)
    cluster.pipeline.refresh()
    assert cluster.published[-1][1] == {"services": 6}
