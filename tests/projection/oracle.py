"""The decision table asked for one node at a time, by brute force and straight from the API objects.

It shares no code with the projector. Slow on purpose: no indexes, no memory between questions.
"""

import ipaddress
import re
from collections.abc import Collection
from typing import NamedTuple

from rulecast_server.kube.objects import ApiObject, EndpointSlice, Node, Service
from tests.projection.builders import SERVICE_NAME, ZONE, Backends


class Frontend(NamedTuple):
    """What a Service port answers on."""

    cluster_ip: str
    port: int
    node_port: int
    external_ips: list[str]
    load_balancer_ips: list[str]
    has_endpoints: bool


class Answer(NamedTuple):
    frontend: Frontend
    backends: Backends


class _Wanted(NamedTuple):
    service: Service
    key: str
    port_name: str
    protocol: str
    version: int
    cluster_ip: str
    port: int
    node_port: int
    external_ips: list[str]
    load_balancer_ips: list[str]

    def age(self) -> tuple[str, str, str, str]:
        meta = self.service.metadata
        return (meta.creation_timestamp or "~", meta.namespace, meta.name, self.key)


def ask(objects: Collection[ApiObject], node: str) -> dict[str, Answer]:
    """Every Service port as kube-proxy on `node` would see it."""
    nodes = {item.metadata.name: item for item in objects if isinstance(item, Node)}
    slices = [item for item in objects if isinstance(item, EndpointSlice)]
    slices.sort(key=lambda piece: piece.metadata.name)
    services = [item for item in objects if isinstance(item, Service)]
    answers: dict[str, Answer] = {}
    for wanted in _settle([port for service in services for port in _wanted(service)]):
        entries = _entries(wanted, slices)
        spec = wanted.service.spec
        reachable = bool(wanted.node_port or wanted.external_ips or wanted.load_balancer_ips)
        good = [e for e in entries if e["ready"]]
        tail = [e for e in entries if e["serving"] and e["terminating"]]
        cluster: list[dict] = []
        if spec.internal_traffic_policy != "Local" or reachable:
            cluster = _by_topology(good, node, nodes) or tail
        here_good = [e for e in good if e["node"] == node]
        here = here_good or [e for e in tail if e["node"] == node]
        answers[wanted.key] = Answer(
            Frontend(
                wanted.cluster_ip,
                wanted.port,
                wanted.node_port,
                wanted.external_ips,
                wanted.load_balancer_ips,
                bool(good or tail),
            ),
            Backends(
                _texts(cluster),
                _texts(here),
                len({e["ip"] for e in here_good}),
                _texts([e for e in entries if e["serving"]]) if wanted.protocol == "UDP" else None,
            ),
        )
    return answers


def _by_topology(good: list[dict], node: str, nodes: dict[str, Node]) -> list[dict]:
    zone = None
    if node in nodes:
        zone = (nodes[node].metadata.labels or {}).get(ZONE)
        if good and all(e["nodes"] for e in good):
            mine = [e for e in good if node in e["nodes"]]
            if mine:
                return mine
    if zone and good and all(e["zones"] for e in good):
        near = [e for e in good if zone in e["zones"]]
        if near:
            return near
    return good


def _wanted(service: Service) -> list[_Wanted]:
    spec, meta = service.spec, service.metadata
    if spec.type == "ExternalName" or spec.cluster_ip in (None, "", "None"):
        return []
    if "service.kubernetes.io/service-proxy-name" in (meta.labels or {}):
        return []
    found: list[_Wanted] = []
    for version in (4, 6):
        own = [ip for ip in map(_ip, spec.cluster_ips or ()) if ip and ip.version == version]
        if not own:
            continue
        ingress = service.status.load_balancer.ingress if service.status else []
        vips = {str(ip) for ip in (_ip(i.ip) for i in ingress if i.ip_mode != "Proxy") if _is(ip, version)}
        external = {str(ip) for ip in map(_ip, spec.external_ips or ()) if _is(ip, version)}
        vips -= {str(own[0])}
        external -= vips | {str(own[0])}
        for number in spec.ports or ():
            protocol = number.protocol or "TCP"
            name = number.name or ""
            key = f"{meta.namespace}/{meta.name}:{name}/{protocol}/ipv{version}"
            if any(other.key == key for other in found):
                continue
            found.append(
                _Wanted(
                    service,
                    key,
                    name,
                    protocol,
                    version,
                    str(own[0]),
                    number.port,
                    number.node_port or 0,
                    sorted(external),
                    sorted(vips),
                )
            )
    return found


def _settle(everyone: list[_Wanted]) -> list[_Wanted]:
    """Give each frontend to one: cluster IPs first, then by age."""
    taken: dict[tuple[object, int, str], str] = {}
    everyone = sorted(everyone, key=_Wanted.age)
    living = [
        one
        for one in everyone
        if taken.setdefault((one.cluster_ip, one.port, one.protocol), one.key) == one.key
    ]
    settled = []
    for one in living:

        def mine(address: object, port: int, one: _Wanted = one) -> bool:
            return taken.setdefault((address, port, one.protocol), one.key) == one.key

        settled.append(
            one._replace(
                external_ips=[ip for ip in one.external_ips if mine(ip, one.port)],
                load_balancer_ips=[ip for ip in one.load_balancer_ips if mine(ip, one.port)],
                node_port=one.node_port if one.node_port and mine(one.version, one.node_port) else 0,
            )
        )
    return settled


def _entries(wanted: _Wanted, slices: list[EndpointSlice]) -> list[dict]:
    found: dict[tuple[str, int], dict] = {}
    for piece in slices:
        meta = piece.metadata
        if (
            meta.namespace != wanted.service.metadata.namespace
            or piece.address_type != f"IPv{wanted.version}"
        ):
            continue
        if (meta.labels or {}).get(SERVICE_NAME) != wanted.service.metadata.name:
            continue
        for number in piece.ports or ():
            if (
                not number.port
                or number.name != wanted.port_name
                or (number.protocol or "TCP") != wanted.protocol
            ):
                continue
            for entry in sorted(_listed(piece, wanted.version, number.port), key=_standing):
                other = found.setdefault((entry["ip"], entry["port"]), entry)
                if (entry["ready"], entry["serving"]) > (other["ready"], other["serving"]):
                    found[entry["ip"], entry["port"]] = entry
    return sorted(found.values(), key=lambda e: (e["ip"], e["port"]))


def _listed(piece: EndpointSlice, version: int, port: int) -> list[dict]:
    entries = []
    for one in piece.endpoints or ():
        ip = _ip(one.addresses[0]) if one.addresses else None
        if not _is(ip, version):
            continue
        state = one.conditions
        hints = one.hints
        entries.append(
            {
                "ip": str(ip),
                "port": port,
                "ready": state is None or state.ready in (None, True),
                "serving": state is None or state.serving in (None, True),
                "terminating": state is not None and state.terminating is True,
                "node": one.node_name,
                "zones": sorted(h.name for h in (hints.for_zones if hints else None) or ()),
                "nodes": sorted(h.name for h in (hints.for_nodes if hints else None) or ()),
            }
        )
    return entries


def _standing(entry: dict) -> tuple[object, ...]:
    """The order in which one slice's own duplicates count."""
    return (entry["terminating"], entry["node"] or "", entry["zones"], entry["nodes"])


def _texts(entries: list[dict]) -> list[str]:
    return [f"{e['ip']}:{e['port']}" for e in entries]


def _is(ip: ipaddress.IPv4Address | ipaddress.IPv6Address | None, version: int) -> bool:
    return ip is not None and ip.version == version


def _ip(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(re.sub(r"\b0+(?=\d)", "", text or ""))
    except ValueError:
        return None
