"""One UDP service with every kind of frontend."""

from ipaddress import ip_address

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.kernel.udp_flows import Frontend
from tests.agent.values import key, view

STAT = key("stat", protocol="UDP")
A, B, C = "10.240.0.4:9090", "10.240.1.5:9090", "10.240.2.6:9090"
FRONTENDS = {
    "cluster IP": "10.96.0.30:8125",
    "external IP": "198.51.100.30:8125",
    "load balancer": "203.0.113.11:8125",
    "node port": "30125",
}


def packed(text: str) -> bytes:
    ip, _, port = text.rpartition(":")
    return (ip_address(ip).packed if ip else b"") + int(port).to_bytes(2)


def frontend(text: str) -> Frontend:
    return Frontend(Family.IPV6 if text.count(":") > 1 else Family.IPV4, packed(text))


def stat(*cluster: str, service: ServiceKey = STAT, **fields: object) -> ServiceView:
    return view(
        service,
        *cluster,
        **{  # type: ignore[arg-type]
            "cluster_ip": "10.96.0.30",
            "port": 8125,
            "node_port": 30125,
            "external_ips": ("198.51.100.30",),
            "load_balancer_ips": ("203.0.113.11",),
        }
        | fields,
    )


ALL = {frontend(text) for text in FRONTENDS.values()}
