"""What one Service gives: its ports, per family."""

import itertools

import pytest

from rulecast.model import ServicePort
from rulecast_server.kube.objects import LoadBalancerIngress, Service
from tests.projection.builders import DNS, HTTP, Cluster, port, service

WEB = "default/web:http/TCP/ipv4"
WEB6 = "default/web:http/TCP/ipv6"
DUAL = ("10.96.0.20", "2001:db8:96::20")


def test_every_field_of_a_port_has_its_default() -> None:
    assert Cluster(service()).ports == {WEB: ServicePort(key=WEB, cluster_ip="10.96.0.20", port=80)}


@pytest.mark.parametrize(
    ("cluster_ips", "keys"),
    [
        (DUAL, [WEB, WEB6]),
        (DUAL[::-1], [WEB, WEB6]),
        (DUAL[:1], [WEB]),
        (DUAL[1:], [WEB6]),
        (("172.30.0.041",), [WEB]),
    ],
)
def test_a_family_is_served_when_it_has_a_cluster_ip(cluster_ips: tuple[str, ...], keys: list[str]) -> None:
    assert sorted(Cluster(service(cluster_ips=cluster_ips)).ports) == keys


def test_an_old_address_is_rendered_canonically_everywhere() -> None:
    found = Cluster(
        service(
            cluster_ips=("172.30.0.041",),
            type="LoadBalancer",
            external_ips=["192.168.099.022"],
            ingress=["1.2.3.004"],
            ranges=["203.0.113.000/025", " 198.51.100.7/24 "],
        )
    ).port(WEB)
    assert (found.cluster_ip, found.external_ips, found.load_balancer_ips, found.source_ranges) == (
        "172.30.0.41",
        ("192.168.99.22",),
        ("1.2.3.4",),
        ("198.51.100.0/24", "203.0.113.0/25"),
    )


@pytest.mark.parametrize(
    "nothing",
    [
        service(cluster_ips=("None",), external_ips=["203.0.113.20"]),
        service(cluster_ips=("None",), ports=()),
        service(type="ExternalName", cluster_ips=("172.30.0.1",)),
        service(type="ExternalName", cluster_ips=()),
        service(labels={"service.kubernetes.io/service-proxy-name": "other"}),
        service(labels={"service.kubernetes.io/service-proxy-name": ""}),
        service(ports=()),
    ],
)
def test_headless_external_and_foreign_services_give_nothing_and_are_no_problem(nothing: Service) -> None:
    cluster = Cluster(nothing)
    assert cluster.ports == {}
    assert cluster.reasons() == []
    cluster.step(service())
    assert list(cluster.ports) == [WEB]
    cluster.step(nothing)
    assert cluster.ports == {}


@pytest.mark.parametrize("bad", ["", "10.96.0.300", "<nil>", "0.0.0.0", "::", "cluster.local"])
def test_a_bad_cluster_ip_is_reported_and_holds_back_nothing_else(bad: str) -> None:
    others = [service(f"s{i}", cluster_ips=(f"10.96.1.{i}",)) for i in range(3)]
    cluster = Cluster(others[0], service("bad", cluster_ips=(bad,)), *others[1:])
    assert sorted(cluster.ports) == [f"default/s{i}:http/TCP/ipv4" for i in range(3)]
    (problem,) = cluster.projector.problems
    assert problem.object == ("services", "default", "bad")
    cluster.step(service("bad"))
    assert cluster.reasons() == []


def test_addresses_go_to_their_family_and_a_family_without_cluster_ip_gets_none() -> None:
    addresses = {
        "external_ips": ["203.0.113.20", "2001:db8::20"],
        "ingress": ["203.0.113.10", "2001:db8::10"],
    }
    dual = Cluster(service(type="LoadBalancer", cluster_ips=DUAL, **addresses))
    assert dual.port(WEB).external_ips == ("203.0.113.20",)
    assert dual.port(WEB).load_balancer_ips == ("203.0.113.10",)
    assert dual.port(WEB6).external_ips == ("2001:db8::20",)
    assert dual.port(WEB6).load_balancer_ips == ("2001:db8::10",)
    single = Cluster(service(type="LoadBalancer", **addresses))
    assert list(single.ports) == [WEB]
    assert single.reasons() == ["wrong-family", "wrong-family"]


@pytest.mark.parametrize(
    ("ingress", "served"),
    [
        (LoadBalancerIngress(ip="203.0.113.10"), True),
        (LoadBalancerIngress(ip="203.0.113.10", ip_mode="VIP"), True),
        (LoadBalancerIngress(ip="203.0.113.10", ip_mode="Proxy"), False),
        (LoadBalancerIngress(), False),
        (LoadBalancerIngress(ip=""), False),
    ],
)
def test_only_virtual_addresses_of_the_load_balancer_are_served(
    ingress: LoadBalancerIngress, served: bool
) -> None:
    cluster = Cluster(service(type="LoadBalancer", ingress=[ingress]))
    assert cluster.port(WEB).load_balancer_ips == (("203.0.113.10",) if served else ())
    assert cluster.reasons() == []


@pytest.mark.parametrize(
    ("ranges", "v4", "v6", "restricted", "reasons"),
    [
        ([], (), (), False, []),
        (["198.51.100.0/24"], ("198.51.100.0/24",), (), True, []),
        (["198.51.100.0/24", "2001:db8::/32"], ("198.51.100.0/24",), ("2001:db8::/32",), True, []),
        (["nonsense"], (), (), True, ["bad-cidr"]),
        (["nonsense", "198.51.100.9/24"], ("198.51.100.0/24",), (), True, ["bad-cidr"]),
        (["10.0.0.0/8", "010.0.0.0/08"], ("10.0.0.0/8",), (), True, []),
    ],
)
def test_source_ranges_only_of_the_other_family_or_malformed_admit_nobody(
    ranges: list[str], v4: tuple[str, ...], v6: tuple[str, ...], restricted: bool, reasons: list[str]
) -> None:
    cluster = Cluster(service(type="LoadBalancer", cluster_ips=DUAL, ranges=ranges))
    assert cluster.port(WEB).source_ranges == v4
    assert cluster.port(WEB6).source_ranges == v6
    assert {found.restrict_sources for found in cluster.ports.values()} == {restricted}
    assert cluster.reasons() == reasons


@pytest.mark.parametrize(
    ("extra", "local"),
    [
        ({}, False),
        ({"type": "NodePort", "ports": [port(node_port=30080)]}, True),
        ({"type": "NodePort"}, False),
        ({"external_ips": ["203.0.113.20"]}, True),
        ({"type": "LoadBalancer", "ingress": ["203.0.113.10"], "health_check": 31000}, True),
    ],
)
def test_the_external_policy_counts_only_when_reachable_from_outside(extra: dict, local: bool) -> None:
    assert Cluster(service(etp="Local", **extra)).port(WEB).external_local is local


@pytest.mark.parametrize(
    ("type", "etp", "given", "used", "reasons"),
    [
        ("LoadBalancer", "Local", 345, 345, []),
        ("LoadBalancer", "Local", None, 0, ["no-health-check-node-port"]),
        ("LoadBalancer", "Local", 0, 0, ["no-health-check-node-port"]),
        ("LoadBalancer", "Cluster", 345, 0, []),
        ("NodePort", "Local", 345, 0, []),
        ("ClusterIP", "Local", 345, 0, []),
    ],
)
def test_the_health_check_port_is_for_local_load_balancers(
    type: str, etp: str, given: int | None, used: int, reasons: list[str]
) -> None:
    cluster = Cluster(service(type=type, etp=etp, health_check=given))
    assert cluster.port(WEB).health_check_node_port == used
    assert cluster.reasons() == reasons


@pytest.mark.parametrize(
    ("affinity", "timeout", "seconds", "reasons"),
    [
        (None, None, 0, []),
        ("None", 60, 0, []),
        ("ClientIP", None, 10800, []),
        ("ClientIP", 60, 60, []),
        ("ClientIP", 0, 10800, ["bad-affinity-timeout"]),
        ("ClientIP", 86401, 10800, ["bad-affinity-timeout"]),
    ],
)
def test_affinity_lasts_three_hours_unless_said(
    affinity: str | None, timeout: int | None, seconds: int, reasons: list[str]
) -> None:
    cluster = Cluster(service(affinity=affinity, timeout=timeout))
    assert cluster.port(WEB).affinity_seconds == seconds
    assert cluster.reasons() == reasons


def test_protocols_ports_and_families_are_services_of_their_own() -> None:
    ports = [DNS, port(53, "dns", "TCP"), port(9, "s", "SCTP"), port(80, None, None)]
    assert sorted(Cluster(service(cluster_ips=DUAL, ports=ports)).ports) == sorted(
        f"default/web:{name}/ipv{family}"
        for name, family in itertools.product(["dns/UDP", "dns/TCP", "s/SCTP", "/TCP"], [4, 6])
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (port(0, "x"), "bad-port"),
        (port(70000, "x"), "bad-port"),
        (port(81, "x", "ICMP"), "bad-protocol"),
        (port(81, "http"), "duplicate-port"),
    ],
)
def test_a_bad_port_costs_only_itself(bad, reason: str) -> None:
    cluster = Cluster(service(ports=[HTTP, bad]))
    assert list(cluster.ports) == [WEB]
    assert cluster.port(WEB).port == 80
    assert cluster.reasons() == [reason]


def test_an_address_listed_twice_is_one_and_guarded_if_it_can_be() -> None:
    cluster = Cluster(
        service(
            type="LoadBalancer",
            external_ips=["203.0.113.10", "203.0.113.010", "203.0.113.9", "10.96.0.20"],
            ingress=["203.0.113.10"],
        )
    )
    assert cluster.port(WEB).external_ips == ("203.0.113.9",)
    assert cluster.port(WEB).load_balancer_ips == ("203.0.113.10",)
    assert cluster.reasons() == []


def test_order_of_addresses_and_annotations_change_nothing() -> None:
    cluster = Cluster(service(external_ips=["203.0.113.1", "203.0.113.2"]))
    again = cluster.step(service(external_ips=["203.0.113.2", "203.0.113.1"], annotations={"x": "y"}))
    assert again.changes == {}


@pytest.mark.parametrize(
    "bad",
    [
        service("a/b"),
        service("a:b"),
        service("a", namespace=""),
        service("", namespace="a"),
        service("x", ports=[port(80, "a/b")]),
    ],
)
def test_a_name_that_no_key_can_hold_is_reported_and_holds_back_nothing(bad: Service) -> None:
    cluster = Cluster(bad, service())
    assert list(cluster.ports) == [WEB]
    assert cluster.reasons() == ["bad-name"]
