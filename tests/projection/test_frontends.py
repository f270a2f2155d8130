"""Two Services, one address and port."""

import itertools

import pytest

from rulecast_server.kube.objects import Service
from tests.projection.builders import NEW, OLD, Cluster, port, service


def claims(
    old: dict, new: dict, *, created: tuple[str | None, str | None] = (OLD, NEW)
) -> tuple[Service, Service]:
    """`zz` is the older of the two, so that age shows against the name."""
    return (
        service("zz", **{"cluster_ips": ("10.96.0.1",), "created": created[0]} | old),
        service("aa", **{"cluster_ips": ("10.96.0.2",), "created": created[1]} | new),
    )


def held(cluster: Cluster) -> dict[str, tuple[object, ...]]:
    return {
        key: (p.cluster_ip, p.node_port, p.external_ips, p.load_balancer_ips)
        for key, p in cluster.ports.items()
    }


EXTERNAL = {"external_ips": ["203.0.113.20"]}
BALANCER = {"type": "LoadBalancer", "ingress": ["203.0.113.20"]}
NODE_PORT = {"type": "NodePort", "ports": [port(node_port=30080)]}
SAME_IP = {"cluster_ips": ("10.96.0.9",)}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (EXTERNAL, EXTERNAL),
        (BALANCER, BALANCER),
        (EXTERNAL, BALANCER),
        (BALANCER, EXTERNAL),
        (NODE_PORT, NODE_PORT),
        (SAME_IP, SAME_IP),
    ],
)
def test_the_older_service_wins_and_the_other_takes_over_when_it_goes(
    order: tuple[int, int], together: bool, old: dict, new: dict
) -> None:
    pair = claims(old, new)
    alone = [held(Cluster(one)) for one in pair]
    cluster = Cluster()
    for batch in [[pair[order[0]], pair[order[1]]]] if together else [[pair[order[0]]], [pair[order[1]]]]:
        cluster.step(*batch)
    both = held(cluster)
    assert both["default/zz:http/TCP/ipv4"] == alone[0]["default/zz:http/TCP/ipv4"]
    loser = both.get("default/aa:http/TCP/ipv4")
    assert loser == (None if old is SAME_IP else ("10.96.0.2", 0, (), ()))
    (problem,) = cluster.projector.problems
    assert problem.reason == "frontend-taken"
    assert problem.object.name == "aa"
    assert problem.detail.endswith("is held by default/zz:http/TCP/ipv4")
    cluster.step(remove=[pair[0]])
    assert held(cluster) == alone[1]
    assert cluster.reasons() == []
    cluster.step(pair[0])
    assert held(cluster) == both


@pytest.mark.parametrize("created", [(OLD, OLD), (None, None)])
def test_equal_ages_go_by_namespace_and_name(created: tuple[str | None, str | None]) -> None:
    cluster = Cluster(*claims(EXTERNAL, EXTERNAL, created=created))
    assert cluster.port("default/aa:http/TCP/ipv4").external_ips == ("203.0.113.20",)
    assert cluster.port("default/zz:http/TCP/ipv4").external_ips == ()


def test_an_age_is_older_than_none() -> None:
    cluster = Cluster(*claims(EXTERNAL, EXTERNAL, created=(NEW, None)))
    assert cluster.port("default/zz:http/TCP/ipv4").external_ips == ("203.0.113.20",)


@pytest.mark.parametrize("other", [{"ports": [port(81)]}, {"ports": [port(80, "http", "UDP")]}])
def test_another_port_or_protocol_is_another_frontend(other: dict) -> None:
    cluster = Cluster(*claims(EXTERNAL, EXTERNAL | other))
    assert {found.external_ips for found in cluster.ports.values()} == {("203.0.113.20",)}
    assert cluster.reasons() == []


def test_nobody_takes_a_cluster_ip_by_naming_it_as_external() -> None:
    cluster = Cluster(*claims({"external_ips": ["10.96.0.2"]}, {}))
    assert cluster.port("default/zz:http/TCP/ipv4").external_ips == ()
    assert cluster.port("default/aa:http/TCP/ipv4").cluster_ip == "10.96.0.2"
    assert cluster.reasons() == ["frontend-taken"]


def test_who_loses_its_cluster_ip_claims_nothing_else() -> None:
    first = service("a", cluster_ips=("10.96.0.9",), created="2020-01-01T00:00:00Z")
    second = service("b", cluster_ips=("10.96.0.9",), external_ips=["203.0.113.20"], created=OLD)
    third = service("c", cluster_ips=("10.96.0.3",), external_ips=["203.0.113.20"], created=NEW)
    for order in itertools.permutations([first, second, third]):
        cluster = Cluster()
        for one in order:
            cluster.step(one)
        assert sorted(cluster.ports) == ["default/a:http/TCP/ipv4", "default/c:http/TCP/ipv4"]
        assert cluster.port("default/c:http/TCP/ipv4").external_ips == ("203.0.113.20",)
        cluster.step(remove=[first])
        assert cluster.port("default/b:http/TCP/ipv4").external_ips == ("203.0.113.20",)
        assert cluster.port("default/c:http/TCP/ipv4").external_ips == ()


def test_the_report_names_the_new_holder_after_a_change_of_hands() -> None:
    trio = [
        service(
            name,
            cluster_ips=(f"10.96.0.{i}",),
            external_ips=["203.0.113.20"],
            created=f"202{i}-01-01T00:00:00Z",
        )
        for i, name in enumerate("abc", start=1)
    ]
    cluster = Cluster(*trio)
    cluster.step(remove=[trio[0]])
    (problem,) = cluster.projector.problems
    assert problem.object.name == "c"
    assert problem.detail.endswith("is held by default/b:http/TCP/ipv4")


def test_losing_all_ways_in_ends_the_external_policy() -> None:
    cluster = Cluster(*claims(EXTERNAL, EXTERNAL | {"etp": "Local"}))
    assert cluster.port("default/aa:http/TCP/ipv4").external_local is False


def test_two_ports_of_one_service_with_one_number_are_told_apart_by_name() -> None:
    cluster = Cluster(service(ports=[port(80, "b"), port(80, "a")]))
    assert list(cluster.ports) == ["default/web:a/TCP/ipv4"]
    assert cluster.reasons() == ["frontend-taken"]
