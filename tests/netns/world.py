"""The objects that the tables ask about: one state of the cluster, all services at once."""

from rulecast.lab import Lab
from rulecast.model import Family
from tests.netns.objects import CLUSTER_IP, TCP_AND_UDP, VIP, Ep, Object, Port, Svc, frontend, slice_

A, A2, B, C = Ep("A"), Ep("A2"), Ep("B"), Ep("C")
LOCAL_OUT = {"externalTrafficPolicy": "Local"}
LOCAL_IN = {"internalTrafficPolicy": "Local"}
V4, V6 = (Family.IPV4,), (Family.IPV6,)

# Holds the nodes' main addresses, pads one range with a blank, and leaves out outside's second address.
_RANGES = ["192.0.2.0/25", " 198.51.100.0/25", "2001:db8:2::/64", "2001:db8:51::/121"]

_MIXED = [Ep("A"), Ep("A2"), Ep("A3", "terminating"), Ep("A4", "gone"), Ep("B")]
_LOCAL_TERMINATING = [
    Ep("A", "gone"),
    Ep("A2", "terminating"),
    Ep("A3", "terminating"),
    Ep("A4", "unready"),
    B,
]
_REMOTE_TERMINATING = [Ep("A", "gone"), Ep("A2", "gone"), Ep("A3", "unready"), Ep("B", "terminating")]
_ALL_TERMINATING = [Ep("A", "gone"), Ep("A2", "terminating"), Ep("A3", "terminating"), Ep("B", "terminating")]
_NONE_USABLE = [Ep("A", "gone"), Ep("A2", "unready"), Ep("A3", "serving-only"), Ep("B", "gone")]
_NAMED = (Port(80, 8080, name="http"), Port(443, 8443, name="https"))

SERVICES = [
    Svc("plain", 1, [A, B]),
    Svc("etp-local", 2, [A, B], spec=LOCAL_OUT),
    Svc("itp-local", 3, [A, B], spec=LOCAL_IN),
    Svc("single", 4, [B], exposed=False),
    Svc("empty", 5),
    Svc("empty-etp-local", 6, spec=LOCAL_OUT),
    Svc("empty-itp-local", 7, spec=LOCAL_IN, exposed=False),
    Svc("etp-remote", 8, [B], spec=LOCAL_OUT),
    Svc("itp-remote", 9, [B], spec=LOCAL_IN),
    Svc("both-remote", 10, [B], spec=LOCAL_OUT | LOCAL_IN),
    Svc("itp-two-local", 11, [A, A2, B], spec=LOCAL_IN, exposed=False),
    Svc("three", 12, [A, B, C], exposed=False),
    Svc("self", 13, [A]),
    Svc("self-etp-local", 14, [A], spec=LOCAL_OUT),
    Svc("host", 15, [Ep("n1")], exposed=False),
    Svc(
        "many-ports",
        16,
        [A, B],
        ports=(*_NAMED, Port(53, 5353, name="dns-tcp"), Port(53, 53, "UDP", name="dns")),
        exposed=False,
    ),
    Svc("tcp-only", 17, [A, B], ports=(Port(),)),
    Svc(
        "ranges",
        18,
        [B],
        spec={"loadBalancerSourceRanges": _RANGES},
        ingress=[{"ip": ip} for n in (18, 19) for ip in (f"203.0.113.{n}", f"2001:db8:113::{n}")],
    ),
    Svc("ranges-empty", 20, spec={"loadBalancerSourceRanges": _RANGES}),
    Svc("ranges-other-family", 21, [B], spec={"loadBalancerSourceRanges": ["198.51.100.0/24"]}),
    Svc("ranges-pods", 22, [B], spec={"loadBalancerSourceRanges": ["10.244.1.0/24", "2001:db8:244:1::/64"]}),
    Svc(
        "lb-proxy",
        23,
        [A, B],
        ingress=[{"ip": frontend(VIP, 23, family), "ipMode": "Proxy"} for family in Family],
    ),
    Svc(
        "lb-vip",
        24,
        [A, B],
        ingress=[{"ip": frontend(VIP, 24, family), "ipMode": "VIP"} for family in Family]
        + [{"hostname": "lb.example"}],
    ),
    Svc("mixed", 25, _MIXED, spec=LOCAL_OUT),
    Svc("local-terminating", 26, _LOCAL_TERMINATING, spec=LOCAL_OUT),
    Svc("remote-terminating", 27, _REMOTE_TERMINATING, spec=LOCAL_OUT),
    Svc("none-usable", 28, _NONE_USABLE, spec=LOCAL_OUT),
    Svc("mixed-cluster", 29, _MIXED),
    Svc("all-terminating-cluster", 30, _ALL_TERMINATING),
    Svc("remote-terminating-cluster", 31, _REMOTE_TERMINATING),
    Svc("none-usable-cluster", 32, _NONE_USABLE),
    Svc("all-terminating-itp-local", 33, _ALL_TERMINATING, spec=LOCAL_IN, exposed=False),
    Svc("remote-terminating-itp-local", 34, _REMOTE_TERMINATING, spec=LOCAL_IN, exposed=False),
    Svc("zones", 35, [Ep("A", zones=["za"]), Ep("B", zones=["zb"])], exposed=False),
    Svc("zones-incomplete", 36, [Ep("A", zones=["za"]), B], exposed=False),
    Svc("zones-elsewhere", 37, [Ep("A", zones=["zc"]), Ep("B", zones=["zd"])], exposed=False),
    Svc("zones-etp-local", 38, [Ep("A", zones=["zb"]), Ep("B", zones=["za"])], spec=LOCAL_OUT),
    Svc("zones-itp-local", 39, [Ep("A", zones=["zb"]), Ep("B", zones=["za"])], spec=LOCAL_IN, exposed=False),
    Svc("nodes", 40, [Ep("A", nodes=["n1"]), Ep("B", nodes=["n2"])], exposed=False),
    Svc(
        "nodes-then-zones",
        41,
        [Ep("A", nodes=["n3"], zones=["zb"]), Ep("B", nodes=["n3"], zones=["za"])],
        exposed=False,
    ),
    Svc("zones-two-each", 42, [Ep("A", zones=["za", "zb"]), Ep("B", zones=["zb", "zc"])], exposed=False),
    Svc("zone-unready", 43, [Ep("A", "unready", zones=["za"]), Ep("B", zones=["zb"])], exposed=False),
    Svc(
        "zones-terminating",
        44,
        [Ep("A", "terminating", zones=["za"]), Ep("B", "terminating", zones=["zb"])],
        exposed=False,
    ),
    Svc(
        "one-address-two-ports",
        45,
        ports=(
            Port(80, 9001, name="t", endpoints=[Ep("n1")]),
            Port(80, 9001, "UDP", name="u", endpoints=[Ep("n1")]),
        ),
        exposed=False,
    ),
    Svc(
        "two-targets",
        46,
        ports=(Port(80, 8080, name="t", endpoints=[A]), Port(80, 8080, "UDP", name="u", endpoints=[A])),
        exposed=False,
    ),
    Svc("shared-http", 47, [A], ports=(Port(80),)),
    Svc(
        "shared-https",
        48,
        [B],
        ports=(Port(443),),
        ingress=[{"ip": frontend(VIP, 47, family)} for family in Family],
    ),
    Svc(
        "shared-dns",
        49,
        [C],
        ports=(Port(53, 8080, "UDP"),),
        ingress=[{"ip": frontend(VIP, 47, family)} for family in Family],
    ),
    Svc(
        "node-address",
        50,
        [A, B],
        ports=(Port(8050, name="t"), Port(8050, protocol="UDP", name="u")),
        ingress=[{"ip": "192.0.2.11"}, {"ip": "2001:db8:2::11"}],
    ),
    Svc(
        "per-protocol",
        51,
        ports=(
            Port(53, 8080, "TCP", name="t", endpoints=[A]),
            Port(53, 8080, "UDP", name="u", endpoints=[B]),
        ),
    ),
    Svc(
        "ports-apart",
        52,
        ports=(
            Port(80, 8080, name="a", endpoints=[A], node_port=31080),
            Port(443, 8443, name="b", endpoints=[B], node_port=31443),
        ),
    ),
    Svc(
        "malformed",
        53,
        [B],
        families=V4,
        ports=TCP_AND_UDP,
        spec={
            "clusterIP": "10.96.0.053",
            "clusterIPs": ["10.96.0.053"],
            "externalIPs": ["203.0.114.053"],
            "loadBalancerSourceRanges": ["198.51.100.000/025"],
        },
        ingress=[{"ip": "203.0.113.053"}],
    ),
    Svc("v4-only", 54, [A, B], families=V4),
    Svc("v6-only", 55, [A, B], families=V6),
    Svc("v6-without-endpoints", 56, [A, B], slice_families=V4),
    Svc("other-proxy", 57, [A, B], labels={"service.kubernetes.io/service-proxy-name": "other"}),
    Svc(
        "external-name", 58, [A, B], spec={"type": "ExternalName", "externalName": "x.example"}, exposed=False
    ),
    Svc("etp-local-internal", 59, [B], spec=LOCAL_OUT, exposed=False),
    Svc(
        "no-node-port",
        60,
        [A, B],
        ports=(Port(name="t", node_port=0), Port(name="u", protocol="UDP", node_port=0)),
    ),
    Svc("four", 61, [A, A2, B, C], exposed=False),
    Svc("ranges-own-address", 62, [B], spec={"loadBalancerSourceRanges": _RANGES}),
    Svc(
        "ranges-without-node",
        63,
        [B],
        spec={"loadBalancerSourceRanges": ["198.51.100.0/24", "2001:db8:51::/64"]},
    ),
]

BY_NAME = {service.name: service for service in SERVICES}
SPARE_IP = {family: frontend(CLUSTER_IP, 250, family) for family in Family}
"""A cluster IP that no Service has."""


def more_slices(lab: Lab) -> list[Object]:
    """Second slices of a service: the same port names with other numbers."""
    return [
        slice_(
            f"{service}-more-v{int(family)}",
            service=service,
            family=family,
            ports=[("t", port, "TCP"), ("u", port, "UDP")],
            endpoints=[endpoint.manifest(lab, family)],
        )
        for service, endpoint, port in (("one-address-two-ports", Ep("n1"), 9002), ("two-targets", B, 9090))
        for family in Family
    ]
