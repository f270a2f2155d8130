"""What becomes of new connections when objects change."""

import dataclasses

from rulecast.model import Family
from tests.netns.changing import TCP, UDP, WEB, check, with_endpoints, with_spec
from tests.netns.cluster import Cluster
from tests.netns.expect import (
    DROPPED,
    OUTSIDE,
    OUTSIDE_VIA_N2,
    POD,
    REFUSED,
    keeps,
    masquerades,
)
from tests.netns.objects import BOTH, CLUSTER_IP, EXTERNAL_IP, NODE_PORT, VIP, Ep, Port, Svc, frontend
from tests.netns.world import A2, LOCAL_OUT, TCP_AND_UDP, A, B, C


class TestServices:
    def test_a_service_answers_while_it_exists(self, cluster: Cluster) -> None:
        cluster.apply(WEB)
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"))
        cluster.apply()
        check(cluster, WEB, POD, CLUSTER_IP, DROPPED)
        check(cluster, WEB, OUTSIDE, NODE_PORT, REFUSED)
        cluster.apply(WEB)
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"))
        check(cluster, WEB, OUTSIDE, NODE_PORT, masquerades("A", "B"))

    def test_scaling_down_to_nothing_and_up_again_is_refused_in_between(self, cluster: Cluster) -> None:
        for endpoints in ((A, B, C), (B, C), (C,), (), (A,), (A, A2), ()):
            service = with_endpoints(WEB, *endpoints)
            cluster.apply(service)
            names = [each.name for each in endpoints]
            check(cluster, WEB, POD, CLUSTER_IP, keeps(*names) if names else REFUSED)
            check(cluster, WEB, OUTSIDE, VIP, masquerades(*names) if names else REFUSED)

    def test_switching_the_external_policy_and_back(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#55519 and antrea-io/antrea#3301."""
        local = with_spec(WEB, **LOCAL_OUT)
        for _ in range(2):
            cluster.apply(WEB)
            check(cluster, WEB, OUTSIDE, NODE_PORT, masquerades("A", "B"))
            cluster.apply(local)
            check(cluster, WEB, OUTSIDE, NODE_PORT, keeps("A"))
            check(cluster, WEB, OUTSIDE_VIA_N2, VIP, keeps("B"))
            check(cluster, WEB, POD, VIP, keeps("A", "B"))

    def test_switching_the_internal_policy_and_back(self, cluster: Cluster) -> None:
        cluster.apply(with_spec(with_endpoints(WEB, B), internalTrafficPolicy="Local"))
        check(cluster, WEB, POD, CLUSTER_IP, DROPPED)
        cluster.apply(with_endpoints(WEB, B))
        check(cluster, WEB, POD, CLUSTER_IP, keeps("B"))

    def test_ip_mode_can_change(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#118895."""
        for mode, expected in (
            ("Proxy", keeps("lb:80")),
            ("VIP", masquerades("A", "B")),
            ("Proxy", keeps("lb:80")),
        ):
            ingress = [{"ip": frontend(VIP, 23, family), "ipMode": mode} for family in BOTH]
            service = dataclasses.replace(WEB, number=23, ingress=ingress)
            cluster.apply(service)
            check(cluster, service, POD, VIP, expected)

    def test_source_ranges_come_and_go(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#62638: the ranges of one service are nothing to another."""
        other = dataclasses.replace(WEB, name="other", number=72)
        elsewhere = ["192.0.2.128/25", "2001:db8:2:1::/64"]
        for ranges, expected in ((elsewhere, DROPPED), ([], masquerades("A", "B")), (elsewhere, DROPPED)):
            cluster.apply(with_spec(WEB, loadBalancerSourceRanges=ranges), other)
            check(cluster, WEB, OUTSIDE, VIP, expected)
            check(cluster, other, OUTSIDE, VIP, masquerades("A", "B"))
            check(cluster, WEB, OUTSIDE, NODE_PORT, masquerades("A", "B"))

    def test_deleting_one_service_leaves_the_others_on_its_address(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#80158."""
        ingress = [{"ip": frontend(VIP, 70, family)} for family in BOTH]
        https = Svc("https", 72, [B], ports=(Port(443),), ingress=ingress)
        dns = Svc("dns", 73, [C], ports=(Port(53, 8080, "UDP"),), ingress=ingress)
        first = Svc("first", 70, [A], ports=(Port(80),))
        cluster.apply(first, https, dns)
        for services in ((first, https, dns), (https, dns)):
            cluster.apply(*services)
            check(cluster, first, OUTSIDE, VIP, masquerades("B"), port=443, protocols=(TCP,))
            check(cluster, first, OUTSIDE, VIP, masquerades("C"), port=53, protocols=(UDP,))

    def test_deleting_the_tcp_port_leaves_the_udp_port(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#20092."""
        dns = Svc(
            "dns",
            72,
            ports=(Port(53, 8080, "TCP", "t", endpoints=[A]), Port(53, 8080, "UDP", "u", endpoints=[B])),
        )
        cluster.apply(dns)
        check(cluster, dns, OUTSIDE, NODE_PORT, masquerades("A"), protocols=(TCP,))
        cluster.apply(dataclasses.replace(dns, ports=dns.ports[1:]))
        for target in (NODE_PORT, VIP, EXTERNAL_IP):
            check(cluster, dns, OUTSIDE, target, masquerades("B"), protocols=(UDP,))
        check(cluster, dns, POD, CLUSTER_IP, keeps("B"), protocols=(UDP,))
        check(cluster, dns, POD, CLUSTER_IP, REFUSED, port=53, protocols=(TCP,))
        cluster.apply(with_spec(dataclasses.replace(dns, ports=dns.ports[1:]), **LOCAL_OUT))
        check(cluster, dns, OUTSIDE, NODE_PORT, DROPPED, protocols=(UDP,))
        check(cluster, dns, OUTSIDE_VIA_N2, NODE_PORT, keeps("B"), protocols=(UDP,), node="n2")

    def test_a_port_that_changes_its_protocol(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#105279."""
        udp, tcp = Port(53, 8080, "UDP", "u"), Port(53, 8080, "TCP", "t")
        for ports, works, refused in (
            ((udp,), (UDP,), (TCP,)),
            ((tcp,), (TCP,), (UDP,)),
            ((udp, tcp), (UDP, TCP), ()),
        ):
            service = Svc("x", 72, [A], ports=ports)
            cluster.apply(service)
            check(cluster, service, POD, CLUSTER_IP, keeps("A"), protocols=works)
            check(cluster, service, POD, CLUSTER_IP, REFUSED, port=53, protocols=refused)

    def test_families_are_independent(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#97343."""
        v4 = (Family.IPV4,)
        for service, v6 in (
            (dataclasses.replace(WEB, slice_families=v4), REFUSED),
            (WEB, keeps("A", "B")),
            (dataclasses.replace(WEB, families=v4), DROPPED),
        ):
            cluster.apply(service)
            check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"), only_families=v4)
            check(cluster, WEB, POD, CLUSTER_IP, v6, only_families=(Family.IPV6,))

    def test_only_the_node_port_moves(self, cluster: Cluster) -> None:
        """antrea-io/antrea#4845."""
        cluster.apply(WEB)
        moved = dataclasses.replace(
            WEB, ports=tuple(dataclasses.replace(port, node_port=31070) for port in TCP_AND_UDP)
        )
        cluster.apply(moved)
        check(cluster, moved, OUTSIDE, NODE_PORT, masquerades("A", "B"))
        check(cluster, moved, OUTSIDE, NODE_PORT, REFUSED, port=30070)
        check(cluster, moved, OUTSIDE, VIP, masquerades("A", "B"))

    def test_hints_are_judged_anew_when_the_zone_of_the_node_changes(self, cluster: Cluster) -> None:
        hinted = Svc("hinted", 72, [Ep("A", zones=["za"]), Ep("B", zones=["zb"])])
        try:
            for zone, names in (("", ("A", "B")), ("za", ("A",)), ("zb", ("B",)), ("zx", ("A", "B"))):
                cluster.n1.zone = zone
                cluster.apply(hinted)
                check(cluster, hinted, POD, CLUSTER_IP, keeps(*names))
        finally:
            cluster.n1.zone = "za"

    def test_the_longest_names_that_the_api_allows(self, cluster: Cluster) -> None:
        """kubernetes/kubernetes#139515."""
        ports = (Port(name="t" * 63), Port(protocol="UDP", name="u" * 63))
        long = Svc("a" + "b" * 62, 72, [A, B], ports=ports, spec=LOCAL_OUT)
        cluster.apply(long, WEB)
        check(cluster, long, POD, CLUSTER_IP, keeps("A", "B"))
        check(cluster, long, OUTSIDE, NODE_PORT, keeps("A"))
        check(cluster, WEB, POD, CLUSTER_IP, keeps("A", "B"))

    def test_a_pod_that_backs_two_services(self, cluster: Cluster) -> None:
        """antrea-io/antrea#1815."""
        other = Svc("other", 72, [A])
        cluster.apply(with_endpoints(WEB, A), other)
        cluster.apply(other)
        check(cluster, other, POD, CLUSTER_IP, keeps("A"))
