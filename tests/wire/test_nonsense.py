"""Well-formed frames with values that no server of ours would send."""

import pytest

from rulecast.model import (
    FLEET,
    ClusterInfo,
    Endpoint,
    EndpointSet,
    Kind,
    NodeInfo,
    ResourceId,
    ServiceKey,
    ServicePort,
    Value,
)
from rulecast.wire.decode import decode_frame
from rulecast.wire.encode import encode_change
from rulecast.wire.frames import assemble, lay_out, mark_frame, scope_body
from rulecast.wire.messages import Slot, WireError
from rulecast_agent.feed.checkpoint import Checkpoint, CheckpointError, decode_checkpoint, encode_checkpoint

KEY = ServiceKey("ns/web:http/TCP/ipv4")
GOOD: dict[str, object] = {"key": KEY, "cluster_ip": "10.96.0.1", "port": 80}


def port(**fields: object) -> tuple[ResourceId, Value]:
    value = ServicePort(**{**GOOD, **fields})  # type: ignore[arg-type]
    return ResourceId(Kind.SERVICE, value.key), value


def endpoints(*members: Endpoint, key: str = KEY) -> tuple[ResourceId, Value]:
    return ResourceId(Kind.CLUSTER_ENDPOINTS, key), EndpointSet(members=members)


NONSENSE = {
    "cluster IP": port(cluster_ip="xyz"),
    "cluster IP not canonical": port(cluster_ip="010.96.0.1"),
    "IPv6 not canonical": port(cluster_ip="FD00::1"),
    "octet too large": port(cluster_ip="10.96.0.256"),
    "external IP": port(external_ips=("10.0.0.1/8",)),
    "load-balancer IP": port(load_balancer_ips=("",)),
    "source range": port(source_ranges=("10.0.0.1/8",)),
    "no port": port(port=0),
    "port": port(port=65_536),
    "node port": port(node_port=70_000),
    "health-check node port": port(health_check_node_port=70_000),
    "affinity": port(affinity_seconds=1 << 30),
    "key": port(key=ServiceKey("/ipv4")),
    "protocol": port(key=ServiceKey("ns/web:http/ICMP/ipv4")),
    "endpoint": endpoints(Endpoint("nowhere", 80)),
    "endpoint's port": endpoints(Endpoint("10.0.0.1", 0)),
    "endpoints' key": endpoints(Endpoint("10.0.0.1", 80), key="web"),
    "node address": (ResourceId(Kind.NODE, ""), NodeInfo(name="n1", addresses=("node",))),
    "pod CIDR": (ResourceId(Kind.NODE, ""), NodeInfo(name="n1", pod_cidrs=("10.0.0.0",))),
    "service CIDR": (ResourceId(Kind.CLUSTER, ""), ClusterInfo(service_cidrs=("all",))),
}
each = pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())


def frame(resource: ResourceId, value: Value) -> bytes:
    bodies = [scope_body(scope=FLEET), *encode_change(resource, None, value)]
    mark = mark_frame(revision=1, time_ms=0, resource_versions={})
    (only,) = assemble([lay_out(Slot.FLEET, bodies)], mark, zstd=False)
    return only


@each
def test_a_frame_with_it_is_refused(nonsense: tuple[ResourceId, Value]) -> None:
    data = frame(*nonsense)
    with pytest.raises(WireError) as caught:
        decode_frame(data)
    assert "\n" not in str(caught.value)


@each
def test_a_saved_state_with_it_is_not_used(nonsense: tuple[ResourceId, Value]) -> None:
    saved = encode_checkpoint(Checkpoint(node_name="n1", saved_at=1.0, contents=[(FLEET, [nonsense])]))
    with pytest.raises(CheckpointError):
        decode_checkpoint(saved)


def test_what_is_right_passes() -> None:
    for resource, value in (
        port(),
        port(
            cluster_ip="",
            external_ips=("2001:db8::1",),
            source_ranges=("10.0.0.0/8", "::/0"),
            node_port=30000,
        ),
        endpoints(Endpoint("10.0.0.1", 65_535), Endpoint("fd00::1", 1)),
        (ResourceId(Kind.NODE, ""), NodeInfo(name="n1", addresses=("10.0.0.1",), pod_cidrs=("10.1.0.0/24",))),
    ):
        assert decode_frame(frame(resource, value)).steps[0].operations
