"""What is asked of both after each step: random questions, most of them about what changed."""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rulecast.model import Family, Protocol
from tests.conformance.generate import State
from tests.conformance.places import BLOCKED, FAMILIES, NODES, PODS, SECOND
from tests.conformance.wanted import NODE_ADDRESS, Endpoint, Wanted
from tests.netns.objects import CLUSTER_IP, EXTERNAL_IP, VIP, frontend

PER_STEP = 90
"""Questions, at most."""
_CLIENTS = (
    *("cli1", "cli2", "n1", "n2", "n1 second", "n2 second"),
    *("outside", "outside", "outside2", "blocked", "A", "A2", "B", "C"),
)
_POD_NODES = {name: place.node for name, place in PODS.items()} | {"cli1": "n1", "cli2": "n2"}


class Case(NamedTuple):
    """One question: who asks what, about which service."""

    service: int
    client: str
    address: str
    port: int
    protocol: Protocol

    @property
    def family(self) -> Family:
        return Family.IPV6 if ":" in self.address else Family.IPV4

    @property
    def host(self) -> str:
        """The name of the machine that asks."""
        return "outside" if self.client == "blocked" else self.client.removesuffix(" second")

    @property
    def source(self) -> str | None:
        """The address to ask from; None: the machine's choice."""
        if self.client == "blocked":
            return BLOCKED.addresses[self.family]
        if self.client.endswith(" second"):
            return SECOND[self.host].addresses[self.family]
        return None

    def __str__(self) -> str:
        at = f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"
        return f"s{self.service}: {self.client} to {at} {self.protocol}"


def cases(seed: int, states: Sequence[State]) -> list[Case]:
    """Questions about the last of these states; what the ones before had is asked for, too."""
    draw = random.Random(f"{seed}/{len(states)}")
    now = {each.number: each for each in states[-1].services}
    before = {each.number: each for each in states[-2].services} if len(states) > 1 else {}
    everyone = [*now.values(), *before.values()]
    chosen: dict[Case, None] = {}
    for number in sorted(now.keys() | before.keys()):
        known = [each for each in (now.get(number), before.get(number)) if each is not None]
        served = sorted({target for each in known for target in _served(each)})
        others = sorted({target for each in known for target in _others(each)} - set(served))
        same = now.get(number) == before.get(number)
        targets = draw.choices(served, k=2 if same else 7) if served else []
        targets += draw.choices(others, k=1 if same else 2)
        for address, port, protocol in targets:
            case = Case(number, draw.choice(_CLIENTS), address, port, Protocol(protocol))
            if (
                not (sticky(everyone, case) and _answered_around(case))
                and not any(_unsaid(each, case) for each in _concerned(everyone, case))
                and not (protocol == "SCTP" and _ends_unseen(case))
            ):
                chosen[case] = None
    return draw.sample(list(chosen), min(len(chosen), PER_STEP))


def sticky(services: Iterable[Wanted], case: Case) -> bool:
    """Whether one of the services that a question is about has session affinity."""
    return any(each.affinity for each in _concerned(services, case))


def _concerned(services: Iterable[Wanted], case: Case) -> list[Wanted]:
    return [each for each in services if each.number == case.service or serves(each, case)]


def _answered_around(case: Case) -> bool:
    """Whether an answer may get lost by who is chosen; with affinity each side chooses once.

    A pod that asks another node may be sent to a neighbor, whose answer does not come by that node; one that
    is a backend may be sent to itself.
    """
    return case.client in PODS or _asks_another_node(case)


def _ends_unseen(case: Case) -> bool:
    """Whether what becomes of an SCTP question is not what its client learns.

    A pod that another node may send back to itself gets no answer; a node itself refuses what comes to its
    second address, as other protocols show.
    """
    second = any(case.address in place.addresses.values() for place in SECOND.values())
    return second or (case.client in PODS and _asks_another_node(case))


def _asks_another_node(case: Case) -> bool:
    asked = next((name for name, place in NODES.items() if case.address in place.addresses.values()), None)
    return case.client in _POD_NODES and asked not in (None, _POD_NODES[case.client])


def _unsaid(service: Wanted, case: Case) -> bool:
    """Whether the client may be sent to itself, and its slice does not say that it is of this node.

    Such an endpoint is not local to any node, and its own connections are masqueraded only where another
    service says so.
    """
    return any(
        endpoint.who == case.client and not endpoint.said_where
        for each in service.slices
        for endpoint in each.endpoints
    )


def _served(service: Wanted) -> Iterator[tuple[str, int, str]]:
    """Where a service answers, if it has endpoints."""
    for family in service.families:
        for address in (*service.addresses(family).values(), *service.shared_addresses(family)):
            yield from ((address, port.port, port.protocol) for port in service.ports)
        for port in service.ports:
            for place in NODES.values():
                if service.has_node_port(port):
                    yield place.addresses[family], port.node_port, port.protocol


def serves(service: Wanted, case: Case) -> bool:
    """Whether the destination of a question is one that nodes translate for a service."""
    if service.labels or (
        case.address == service.addresses(case.family).get(VIP) and service.vip_is_elsewhere
    ):
        return False
    return (case.address, case.port, str(case.protocol)) in _served(service)


def _others(service: Wanted) -> Iterator[tuple[str, int, str]]:
    """Where it might."""
    for family in FAMILIES:
        yield frontend(CLUSTER_IP, service.number, family), 9, "TCP"
        for kind in (CLUSTER_IP, VIP, EXTERNAL_IP):
            address = frontend(kind, service.number, family)
            yield from ((address, port.port, port.protocol) for port in service.ports)
        if service.incarnation:
            address = frontend(CLUSTER_IP, service.number, family)
            yield from ((address, port.port, port.protocol) for port in service.ports)
        for port in service.ports:
            for place in (*NODES.values(), SECOND["n1"]):
                yield place.addresses[family], port.node_port or 30999, port.protocol


def vips(service: Wanted, family: Family) -> list[str]:
    """Every load-balancer address of a Service."""
    own = service.addresses(family).get(VIP)
    return [*([own] if own else []), *service.shared_addresses(family, VIP, NODE_ADDRESS)]


def names_of(service: Wanted, case: Case) -> set[str]:
    """The names of the Service's ports that a question may be about."""
    return {
        port.name
        for port in service.ports
        if port.protocol == case.protocol and case.port in (port.port, port.node_port)
    }


def endpoints_of(service: Wanted, case: Case) -> list[Endpoint]:
    """The endpoints that a question may be about."""
    names = names_of(service, case)
    return [
        endpoint
        for each in service.slices
        if each.family == case.family
        and any(name in names and protocol == case.protocol for name, _, protocol in each.ports)
        for endpoint in each.endpoints
    ]
