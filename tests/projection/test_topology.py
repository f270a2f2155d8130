"""Hints: all or nothing, node before zone before everywhere (KEP-2433, KEP-3015)."""

import pytest

from rulecast.model import FLEET, Kind, node_scope, zone_scope
from rulecast_server.kube.objects import SliceEndpoint
from tests.projection.builders import Cluster, draining, endpoint, node, port, service, slice_

WEB = "default/web:http/TCP/ipv4"
A, B, C, D = (f"10.1.0.{i}" for i in range(1, 5))


def hinted(ip: str, *zones: str, on: str | None = None, nodes: tuple[str, ...] = (), ready: bool = True):
    return endpoint(ip, on, zones=zones, nodes=nodes, ready=ready)


FOUR = [hinted(A, "za"), hinted(B, "zb"), hinted(C, "zc"), hinted(D, "za")]
UNHINTED = endpoint(D)


@pytest.mark.parametrize(
    ("zone", "endpoints", "used"),
    [
        ("za", FOUR, [A, D]),
        (None, FOUR, [A, B, C, D]),
        ("", FOUR, [A, B, C, D]),
        ("zx", FOUR, [A, B, C, D]),
        ("za", [hinted(A, "za", ready=False), hinted(B, "zb"), hinted(D, "za")], [D]),
        ("za", [hinted(A, "za", ready=False), hinted(B, "zb"), hinted(C, "zc")], [B, C]),
        ("za", [hinted(A, "za"), hinted(B, "zb"), UNHINTED], [A, B, D]),
        ("za", [hinted(A, "za"), hinted(B, "zb"), draining(D)], [A]),
        ("za", [hinted(A, "za", "zb"), hinted(B, "zb", "zc")], [A]),
        ("zb", [hinted(A, "za", "zb"), hinted(B, "zb", "zc")], [A, B]),
        ("za", [], []),
        ("za", [draining(A), draining(B)], [A, B]),
        # Node hints: for us, for others only, on some only.
        ("za", [hinted(A, "za", nodes=("n1",)), hinted(B, "za", nodes=("n2",))], [A]),
        ("za", [hinted(A, "za", nodes=("n2",)), hinted(B, "zb", nodes=("n3",))], [A]),
        ("zx", [hinted(A, "za", nodes=("n2",)), hinted(B, "zb", nodes=("n3",))], [A, B]),
        (None, [hinted(A, nodes=("n1",)), hinted(B, nodes=("n2",))], [A]),
        (None, [hinted(A, nodes=("n2",)), hinted(B, nodes=("n2",))], [A, B]),
        ("za", [hinted(A, "zb", nodes=("n1",)), hinted(B, "za")], [B]),
        ("za", [hinted(A, nodes=("n1",)), hinted(B, "za")], [A, B]),
    ],
)
def test_a_node_uses_what_is_hinted_to_it_if_all_hints_are_complete(
    zone: str | None, endpoints: list[SliceEndpoint], used: list[str]
) -> None:
    cluster = Cluster(node("n1", zone), service(), slice_("web-1", *endpoints))
    assert cluster.backends(WEB, "n1").cluster == [f"{ip}:8080" for ip in used]


@pytest.mark.parametrize("annotation", ["Disabled", "", "aUto", "Auto"])
def test_annotations_of_the_service_are_not_read(annotation: str) -> None:
    web = service(annotations={"service.kubernetes.io/topology-mode": annotation})
    assert Cluster(node("n1", "za"), web, slice_("s", *FOUR)).backends(WEB, "n1").cluster == [
        f"{A}:8080",
        f"{D}:8080",
    ]


@pytest.mark.parametrize("policy", [{"etp": "Local"}, {"itp": "Local"}, {"etp": "Local", "itp": "Local"}])
def test_hints_are_for_cluster_policies_only(policy: dict) -> None:
    web = service(type="NodePort", ports=[port(node_port=30080)], **policy)
    pieces = [hinted(A, "za", on="n2"), hinted(B, "zb", on="n1"), hinted(C, "zc", on="n1")]
    seen = Cluster(node("n1", "za"), web, slice_("s", *pieces)).backends(WEB, "n1")
    assert seen.cluster == [f"{A}:8080"]
    assert seen.local == [f"{B}:8080", f"{C}:8080"]


def scopes(cluster: Cluster) -> dict[str, list[str]]:
    found = cluster.scopes(Kind.CLUSTER_ENDPOINTS, WEB)
    return {scope: [member.ip for member in value.members] for scope, value in found.items()}


def test_without_hints_the_fleet_shares_one_set() -> None:
    cluster = Cluster(node("n1", "za"), service(), slice_("s", endpoint(A), endpoint(B)))
    assert scopes(cluster) == {FLEET: [A, B]}


def test_with_zone_hints_each_zone_has_a_set_and_the_fleet_none() -> None:
    cluster = Cluster(node("n1", "za"), node("n2", "zx"), service(), slice_("s", *FOUR))
    everything = [A, B, C, D]
    assert scopes(cluster) == {
        zone_scope(""): everything,
        zone_scope("za"): [A, D],
        zone_scope("zx"): everything,
    }


def test_node_hints_make_sets_for_the_nodes_that_exist() -> None:
    pieces = [hinted(A, nodes=("n1",)), hinted(B, nodes=("n1", "n2"))]
    cluster = Cluster(node("n1", "za"), service(), slice_("s", *pieces))
    assert scopes(cluster) == {FLEET: [A, B], node_scope("n1"): [A, B]}
    cluster.step(node("n2"))
    assert scopes(cluster) == {FLEET: [A, B], node_scope("n1"): [A, B], node_scope("n2"): [B]}
    cluster.step(remove=[node("n1")])
    assert scopes(cluster) == {FLEET: [A, B], node_scope("n2"): [B]}


def test_the_fallback_to_terminating_ones_ignores_topology() -> None:
    pieces = [
        endpoint(ip, ready=False, terminating=True, zones=[zone], nodes=["n1"])
        for ip, zone in [(A, "za"), (B, "zb")]
    ]
    assert scopes(Cluster(node("n1", "za"), service(), slice_("s", *pieces))) == {FLEET: [A, B]}


def test_a_zone_that_comes_or_goes_touches_only_hinted_services_in_its_own_scope() -> None:
    plain = service("plain", cluster_ips=("10.96.0.30",))
    cluster = Cluster(
        node("n1", "za"), service(), plain, slice_("s", *FOUR), slice_("p", endpoint(A, "n1"), of="plain")
    )
    came = cluster.step(node("n2", "zb"))
    assert {scope: list(held) for scope, held in came.changes.items()} == {
        node_scope("n2"): [(Kind.NODE, "")],
        zone_scope("zb"): [(Kind.CLUSTER_ENDPOINTS, WEB)],
    }
    second = cluster.step(node("n3", "zb"))
    assert set(second.changes) == {node_scope("n3")}
    assert set(cluster.step(remove=[node("n3")]).changes) == {node_scope("n3")}
    went = cluster.step(remove=[node("n2")])
    assert set(went.changes) == {node_scope("n2"), zone_scope("zb")}
    assert set(scopes(cluster)) == {zone_scope(""), zone_scope("za")}


def test_a_node_that_gets_its_zone_label_later_is_judged_anew() -> None:
    cluster = Cluster(node("n1"), service(), slice_("s", *FOUR))
    assert len(cluster.backends(WEB, "n1").cluster) == 4
    cluster.step(node("n1", "za"))
    assert cluster.projector.zone_of("n1") == "za"
    assert cluster.backends(WEB, "n1").cluster == [f"{A}:8080", f"{D}:8080"]


def test_a_node_that_is_not_registered_uses_all_ready_ones() -> None:
    cluster = Cluster(node("n1", "za"), service(), slice_("s", *FOUR))
    assert cluster.projector.zone_of("n9") is None
    assert len(cluster.backends(WEB, "n9").cluster) == 4
