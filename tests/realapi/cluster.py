"""Objects that a real apiserver takes, and a follower of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rulecast.model import FLEET, node_scope, zone_scope
from rulecast_server.feed import DeltaLog
from rulecast_server.kube.open import open_source
from rulecast_server.kube.status import Source
from rulecast_server.pipeline import Pipeline, changed_versions, versions
from rulecast_server.settings import SourceSettings
from tests.realapi.control_plane import Object

NODES = 3
NAMESPACE = "default"
_SCOPES = (
    FLEET,
    *(zone_scope(f"zone-{number}") for number in range(NODES)),
    *(node_scope(f"node-{number}") for number in range(NODES)),
)


class Follower:
    """A server's line up to the log."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.log = DeltaLog()
        self.pipeline = Pipeline(
            publish=self.log.apply,
            versions=lambda: versions(source),
            changed=lambda: changed_versions(source),
        )
        self.events, self.synced = self.pipeline.events, self.pipeline.synced

    def content(self) -> list[int]:
        """The digest of each scope: equal for equal content."""
        return [int(self.log.scope(scope).digest) for scope in _SCOPES]


@contextlib.asynccontextmanager
async def follow(kubeconfig: Path) -> AsyncIterator[Follower]:
    """Follow a cluster while the block runs; entered once the first state is in."""
    source = await open_source(SourceSettings(kubeconfig=kubeconfig))
    follower = Follower(source)
    task = asyncio.create_task(source.run(follower))
    try:
        await until(lambda: follower.pipeline.ready or task.done())
        assert follower.pipeline.ready, source.problems()
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await source.close()


async def until(condition: object, *, within: float = 60.0) -> None:
    """Return once the condition holds."""
    assert callable(condition)
    end = asyncio.get_running_loop().time() + within
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not come about"
        await asyncio.sleep(0.05)


def node(number: int) -> Object:
    """A node in a zone of its own."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"node-{number}",
            "labels": {"topology.kubernetes.io/zone": f"zone-{number}"},
        },
    }


def service(number: int, **spec: object) -> Object:
    """One of several types by its number; the apiserver gives the addresses."""
    kind = ("ClusterIP", "NodePort", "LoadBalancer")[number % 3]
    more: Object = {"externalTrafficPolicy": "Local"} if kind == "LoadBalancer" else {}
    if number % 5 == 0:
        more["internalTrafficPolicy"] = "Local"
    if number % 7 == 0:
        more |= {"ipFamilyPolicy": "RequireDualStack"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"web-{number}", "namespace": NAMESPACE},
        "spec": {
            "type": kind,
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}],
            "sessionAffinity": "ClientIP" if number % 11 == 0 else "None",
            **more,
            **spec,
        },
    }


def endpoint_slice(number: int, *hosts: int) -> Object:
    """The slice of a service, with an endpoint for each host number."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"web-{number}-x",
            "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": f"web-{number}"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [f"10.244.{host % NODES}.{host + 1}"],
                "nodeName": f"node-{host % NODES}",
                "zone": f"zone-{host % NODES}",
                "conditions": {"ready": True, "serving": True, "terminating": False},
            }
            for host in hosts
        ],
    }
