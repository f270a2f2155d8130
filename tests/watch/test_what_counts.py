"""Which objects and which changes come out at all; odd and broken objects among good ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from rulecast_server.kube.objects import EndpointSlice, Node, Service
from tests.fakes.apiserver import FakeApiServer
from tests.watch.harness import Object, cidr, eventually, node, piece, service, watching

pytestmark = pytest.mark.asyncio

PROXY_NAME = "service.kubernetes.io/service-proxy-name"
HEADLESS = "service.kubernetes.io/headless"
SERVICE_NAME = "kubernetes.io/service-name"


def with_status(item: Object, **status: Any) -> Object:
    return item | {"status": item.get("status", {}) | status}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (service(), service(annotations={"leader": "n2"})),
        (service(), service(labels={"team": "blue"})),
        (service(), with_status(service(), conditions=[{"type": "Ready", "status": "True"}])),
        (piece("a", ["10.0.0.1"]), piece("a", ["10.0.0.1"], annotations={"control-plane.alpha": "x"})),
        (
            piece("a", ["10.0.0.1"]),
            piece(
                "a",
                ["10.0.0.1"],
                annotations={"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
            ),
        ),
        (piece("a", ["10.0.0.1"]), piece("a", ["10.0.0.1"], labels={"team": "blue"})),
        (node(), with_status(node(), conditions=[{"type": "Ready", "lastHeartbeatTime": "now"}])),
        (node(), with_status(node(), images=[{"names": ["x"], "sizeBytes": 5}], allocatable={"cpu": "1"})),
        (node(), node(annotations={"beat": "2"})),
        (node(), node() | {"spec": {**node()["spec"], "taints": [{"key": "node.kubernetes.io/not-ready"}]}}),
        (cidr(), cidr() | {"status": {"conditions": []}}),
    ],
    ids=[
        *("service annotation", "service label", "service condition", "slice annotation", "trigger time"),
        *(
            "slice label",
            "node heartbeat",
            "node images",
            "node annotation",
            "not-ready taint",
            "cidr status",
        ),
    ],
)
async def test_a_change_that_alters_no_rule_gives_no_event(
    tmp_path: Path, before: Object, after: Object
) -> None:
    """kubernetes/kubernetes#26637: full syncs for leases and annotations."""
    async with FakeApiServer() as api:
        api.put(before)
        async with watching(tmp_path, api) as line:
            await line.synced()
            await eventually(lambda: api.watching("servicecidrs") == 1)
            mark = len(line.seen.log)
            for item in (after, before, after):
                api.put(item)
            await line.settled()
            assert line.seen.since(mark) == []
            received = sum(status.received for status in line.source.status.values())
            assert received >= 3
            # Nor does it after a list.
            api.compact()
            api.cut()
            await line.settled()
            assert line.seen.since(mark) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (service(), service(ip="10.96.0.21")),
        (service(), with_status(service(), loadBalancer={"ingress": [{"ip": "203.0.113.10"}]})),
        (piece("a", ["10.0.0.1"]), piece("a", ["10.0.0.1"], of="other")),
        (node(), node(labels={"topology.kubernetes.io/zone": "zb"})),
        (node(), node(deletionTimestamp="2026-01-01T00:00:00Z")),
        (
            node(),
            node() | {"spec": {**node()["spec"], "taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]}},
        ),
    ],
    ids=["cluster IP", "ingress", "service of a slice", "zone", "node deletion", "autoscaler taint"],
)
async def test_a_change_that_alters_rules_gives_one_event(
    tmp_path: Path, before: Object, after: Object
) -> None:
    async with FakeApiServer() as api:
        api.put(before)
        async with watching(tmp_path, api) as line:
            await line.synced()
            mark = len(line.seen.log)
            api.put(after)
            await line.settled()
            assert [what for _, _, what in line.seen.since(mark)] == ["set"]


@pytest.mark.parametrize("label", [PROXY_NAME, HEADLESS])
@pytest.mark.parametrize("kind", ["service", "slice"])
async def test_an_object_follows_its_label_out_and_back_in(tmp_path: Path, label: str, kind: str) -> None:
    """kubernetes/kubernetes#98577: the selector hides the object, so its deletion must be derived."""

    def make(**labels: str) -> Object:
        return service(labels=labels) if kind == "service" else piece("web", ["10.0.0.1"], labels=labels)

    async with FakeApiServer() as api:
        api.put(make(), service("other"))
        async with watching(tmp_path, api) as line:
            await line.synced()
            mark = len(line.seen.log)
            api.put(make(**{label: "elsewhere"}))
            await line.settled()
            assert [what for _, _, what in line.seen.since(mark)] == ["gone"]
            api.put(make(**{label: ""}))  # existence counts, not the value
            await line.settled()
            assert len(line.seen.since(mark)) == 1
            api.put(make())
            await line.settled()
            assert [what for _, _, what in line.seen.since(mark)] == ["gone", "set"]
            assert "other" in line.seen.names("services")


async def test_a_label_set_while_away_is_a_deletion(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.put(service(), service("other"))
        async with watching(tmp_path, api) as line:
            await line.synced()
            await api.stop()
            api.put(service(labels={PROXY_NAME: "elsewhere"}))
            api.compact()
            await api.start(port=api.port)
            await eventually(lambda: line.seen.names("services") == {"other"})


BROKEN: list[tuple[str, Object]] = [
    ("a number for an address", piece("bad", []) | {"endpoints": [{"addresses": [7]}]}),
    ("text for a port", service("bad") | {"spec": {"ports": [{"port": "http"}]}}),
    ("a port far out of range of an integer", service("bad") | {"spec": {"ports": [{"port": 1e300}]}}),
    ("a list for a spec", service("bad") | {"spec": []}),
    ("numbers for labels", piece("bad", [], labels={"kubernetes.io/service-name": 5})),
    ("text for addresses", node("bad") | {"status": {"addresses": "192.0.2.1"}}),
]


@pytest.mark.parametrize("watch_list", [True, False], ids=["streamed", "paged"])
@pytest.mark.parametrize("bad", [each for _, each in BROKEN], ids=[name for name, _ in BROKEN])
async def test_a_broken_object_is_named_and_costs_no_other(
    tmp_path: Path, bad: Object, watch_list: bool
) -> None:
    """cloudnativelabs/kube-router#686: one bad value stopped all updates."""
    kind = {"Service": "services", "EndpointSlice": "endpointslices", "Node": "nodes"}[bad["kind"]]
    async with FakeApiServer() as api:
        api.watch_list = watch_list
        for i in range(5):
            api.put(service(f"x{i}"), piece(f"x{i}", ["10.0.0.1"]), node(f"x{i}"))
        api.put(bad)
        async with watching(tmp_path, api) as line:
            await line.synced()
            assert line.seen.names(kind) == {f"x{i}" for i in range(5)}
            assert any("bad" in problem for problem in line.source.problems())
            api.put(bad, service("after"), piece("after", []), node("after"))
            await line.settled()
            assert "after" in line.seen.names(kind)
            assert line.source.status[kind].bad_objects == 2
            api.delete(bad)
            await line.settled()
            assert line.source.problems() == []


async def test_an_object_that_becomes_broken_keeps_its_last_good_state(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.put(piece("a", ["10.0.0.1"]))
        async with watching(tmp_path, api) as line:
            await line.synced()
            mark = len(line.seen.log)
            api.put(piece("a", []) | {"endpoints": [{"addresses": [None]}]})
            await line.settled()
            api.compact()
            api.cut()
            await line.settled()
            assert line.seen.since(mark) == []
            assert line.seen.addresses("a") == ["10.0.0.1"]
            api.put(piece("a", ["10.0.0.2"]))
            await line.settled()
            assert line.seen.addresses("a") == ["10.0.0.2"]
            assert line.source.problems() == []


@pytest.mark.parametrize(
    "conditions",
    [None, {}, {"ready": None}, {"serving": None, "terminating": None}, {"terminating": True}, "absent"],
    ids=str,
)
async def test_conditions_may_be_null_absent_or_partial(tmp_path: Path, conditions: Any) -> None:
    """cloudnativelabs/kube-router#1583, cilium#9762: clients crashed."""
    odd = piece("a", ["10.0.0.1"])
    if conditions == "absent":
        del odd["endpoints"][0]["conditions"]
    else:
        odd["endpoints"][0]["conditions"] = conditions
    async with FakeApiServer() as api:
        api.put(odd)
        async with watching(tmp_path, api) as line:
            await line.synced()
            assert line.seen.addresses("a") == ["10.0.0.1"]
            assert line.source.problems() == []


@pytest.mark.parametrize(
    "odd",
    [
        {"ports": None},
        {"ports": [{"name": None, "port": None, "protocol": None}]},
        {"ports": [{}]},
        {"endpoints": None},
        {"endpoints": [{"addresses": ["10.0.0.1", "10.0.0.2"]}]},
        {"endpoints": [{"addresses": None, "hints": {"forZones": None}}]},
        {"endpoints": [{"addresses": [], "nodeName": None, "hints": None, "targetRef": None}]},
        {"addressType": "FQDN", "endpoints": [{"addresses": ["example.org"]}]},
        {"metadata": {"name": "odd", "namespace": "default", "labels": None, "annotations": None}},
        {"metadata": {"name": "odd", "namespace": "default"}},
        {"fieldOfTheFuture": {"a": [1, 2.5, None]}},
    ],
    ids=json.dumps,
)
async def test_odd_slices_arrive_beside_good_ones(tmp_path: Path, odd: Object) -> None:
    """kubernetes/kubernetes#129886, kubernetes/ingress-nginx#9141: crashes, or the good slice overwritten."""
    async with FakeApiServer() as api:
        api.put(piece("good", ["10.0.0.1"]), piece("odd", []) | odd)
        async with watching(tmp_path, api) as line:
            await line.synced()
            assert line.seen.names("endpointslices") == {"good", "odd"}
            assert line.source.problems() == []


@pytest.mark.parametrize("ip", ["", None, "0.0.0.0", "::", "10.96.0.300", "web.example.org"])
async def test_odd_addresses_pass_here_and_are_judged_later(tmp_path: Path, ip: str | None) -> None:
    odd = service("odd") | {"spec": {"clusterIP": ip, "clusterIPs": [ip] if ip else None, "ports": None}}
    async with FakeApiServer() as api:
        api.put(odd, *(service(f"s{i}") for i in range(50)))
        async with watching(tmp_path, api) as line:
            await line.synced()
            assert len(line.seen.names("services")) == 51
            found = line.seen.objects["services", "default", "odd"]
            assert isinstance(found, Service)
            assert found.spec.cluster_ip == ip


async def test_objects_come_reduced_to_what_counts(tmp_path: Path) -> None:
    trigger = "endpoints.kubernetes.io/last-change-trigger-time"
    async with FakeApiServer() as api:
        api.put(
            service(labels={"team": "blue"}, annotations={"note": "x"}),
            piece("a", ["10.0.0.1"], labels={"team": "blue"}, annotations={trigger: "t", "note": "x"}),
            node(annotations={"note": "x"}),
        )
        async with watching(tmp_path, api) as line:
            await line.synced()
            web = line.seen.objects["services", "default", "web"]
            a = line.seen.objects["endpointslices", "default", "a"]
            n1 = line.seen.objects["nodes", "", "n1"]
            assert isinstance(web, Service)
            assert isinstance(a, EndpointSlice)
            assert isinstance(n1, Node)
            assert (web.metadata.labels, web.metadata.annotations) == (None, None)
            assert web.metadata.creation_timestamp
            assert a.metadata.labels == {SERVICE_NAME: "web"}
            assert a.metadata.annotations == {trigger: "t"}
            assert n1.metadata.labels == {"topology.kubernetes.io/zone": "za"}
            assert {each.metadata.resource_version for each in (web, a, n1)} == {""}
