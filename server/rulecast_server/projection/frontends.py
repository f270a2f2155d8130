"""Who holds an address and port that more than one Service port asks for.

The winner is the same for every order of events and after a restart: a cluster IP before any other claim
(nobody can take a Service's cluster IP by naming it as an external address, CVE-2020-8554), then the oldest
Service, then namespace, name and port name. Who loses its own cluster IP and port claims nothing at all.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from rulecast.model import ServiceKey, ServicePort


class Frontend(NamedTuple):
    """What packets are addressed to. Node ports have the family in place of an address."""

    address: str
    port: int
    protocol: str

    def __str__(self) -> str:
        return f"{self.address}:{self.port}/{self.protocol}"


class Claim(NamedTuple):
    """One Service port's claim to one frontend; the least of them wins."""

    foreign: bool
    """Not to its own cluster IP."""
    created: str
    namespace: str
    service: str
    key: ServiceKey


class _Claimant(NamedTuple):
    cluster: Frontend
    others: tuple[Frontend, ...]
    claim: Claim
    """The claim to `cluster`; those to others are the same but foreign."""


class Frontends:
    """All claims, indexed by frontend. A change costs what it touches, however many compete."""

    def __init__(self) -> None:
        self._claims: dict[Frontend, list[Claim]] = {}
        self._claimants: dict[ServiceKey, _Claimant] = {}
        self._passed_on: set[Frontend] = set()

    def put(self, port: ServicePort, created: str) -> None:
        """Enter or replace a Service port's claims."""
        self._change(port.key, _claimant(port, created))

    def remove(self, key: ServiceKey) -> None:
        """Withdraw a Service port's claims."""
        self._change(key, None)

    def take_affected(self) -> set[ServiceKey]:
        """All that claim a frontend whose winner changed since the last call."""
        affected = {claim.key for frontend in self._passed_on for claim in self._claims.get(frontend, ())}
        self._passed_on.clear()
        return affected

    def winner(self, frontend: Frontend) -> ServiceKey | None:
        """The Service port that holds a frontend."""
        for claim in self._claims.get(frontend, ()):
            if not claim.foreign or self._alive(claim.key):
                return claim.key
        return None

    def lost(self, port: ServicePort) -> tuple[Frontend, ...]:
        """The frontends of an entered port that others hold; only its cluster IP's if that is lost."""
        key = port.key
        claimant = self._claimants[key]
        if not self._alive(key):
            return (claimant.cluster,)
        claims = self._claims
        return tuple([f for f in claimant.others if len(claims[f]) > 1 and self.winner(f) != key])

    def _alive(self, key: ServiceKey) -> bool:
        cluster = self._claimants[key].cluster
        return self._claims[cluster][0].key == key

    def _change(self, key: ServiceKey, new: _Claimant | None) -> None:
        old = self._claimants.get(key)
        if old == new:
            return
        touched = self._touched(key, (old, new))
        before = {frontend: self.winner(frontend) for frontend in touched}
        if old is not None:
            del self._claimants[key]
            self._withdraw(old.cluster, old.claim)
            for frontend in old.others:
                self._withdraw(frontend, old.claim._replace(foreign=True))
        if new is not None:
            self._claimants[key] = new
            insort(self._claims.setdefault(new.cluster, []), new.claim)
            foreign = new.claim._replace(foreign=True)
            for frontend in new.others:
                insort(self._claims.setdefault(frontend, []), foreign)
        self._passed_on.update(f for f, winner in before.items() if self.winner(f) != winner)

    def _withdraw(self, frontend: Frontend, claim: Claim) -> None:
        claims = self._claims[frontend]
        del claims[bisect_left(claims, claim)]
        if not claims:
            del self._claims[frontend]

    def _touched(self, key: ServiceKey, claimants: Iterable[_Claimant | None]) -> set[Frontend]:
        """Frontends whose winner can change: the claimant's own, and all of whoever it may revive or oust."""
        touched: set[Frontend] = set()
        for claimant in claimants:
            if claimant is None:
                continue
            touched.add(claimant.cluster)
            touched.update(claimant.others)
            # Only the first two owners of that cluster IP and port can come to life or fall from it.
            for claim in self._claims.get(claimant.cluster, ())[:2]:
                if not claim.foreign and claim.key != key:
                    touched.update(self._claimants[claim.key].others)
        return touched


def _claimant(port: ServicePort, created: str) -> _Claimant:
    namespace, name, _, protocol, family = port.name
    number = port.port
    others = [Frontend(ip, number, protocol) for ip in (*port.external_ips, *port.load_balancer_ips)]
    if port.node_port:
        others.append(node_port_frontend(family, port.node_port, protocol))
    # An object without a time is no apiserver's; it must not push aside one that has it.
    claim = Claim(False, created or "~", namespace, name, port.key)
    return _Claimant(Frontend(port.cluster_ip, number, protocol), tuple(others), claim)


def node_port_frontend(family: int, port: int, protocol: str) -> Frontend:
    """The frontend of a node port."""
    return Frontend(f"nodePort/ipv{int(family)}", port, protocol)


def without(port: ServicePort, lost: tuple[Frontend, ...]) -> dict[str, object] | None:
    """The fields that change in a Service port that lost frontends; None if its cluster IP is lost."""
    taken = set(lost)
    _, _, _, protocol, family = port.name
    number = port.port
    if Frontend(port.cluster_ip, number, protocol) in taken:
        return None
    node_port = port.node_port
    if node_port and node_port_frontend(family, node_port, protocol) in taken:
        node_port = 0

    def kept(ips: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(ip for ip in ips if Frontend(ip, number, protocol) not in taken)

    return {
        "node_port": node_port,
        "external_ips": kept(port.external_ips),
        "load_balancer_ips": kept(port.load_balancer_ips),
    }
