"""One EndpointSlice to the part of it that counts (kube-proxy's endpointslicecache)."""

import datetime as dt
import sys
from collections.abc import Callable
from typing import NamedTuple

from rulecast.address import AddressError, canonical_ip, is_ipv6, is_unspecified
from rulecast.model import Endpoint, Family, Protocol
from rulecast_server.kube.objects import EndpointSlice, HintFor, SliceEndpoint
from rulecast_server.projection.problems import Reason
from rulecast_server.projection.services import parse_protocol

SERVICE_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
TRIGGER_ANNOTATION = "endpoints.kubernetes.io/last-change-trigger-time"

READY = 1
SERVING = 2
TERMINATING = 4
FALLBACK = SERVING | TERMINATING
_RANKS = {READY | SERVING: 0, READY: 1, SERVING: 2, 0: 3}

_FAMILIES = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}

Report = Callable[[Reason, str], None]


class ServiceName(NamedTuple):
    """A Service as an object."""

    namespace: str
    name: str


class Row(NamedTuple):
    """All about an endpoint except its address and port."""

    conditions: int
    """READY, SERVING and TERMINATING."""
    node: str
    """"" when the endpoint names none."""
    zone_hints: tuple[str, ...]
    node_hints: tuple[str, ...]


class PortRows(NamedTuple):
    """The endpoints of a slice under one of its ports."""

    name: str
    protocol: Protocol
    members: tuple[Endpoint, ...]
    """Sorted, without duplicates, parallel to the slice's rows."""


class ReducedSlice(NamedTuple):
    """What of a slice can change a rule."""

    service: ServiceName
    name: str
    family: Family
    rows: tuple[Row, ...]
    ports: tuple[PortRows, ...]


class ParsedSlice(NamedTuple):
    """One slice, what is wrong with it, and when its change was triggered."""

    reduced: ReducedSlice | None
    """None: it counts for nothing."""
    problems: tuple[tuple[Reason, str], ...]
    trigger_time: float | None
    """Unix seconds."""


def parse_slice(namespace: str, name: str, piece: EndpointSlice) -> ParsedSlice:
    """Reduce one EndpointSlice, known by that namespace and name; what cannot be used is reported."""
    meta = piece.metadata
    labels = meta.labels or {}
    family = _FAMILIES.get(piece.address_type)
    if family is None or HEADLESS_LABEL in labels:
        return ParsedSlice(None, (), None)
    service = labels.get(SERVICE_LABEL)
    if not service:
        return ParsedSlice(None, ((Reason.NO_SERVICE_LABEL, f"no label {SERVICE_LABEL}"),), None)
    problems: list[tuple[Reason, str]] = []

    def report(reason: Reason, detail: str) -> None:
        problems.append((reason, detail))

    by_ip = _rows(piece, family, report)
    ips = sorted(by_ip)
    rows = tuple([by_ip[ip] for ip in ips])
    members: dict[int, tuple[Endpoint, ...]] = {}
    ports: list[PortRows] = []
    for port_name, protocol, number in _ports(piece, report):
        shared = members.get(number)
        if shared is None:
            shared = members[number] = tuple([Endpoint(ip, number) for ip in ips])
        ports.append(PortRows(port_name, protocol, shared))
    reduced = ReducedSlice(
        ServiceName(sys.intern(namespace), sys.intern(service)), name, family, rows, tuple(ports)
    )
    return ParsedSlice(reduced, tuple(problems), _trigger_time(meta.annotations))


def rank(row: Row) -> int:
    """Which of two entries for one endpoint counts: the lower. Ready before not ready, then serving."""
    return _RANKS[row.conditions & (READY | SERVING)]


def _rows(piece: EndpointSlice, family: Family, report: Report) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    shared: dict[Row, Row] = {}
    for endpoint in piece.endpoints or ():
        # The API says that further addresses are unspecified; kube-proxy reads the first only.
        if not endpoint.addresses:
            report(Reason.NO_ADDRESS, "an endpoint without address")
            continue
        text = endpoint.addresses[0]
        try:
            ip = canonical_ip(text)
        except AddressError as error:
            report(Reason.BAD_ADDRESS, f"endpoint: {error}")
            continue
        if is_unspecified(ip):
            report(Reason.BAD_ADDRESS, f"endpoint: {ip} cannot be served")
            continue
        if is_ipv6(ip) is not (family is Family.IPV6):
            report(Reason.WRONG_FAMILY, f"endpoint {ip} in a slice of type {piece.address_type}")
            continue
        row = _row(endpoint)
        row = shared.setdefault(row, row)
        other = rows.get(ip)
        # `row < other` makes the choice independent of the order within the slice.
        if other is None or (rank(row), row) < (rank(other), other):
            rows[ip] = row
    return rows


def _row(endpoint: SliceEndpoint) -> Row:
    conditions = endpoint.conditions
    if conditions is None:
        flags = READY | SERVING
    else:
        # kube-proxy takes a missing serving for true, also when ready is false.
        flags = (
            (READY if conditions.ready is not False else 0)
            | (SERVING if conditions.serving is not False else 0)
            | (TERMINATING if conditions.terminating else 0)
        )
    node = sys.intern(endpoint.node_name) if endpoint.node_name else ""
    hints = endpoint.hints
    if hints is None:
        return Row(flags, node, (), ())
    return Row(flags, node, _hints(hints.for_zones), _hints(hints.for_nodes))


def _hints(hints: list[HintFor] | None) -> tuple[str, ...]:
    return tuple(sorted({sys.intern(hint.name) for hint in hints or () if hint.name}))


def _ports(piece: EndpointSlice, report: Report) -> list[tuple[str, Protocol, int]]:
    ports: set[tuple[str, Protocol, int]] = set()
    for port in piece.ports or ():
        protocol = parse_protocol(port.protocol)
        if port.name is None:
            # The API server fills in ""; a null is somebody's mistake, and kube-proxy ignores it too.
            report(Reason.BAD_PORT, "a port without name")
        elif port.port is None or not 0 < port.port <= 65535:
            report(Reason.BAD_PORT, f"port {port.name!r}: number {port.port}")
        elif protocol is None:
            report(Reason.BAD_PROTOCOL, f"port {port.name!r}: protocol {port.protocol!r}")
        else:
            ports.add((sys.intern(port.name), protocol, port.port))
    return sorted(ports)


def _trigger_time(annotations: dict[str, str] | None) -> float | None:
    text = annotations.get(TRIGGER_ANNOTATION) if annotations else None
    if text is None:
        return None
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time.timestamp() if time.tzinfo else None
