"""A source running against the stand-in, with times short enough for tests; and objects to feed it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rulecast_server.kube.auth import Load, kubeconfig_loader
from rulecast_server.kube.client import ApiClient
from rulecast_server.kube.cluster import ClusterSource
from rulecast_server.kube.listwatch import WatchSettings
from rulecast_server.kube.objects import ApiObject, EndpointSlice, ObjectEvent
from rulecast_server.kube.status import Source
from tests.fakes.apiserver import FakeApiServer

Object = dict[str, Any]

FAST: dict[str, Any] = {
    "inactivity": 5.0,
    "backoff": (0.02, 0.1),
    "watch_seconds": (60.0, 60.0),
    "optional_retry": 0.1,
    "page_size": 3,
}


class Recorder:
    """A sink that keeps all events and what they add up to."""

    def __init__(self) -> None:
        self.log: list[ObjectEvent] = []
        self.objects: dict[tuple[str, str, str], ApiObject] = {}
        self.synced_after: list[int] = []
        """How many events had come at each call of `synced`."""
        self.refuse: Callable[[ObjectEvent], bool] = lambda event: False

    def events(self, events: Sequence[ObjectEvent]) -> None:
        for event in events:
            if self.refuse(event):
                raise RuntimeError(f"hostile {event.name}")
        for event in events:
            self.log.append(event)
            key = (event.resource, event.namespace, event.name)
            if event.object is None:
                self.objects.pop(key, None)
            else:
                self.objects[key] = event.object

    def synced(self) -> None:
        self.synced_after.append(len(self.log))

    def names(self, resource: str) -> set[str]:
        return {name for kind, _, name in self.objects if kind == resource}

    def since(self, mark: int) -> list[tuple[str, str, str]]:
        """What came after a position of the log: resource, name, and what happened."""
        return [
            (event.resource, event.name, "gone" if event.object is None else "set")
            for event in self.log[mark:]
        ]

    def addresses(self, name: str) -> list[str]:
        piece = self.objects["endpointslices", "default", name]
        assert isinstance(piece, EndpointSlice)
        return [endpoint.addresses[0] for endpoint in piece.endpoints or () if endpoint.addresses]


async def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    """Wait until it holds; the limit only ends a test that has failed."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError("it never came to hold") from None


def load_from(path: Path, url: str, user: Object | None = None) -> Load:
    """A loader over a kubeconfig written to `path` (JSON is YAML)."""
    import json

    path.write_text(json.dumps(kubeconfig(url, user)))
    return kubeconfig_loader(path)


def kubeconfig(url: str, user: Object | None = None) -> Object:
    """A kubeconfig with one context."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": user or {}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
    }


@asynccontextmanager
async def running(source: Source, recorder: Recorder | None = None) -> AsyncIterator[Recorder]:
    """Run a source until the block ends; fails when it ended by itself."""
    recorder = recorder or Recorder()
    task = asyncio.create_task(source.run(recorder))
    try:
        yield recorder
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await source.close()


class Watching:
    """Stand-in, source and recorder of one test."""

    def __init__(self, api: FakeApiServer, source: ClusterSource, seen: Recorder) -> None:
        self.api = api
        self.source = source
        self.seen = seen

    async def synced(self) -> None:
        await eventually(lambda: bool(self.seen.synced_after))

    async def settled(self) -> None:
        """A write made now has come through, on each resource; what was written before it has, too."""
        marker = f"marker-{self.api.state.version}"
        self.api.put(service(marker, "10.96.255.1"), piece(marker, []), node(marker))
        await eventually(
            lambda: all(marker in self.seen.names(each) for each in ("services", "endpointslices", "nodes"))
        )
        for item in (service(marker), piece(marker, []), node(marker)):
            self.api.delete(item)
        await eventually(lambda: not any(name == marker for _, _, name in self.seen.objects))
        self.seen.log[:] = [event for event in self.seen.log if event.name != marker]


@asynccontextmanager
async def watching(
    tmp_path: Path,
    api: FakeApiServer,
    *,
    seen: Recorder | None = None,
    retry_refused: float = 0.05,
    **settings: Any,
) -> AsyncIterator[Watching]:
    """A ClusterSource on the stand-in."""
    client = await ApiClient.connect(load_from(tmp_path / "kubeconfig", api.url))
    source = ClusterSource(client, settings=WatchSettings(**(FAST | settings)), retry_refused=retry_refused)
    async with running(source, seen) as recorder:
        yield Watching(api, source, recorder)


def service(name: str = "web", ip: str = "10.96.0.20", **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": ip,
            "clusterIPs": [ip],
            "ipFamilies": ["IPv4"],
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 8080}],
        },
        "status": {"loadBalancer": {}},
    }


def piece(name: str, addresses: Sequence[str], of: str = "web", **metadata: Any) -> Object:
    labels = {"kubernetes.io/service-name": of, **metadata.pop("labels", {})}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": labels, **metadata},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [ip], "conditions": {"ready": True}, "nodeName": "n1"} for ip in addresses
        ],
        "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
    }


def node(name: str = "n1", **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": "za"}, **metadata},
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.11"}]},
    }


def cidr(name: str = "kubernetes", *cidrs: str) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": name},
        "spec": {"cidrs": list(cidrs) or ["10.96.0.0/16"]},
    }
