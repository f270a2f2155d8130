"""Rows of the semantics tables: who asks for what, and who must answer, seen as whom."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rulecast.lab import Answer, Host, Probe, Verdict, run_probes
from rulecast.model import Family, Protocol
from tests.netns.cluster import Cluster
from tests.netns.objects import BOTH, NODE_PORT, VIP, Svc

POD = "pod"
NODE = "node"
NODE_MAIN = "node's main address"
NODE_VIP = "node with the VIP as its source"
LOCALHOST = "localhost"
OUTSIDE = "outside"
BLOCKED = "blocked outside"
OUTSIDE_VIA_N2 = "outside via n2"
REMOTE_POD = "pod of n2"
REMOTE_NODE = "node n2"

BLOCKED_IP = {Family.IPV4: "198.51.100.200", Family.IPV6: "2001:db8:51::200"}
"""A second address of the outside client, which source ranges leave out."""

# The chance that n probes miss one of k equal backends, k(1-1/k)**n, is below one in a million.
_ENOUGH = {1: 6, 2: 22, 3: 37, 4: 54}


# A refusal has to answer the first packet. kube-proxy's does not do that for TCP over IPv6: the ICMPv6 error
# meets a socket that connect() still holds, and only the answer to the second SYN, a second later, counts.
_REFUSAL = 2.0 if "KUBE_PROXY" in os.environ else 0.9
_TIMEOUT = {Verdict.REACHED: 2.0, Verdict.REFUSED: _REFUSAL, Verdict.DROPPED: 0.4}


_udp_ports = itertools.cycle(range(33000, 64000))


@dataclass(frozen=True)
class Expected:
    """A verdict; when reached, the whole set of backends, and whether the source is a node's."""

    verdict: Verdict
    backends: frozenset[str] = frozenset()
    masqueraded: bool | None = None
    """None: not judged."""

    def __str__(self) -> str:
        if self.verdict is not Verdict.REACHED:
            return str(self.verdict)
        seen = {True: " masqueraded", False: " with its own address", None: ""}[self.masqueraded]
        return f"{' '.join(sorted(self.backends))}{seen}"


REFUSED = Expected(Verdict.REFUSED)
DROPPED = Expected(Verdict.DROPPED)


def keeps(*backends: str) -> Expected:
    """Exactly these backends answer (`NAME`, or `NAME:PORT` if not 8080), seeing the client itself."""
    return Expected(Verdict.REACHED, frozenset(backends), masqueraded=False)


def masquerades(*backends: str) -> Expected:
    """Exactly these backends answer, seeing an address of the node that translated."""
    return Expected(Verdict.REACHED, frozenset(backends), masqueraded=True)


def reaches(*backends: str) -> Expected:
    """Exactly these backends answer; the source does not tell anything here."""
    return Expected(Verdict.REACHED, frozenset(backends))


@dataclass(frozen=True)
class Row:
    """One line of a table. `number` is the row's place in the reference or the report it comes from."""

    number: str
    service: str
    client: str
    """A constant from above, or a backend's name."""
    target: str
    """A frontend kind, or a literal address for each family."""
    expected: Expected
    port: int | None = None
    """None: the service's first port, or the node port."""
    families: Sequence[Family] = BOTH
    protocols: Sequence[Protocol] = (Protocol.TCP, Protocol.UDP)
    node: str = "n1"
    """Whose node port is asked."""
    address: str | None = None
    """Ask this address instead of the service's own."""

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        where = f"{self.target}{port}" if self.address is None else f"{self.address}{port}"
        via = " of n2" if self.node == "n2" and self.target == NODE_PORT else ""
        return f"{self.number} {self.client} to {self.service} {where}{via}: {self.expected}"


Case = tuple[Row, Family, Protocol]


def cases(rows: Sequence[Row]) -> list[Case]:
    """Each row in each family and protocol."""
    return [(row, family, protocol) for row in rows for family in row.families for protocol in row.protocols]


def case_id(case: object) -> str:
    """A test id that reads as the row."""
    return f"IPv{int(case)}" if isinstance(case, Family) else str(case)


def client_of(cluster: Cluster, row: Row, service: Svc, family: Family) -> tuple[Host, str | None]:
    """The row's client, and the address that it binds to."""
    lab, n1, n2 = cluster.lab, cluster.n1, cluster.n2
    match row.client:
        case "pod":
            return n1.pods["cli1"], None
        case "node":
            # A second address: masquerading replaces it by the first, which shows.
            return n1, n1.second[family]
        case "node's main address":
            return n1, n1.ip(family)
        case "node with the VIP as its source":
            return n1, service.address(VIP, family)
        case "localhost":
            return n1, "127.0.0.1" if family is Family.IPV4 else "::1"
        case "outside":
            return lab.outside, lab.outside.ip(family)
        case "blocked outside":
            return lab.outside, BLOCKED_IP[family]
        case "outside via n2":
            return cluster.outside2, None
        case "pod of n2":
            return n2.pods["cli2"], None
        case "node n2":
            return n2, n2.second[family]
        case name:
            return next(node.pods[name] for node in (n1, n2) if name in node.pods), None


def probes(cluster: Cluster, row: Row, service: Svc, family: Family, protocol: Protocol) -> list[Probe]:
    """Enough probes to see every backend, or to be sure of a verdict."""
    host, source = client_of(cluster, row, service, family)
    reached = row.expected.verdict is Verdict.REACHED
    address, port = destination(cluster, row, service, family, protocol)
    timeout = _TIMEOUT[row.expected.verdict]
    number = _ENOUGH[len(row.expected.backends)] if reached else 4
    if protocol is Protocol.TCP:
        return [Probe(host.namespace, address, port, protocol, source, timeout=timeout)] * number
    # A reused port would be an old flow to conntrack, which keeps the verdict of its first datagram.
    return [
        Probe(host.namespace, address, port, protocol, source, next(_udp_ports), timeout)
        for _ in range(number)
    ]


def ask_drops(cluster: Cluster, rows: Sequence[Row], services: Mapping[str, Svc]) -> dict[Case, list[Answer]]:
    """All rows that wait for a timeout, asked at once: each would take its timeout alone."""
    dropped = cases([row for row in rows if row.expected is DROPPED])
    asked = [
        (case, probe)
        for case in dropped
        for probe in probes(cluster, case[0], services[case[0].service], *case[1:])
    ]
    answers: dict[Case, list[Answer]] = {}
    for (case, _), answer in zip(asked, run_probes([probe for _, probe in asked]), strict=True):
        answers.setdefault(case, []).append(answer)
    return answers


def destination(
    cluster: Cluster, row: Row, service: Svc, family: Family, protocol: Protocol
) -> tuple[str, int]:
    """The address and port that a row asks."""
    first = next((each for each in service.ports if each.protocol == protocol), service.ports[0])
    if row.target == NODE_PORT:
        address = row.address or cluster.lab.nodes[row.node].ip(family)
        return address, row.port or service.node_port(first)
    return row.address or service.address(row.target, family), row.port or first.port


def judge(
    cluster: Cluster,
    row: Row,
    service: Svc,
    family: Family,
    protocol: Protocol,
    answers: Sequence[Answer] | None = None,
) -> None:
    """Compare everything that was seen with the row; without answers, send its probes first."""
    if answers is None:
        answers = run_probes(probes(cluster, row, service, family, protocol))
    host, source = client_of(cluster, row, service, family)
    verdicts = {answer.verdict for answer in answers}
    assert verdicts == {row.expected.verdict}, answers[:4]
    if row.expected.verdict is Verdict.REACHED:
        reached = [answer.reached for answer in answers if answer.reached]
        assert {name(each.backend, each.port) for each in reached} == row.expected.backends
        sources = {each.source for each in reached}
        if row.expected.masqueraded is False:
            assert sources == {source or host.ip(family)}
        elif row.expected.masqueraded:
            assert sources == {cluster.lab.nodes[translator(row)].ip(family)}


def translator(row: Row) -> str:
    """The node whose rules meet the packet first."""
    if row.target == NODE_PORT:
        return row.node
    return "n2" if row.client in (OUTSIDE_VIA_N2, REMOTE_POD, REMOTE_NODE, "B", "C") else "n1"


def name(backend: str, port: int) -> str:
    """A backend as the tables write it."""
    return backend if port == 8080 else f"{backend}:{port}"
