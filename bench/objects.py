"""API objects of a cluster of any size; every address is in 10.0.0.0/8, which the bench makes local."""

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
BACKEND_PORT = 8080
NODES = 10


def cluster_ip(number: int) -> str:
    """The address of a service."""
    return f"10.{96 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def endpoint_ip(number: int) -> str:
    """The address of an endpoint."""
    return f"10.{128 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def service_key(number: int) -> str:
    """The name of a service's one port, as resources have it."""
    return f"team-{number % 100}/service-{number}:http/TCP/ipv4"


def service(number: int) -> Object:
    """A ClusterIP service with one port."""
    ip = cluster_ip(number)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": f"service-{number}",
            "namespace": f"team-{number % 100}",
            "uid": f"00000000-0000-0000-0000-{number:012}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app.kubernetes.io/name": f"service-{number}"},
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": ip,
            "clusterIPs": [ip],
            "ipFamilies": ["IPv4"],
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": BACKEND_PORT}],
            "selector": {"app.kubernetes.io/name": f"service-{number}"},
            "sessionAffinity": "None",
        },
    }


def endpoint_slice(number: int, endpoints: int, *, shift: int = 0) -> Object:
    """Its slice; another `shift` replaces the last endpoint."""
    first = number * endpoints
    ips = [endpoint_ip(first + index) for index in range(endpoints)]
    if shift:
        ips[-1] = f"10.{64 + shift % 32}.{number >> 8 & 255}.{number & 255}"
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"service-{number}-abcde",
            "namespace": f"team-{number % 100}",
            "labels": {
                "kubernetes.io/service-name": f"service-{number}",
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": BACKEND_PORT, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [ip],
                "nodeName": f"node-{index % NODES}",
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "name": f"service-{number}-{index}"},
            }
            for index, ip in enumerate(ips)
        ],
    }


def node(number: int) -> Object:
    """A node."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"node-{number}",
            "labels": {"topology.kubernetes.io/zone": f"zone-{number % 3}"},
        },
        "spec": {"podCIDRs": [f"10.200.{number}.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": f"10.250.0.{number + 1}"}]},
    }


def cluster(services: int, endpoints: int) -> Iterator[Object]:
    """Everything."""
    yield from (node(number) for number in range(NODES))
    for number in range(services):
        yield service(number)
        yield endpoint_slice(number, endpoints)
