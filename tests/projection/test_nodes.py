"""Nodes, service CIDRs, and what a step says and does not say."""

import pytest

from rulecast.model import FLEET, ClusterInfo, Kind, NodeInfo, ResourceId, node_scope
from rulecast_server.kube.objects import Meta, Node, NodeSpec, ObjectEvent
from rulecast_server.projection import Projector
from tests.projection.builders import (
    DNS,
    HTTP,
    Cluster,
    added,
    endpoint,
    gone,
    node,
    service,
    service_cidr,
    slice_,
)

NODE = ResourceId(Kind.NODE, "")
WEB = "default/web:http/TCP/ipv4"


def info(item: Node) -> NodeInfo:
    value = Cluster(item).state[node_scope(item.metadata.name)][NODE]
    assert isinstance(value, NodeInfo)
    return value


def test_a_bare_node_has_no_zone_and_is_eligible() -> None:
    assert info(Node(metadata=Meta(name="n1"))) == NodeInfo(name="n1")


def test_internal_addresses_come_before_external_ones_canonical_and_once() -> None:
    addresses = [
        ("ExternalIP", "203.0.113.1"),
        ("Hostname", "n1"),
        ("InternalIP", "192.168.000.001"),
        ("InternalIP", "2001:DB8::1"),
        ("ExternalIP", "192.168.0.1"),
    ]
    found = info(node("n1", "za", addresses=addresses, pod_cidrs=["10.244.1.7/24", "FD00::/64"]))
    assert found.addresses == ("192.168.0.1", "2001:db8::1", "203.0.113.1")
    assert found.pod_cidrs == ("10.244.1.0/24", "fd00::/64")
    assert found.zone == "za"


def test_the_single_pod_cidr_counts_when_there_is_no_list() -> None:
    assert info(Node(metadata=Meta(name="n1"), spec=NodeSpec(pod_cidr="10.244.1.0/24"))).pod_cidrs == (
        "10.244.1.0/24",
    )


@pytest.mark.parametrize(
    ("item", "eligible"),
    [
        (node("n1"), True),
        (node("n1", taints=["node.kubernetes.io/unschedulable"]), True),
        (node("n1", taints=["ToBeDeletedByClusterAutoscaler"]), False),
        (node("n1", deleted="2025-01-01T00:00:00Z"), False),
    ],
)
def test_a_node_on_its_way_out_is_not_eligible(item: Node, eligible: bool) -> None:
    assert info(item).eligible is eligible


def test_bad_node_addresses_are_left_out_and_reported() -> None:
    bad = node(
        "n1", addresses=[("InternalIP", "x"), ("InternalIP", "0.0.0.0")], pod_cidrs=["x", "10.0.0.0/8"]
    )
    cluster = Cluster(bad)
    assert cluster.reasons() == ["bad-address", "bad-address", "bad-cidr"]
    assert info(bad).pod_cidrs == ("10.0.0.0/8",)
    cluster.step(remove=[bad])
    assert cluster.reasons() == []
    assert node_scope("n1") not in cluster.state


def test_a_heartbeat_says_nothing_and_a_changed_node_concerns_itself_only() -> None:
    cluster = Cluster(node("n1", "za"), node("n2", "za"), service(), slice_("s", endpoint("10.1.0.1", "n1")))
    assert cluster.step(node("n1", "za", labels={"beat": "1"})).changes == {}
    changed = cluster.step(node("n1", "za", addresses=[("InternalIP", "192.168.0.1")]))
    assert {scope: list(held) for scope, held in changed.changes.items()} == {node_scope("n1"): [NODE]}


def test_service_cidrs_are_merged_sorted_and_always_there() -> None:
    cluster = Cluster()
    key = ResourceId(Kind.CLUSTER, "")
    assert cluster.state == {FLEET: {key: ClusterInfo()}}
    cluster.step(service_cidr("b", "10.97.0.1/16", "FD00::/108"), service_cidr("a", "10.96.0.0/16", "x"))
    assert cluster.state[FLEET][key] == ClusterInfo(
        service_cidrs=("10.96.0.0/16", "10.97.0.0/16", "fd00::/108")
    )
    assert cluster.reasons() == ["bad-cidr"]
    cluster.step(remove=[service_cidr("b"), service_cidr("a")])
    assert cluster.state == {FLEET: {key: ClusterInfo()}}
    assert cluster.reasons() == []


@pytest.mark.parametrize("item", [node("n9"), service("s9"), slice_("e9"), service_cidr("c9")])
def test_the_deletion_of_something_unknown_says_nothing(item) -> None:
    step = Cluster().step(remove=[item])
    assert (step.changes, step.problems) == ({}, ())


def test_only_the_newest_of_an_object_counts_within_a_step() -> None:
    projector = Projector()
    projector.flush()
    projector.apply([added(service()), gone(service())])
    assert projector.flush().changes == {}
    projector.apply([gone(service()), added(service())])
    assert list(projector.flush().changes[FLEET]) == [(Kind.SERVICE, WEB)]


def test_one_slice_changes_only_its_service_and_the_nodes_it_names() -> None:
    others = [service(f"s{i}", cluster_ips=(f"10.96.1.{i}",)) for i in range(5)]
    cluster = Cluster(
        service(), *others, *(slice_(f"s{i}", endpoint(f"10.1.1.{i}", "n2"), of=f"s{i}") for i in range(5))
    )
    step = cluster.step(slice_("web-1", endpoint("10.1.0.1", "n1")))
    assert {scope: sorted(held) for scope, held in step.changes.items()} == {
        FLEET: [(Kind.SERVICE, WEB), (Kind.CLUSTER_ENDPOINTS, WEB)],
        node_scope("n1"): [(Kind.LOCAL_ENDPOINTS, WEB)],
    }


def test_annotations_and_order_of_a_slice_change_nothing() -> None:
    a, b = endpoint("10.1.0.1", "n1"), endpoint("10.1.0.2", "n2")
    cluster = Cluster(service(), slice_("s", a, b))
    step = cluster.step(slice_("s", b, a, annotations={"x": "y"}, triggered="2025-01-01T00:00:01Z"))
    assert (step.changes, step.trigger_times) == ({}, {})


def test_trigger_times_are_the_earliest_of_the_slices_that_changed() -> None:
    web = service(ports=[HTTP, DNS])
    first = Cluster()
    first.step(web)
    projection = first.step(
        slice_("a", endpoint("10.1.0.1"), triggered="2025-01-01T00:00:02.500000000Z"),
        slice_("b", endpoint("10.1.0.2"), triggered="2025-01-01T01:00:01+01:00"),
        slice_("c", endpoint("10.1.0.3"), triggered="long ago"),
    )
    assert projection.trigger_times == {WEB: 1735689601.0}
    later = first.step(slice_("b", endpoint("10.1.0.9"), triggered="2025-01-01T01:00:01+01:00"))
    assert later.changes
    assert later.trigger_times == {}
    assert first.step(remove=[slice_("a")]).trigger_times == {}


def test_the_first_step_has_no_trigger_times() -> None:
    projector = Projector()
    projector.apply(
        [added(service()), added(slice_("a", endpoint("10.1.0.1"), triggered="2025-01-01T00:00:02Z"))]
    )
    assert projector.flush().trigger_times == {}


def test_a_problem_is_new_once_and_stands_until_it_is_mended() -> None:
    cluster = Cluster()
    bad = service(cluster_ips=("x",))
    assert [problem.reason for problem in cluster.step(bad).problems] == ["bad-address"]
    assert cluster.step(service(cluster_ips=("x",), annotations={"a": "b"})).problems == ()
    assert cluster.reasons() == ["bad-address"]
    assert cluster.step(service()).problems == ()
    assert cluster.reasons() == []
    assert [problem.reason for problem in cluster.step(bad).problems] == ["bad-address"]


def test_a_second_problem_of_an_object_does_not_repeat_the_first() -> None:
    cluster = Cluster(service(external_ips=["x"]))
    assert [problem.detail for problem in cluster.step(service(external_ips=["x", "y"])).problems] == [
        "externalIPs: not an IP address: 'y'"
    ]


@pytest.mark.parametrize(
    "event", [ObjectEvent("pods", "", "x", None), ObjectEvent("nodes", "", "x", service())]
)
def test_an_event_of_another_resource_is_refused_at_once(event: ObjectEvent) -> None:
    with pytest.raises(TypeError):
        Projector().apply([event])
