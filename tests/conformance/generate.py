"""Random scenarios: the same seed makes the same scenario, on every machine."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.conformance.odd import NO_ADDRESSES, WRITINGS
from tests.conformance.places import FAMILIES, NODE_PORTS, NODES, PODS, PORTS
from tests.conformance.wanted import CONDITIONS, NODE_ADDRESS, Endpoint, Port, Slice, Wanted, node_object
from tests.netns.objects import CLUSTER_IP, EXTERNAL_IP, VIP, Object

SERVICES = 18
"""In a scenario, at most."""
STEPS = 3
_NUMBERS = range(1, 61)
_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "Headless", "ExternalName")
_ZONES = ("za", "zb", "zc", "")
_RANGES = (
    *("198.51.100.0/25", "198.51.100.7/32", "192.0.2.0/24", "10.244.1.0/24", "0.0.0.0/0"),
    # Written in odd ways, and none.
    *("198.51.100.7/25", " 198.51.100.0/25 ", "198.051.100.0/25", "::ffff:198.51.100.0/121", "198.51.100.7"),
    *("2001:db8:51::/121", "2001:db8:51::7/128", "2001:db8:2::/64", "2001:db8:244:1::/64", "::/0"),
)
_CHANCES = (12, 4, 2, 2, 1, 0.7, 0.7, 0.7, 1, 1, 1)
"""Of each of `CONDITIONS`."""
SHARED_NUMBERS = (201, 202)
MOST_PORTS = 10


@dataclass(frozen=True)
class State:
    """All that exists at one time."""

    services: tuple[Wanted, ...]
    zones: tuple[tuple[str, str], ...]
    """Of each node."""
    hurried: bool = False
    """Nobody waits for it: the next one comes at once."""

    def objects(self) -> list[Object]:
        """Nodes, then each Service with its slices."""
        nodes = [node_object(name, zone) for name, zone in self.zones]
        return nodes + [each for service in self.services for each in service.objects()]


@dataclass(frozen=True)
class Scenario:
    """States that follow one another."""

    seed: int
    states: tuple[State, ...]

    def empty(self) -> list[Object]:
        """What is there before the first state: the nodes."""
        return State((), self.states[0].zones).objects()

    def only(self, *numbers: int) -> "Scenario":
        """The same with these services alone."""
        return Scenario(
            self.seed,
            tuple(
                dataclasses.replace(
                    state, services=tuple(each for each in state.services if each.number in numbers)
                )
                for state in self.states
            ),
        )


def scenario(seed: int, *, services: int = SERVICES, steps: int = STEPS) -> Scenario:
    """The scenario of a seed."""
    draw = _Draw(seed)
    states = [draw.first(services)]
    for _ in range(steps - 1):
        states += draw.next(states[-1])
    return Scenario(seed, tuple(states))


class _Draw:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def first(self, services: int) -> State:
        numbers = self._random.sample(_NUMBERS, self._random.randint(services // 2, services))
        zones = tuple((name, self._random.choice(_ZONES)) for name in NODES)
        return State(tuple(self.service(number) for number in sorted(numbers)), zones)

    def next(self, state: State) -> list[State]:
        """The next step: sometimes by way of others that nobody waits for."""
        states: list[State] = []
        for hurried in (*self._random.choice([(), (), (), (True,), (True, True)]), False):
            state = dataclasses.replace(self._changed(state), hurried=hurried)
            states.append(state)
        return states

    def _changed(self, state: State) -> State:
        """Some services change, go and come; now and then a node moves to another zone."""
        services = []
        for each in state.services:
            turn = self._random.random()
            if turn < 0.1:
                continue
            services.append(self.changed(each) if turn < 0.7 else each)
        free = [number for number in _NUMBERS if number not in {each.number for each in state.services}]
        services += [self.service(number) for number in self._random.sample(free, self._random.randint(0, 3))]
        zones = state.zones
        if self._maybe(0.25):
            zones = tuple((name, self._random.choice(_ZONES)) for name in NODES)
        return State(tuple(sorted(services, key=lambda each: each.number)), zones)

    def service(self, number: int) -> Wanted:
        families = self._random.choice([FAMILIES, FAMILIES, FAMILIES[::-1], FAMILIES[:1], FAMILIES[1:]])
        made = Wanted(
            number=number,
            type=self._random.choices(_TYPES, (4, 3, 6, 0.3, 0.3))[0],
            families=tuple(families),
            ports=self._ports(number),
        )
        for change, chance in (
            (self._external, 0.3),
            (self._ingress, 0.9),
            (self._policies, 0.6),
            (self._affinity, 0.2),
            (self._ranges, 0.3),
            (self._labels, 0.05),
            (self._shared, 0.2),
            (self._odd, 0.1),
            (self._node_ports, 0.1),
            (self._distribution, 0.1),
        ):
            if self._maybe(chance):
                made = change(made)
        return self._reslice(made)

    def changed(self, service: Wanted) -> Wanted:
        """One change, sometimes several at once."""
        changes: Sequence[Callable[[Wanted], Wanted]] = (
            *(self._restate, self._restate, self._restate, self._reslice, self._unslice, self._rehint),
            *(self._type, self._external, self._ingress, self._policies, self._affinity, self._ranges),
            *(self._labels, self._renumber, self._families, self._shared, self._odd, self._node_ports),
            *(self._distribution, self._again),
        )
        for change in self._random.sample(changes, self._random.choice((1, 1, 1, 2, 3))):
            service = change(service)
        return service

    def _ports(self, number: int) -> tuple[Port, ...]:
        pairs = [(port, protocol) for port in (80, 443, 53) for protocol in ("TCP", "UDP", "SCTP")]
        weights = [1 if protocol == "SCTP" else 4 for _, protocol in pairs]
        chosen = list(
            dict.fromkeys(self._random.choices(pairs, weights, k=self._random.choice((1, 1, 2, 3))))
        )
        if self._maybe(0.05):
            more = self._random.sample(range(7000, 7100), MOST_PORTS - len(chosen))
            chosen += [(port, self._random.choice(("TCP", "UDP"))) for port in more]
        return tuple(
            Port(
                name=f"p{index}" if len(chosen) > 1 or self._maybe(0.5) else "",
                port=port,
                protocol=protocol,
                target=self._random.choice(PORTS),
                node_port=0 if self._maybe(0.05) else 30000 + 10 * number + index,
            )
            for index, (port, protocol) in enumerate(chosen)
        )

    def _type(self, service: Wanted) -> Wanted:
        kind = self._random.choices(_TYPES, (4, 4, 4, 1, 1))[0]
        return self._valid(dataclasses.replace(service, type=kind))

    def _families(self, service: Wanted) -> Wanted:
        """Add or take away the second family; the first never changes, nor does the API let it."""
        first = service.families[0]
        other = next(family for family in FAMILIES if family != first)
        families = (first,) if len(service.families) == 2 else (first, other)
        return dataclasses.replace(service, families=families)

    def _external(self, service: Wanted) -> Wanted:
        return self._valid(dataclasses.replace(service, external=not service.external))

    def _ingress(self, service: Wanted) -> Wanted:
        modes = [(mode, "VIP") for mode in ("", "", "VIP", "Proxy")]
        ingress: tuple[tuple[str, str], ...] = () if self._maybe(0.1) else (self._random.choice(modes),)
        if self._maybe(0.1):
            ingress += (("", "lb.example"),)
        return dataclasses.replace(service, ingress=ingress)

    def _shared(self, service: Wanted) -> Wanted:
        """Addresses of a few that anyone may have; now and then a cluster IP of another one, or a node's."""
        kinds = self._random.choices((EXTERNAL_IP, VIP, CLUSTER_IP, NODE_ADDRESS), (6, 6, 1, 1), k=2)
        numbers = [
            self._random.choice(_NUMBERS if kind == CLUSTER_IP else SHARED_NUMBERS)
            for kind in kinds[: self._random.choice((0, 1, 1, 2))]
        ]
        return self._valid(
            dataclasses.replace(service, shared=tuple(sorted(set(zip(kinds, numbers, strict=False)))))
        )

    def _odd(self, service: Wanted) -> Wanted:
        """Addresses written in odd ways, or that are none."""
        odd, ingress = (
            tuple(self._random.sample(NO_ADDRESSES, self._random.choice((0, 0, 1, 2)))) for _ in range(2)
        )
        written = self._random.choice(("", *WRITINGS))
        return self._valid(dataclasses.replace(service, odd=odd, odd_ingress=ingress, written=written))

    def _node_ports(self, service: Wanted) -> Wanted:
        return dataclasses.replace(service, node_ports=not service.node_ports)

    def _distribution(self, service: Wanted) -> Wanted:
        said = self._random.choice(("", "PreferClose", "PreferSameZone", "PreferSameNode"))
        return dataclasses.replace(service, distribution=said)

    def _again(self, service: Wanted) -> Wanted:
        """Deleted and made again under its name, before anyone looks: it has another cluster IP."""
        return dataclasses.replace(service, incarnation=1 - service.incarnation)

    def _policies(self, service: Wanted) -> Wanted:
        external, internal = (self._random.choice(("Cluster", "Local")) for _ in range(2))
        return self._valid(dataclasses.replace(service, external_policy=external, internal_policy=internal))

    def _affinity(self, service: Wanted) -> Wanted:
        seconds = 0 if service.affinity else self._random.choice((60, 10800))
        return dataclasses.replace(service, affinity=seconds)

    def _ranges(self, service: Wanted) -> Wanted:
        chosen = self._random.sample(_RANGES, self._random.choice((0, 1, 2, 3)))
        return dataclasses.replace(service, ranges=tuple(chosen))

    def _labels(self, service: Wanted) -> Wanted:
        labels = () if service.labels else (("service.kubernetes.io/service-proxy-name", "other"),)
        return dataclasses.replace(service, labels=labels)

    def _renumber(self, service: Wanted) -> Wanted:
        """Other ports; slices that still say the old ones are left behind when the names change."""
        made = dataclasses.replace(service, ports=self._ports(service.number))
        return made if self._maybe(0.3) else self._reslice(made)

    def _valid(self, service: Wanted) -> Wanted:
        """What the API would not keep, taken away."""
        if not service.reachable_from_outside:
            service = dataclasses.replace(service, external_policy="")
        return service

    def _reslice(self, service: Wanted) -> Wanted:
        """Other slices."""
        slices: list[Slice] = []
        families = service.families if self._maybe(0.9) else FAMILIES
        # Pods may name the same port differently: what a targetPort's name means is said slice by slice.
        named = self._maybe(0.15)
        hinted = self._random.choice(("", "", "zones", "nodes", "both", "some"))
        for family in families:
            free = self._backends(service)
            for _ in range(self._random.choices((0, 1, 2, 3), (1, 8, 3, 1))[0]):
                count = min(self._random.choices((0, 1, 2, 3, 4), (1, 4, 4, 2, 1))[0], len(free))
                chosen = self._random.sample(free, count)
                if not self._maybe(0.05):
                    free = [each for each in free if each not in chosen]
                endpoints = tuple(self._endpoint(who, hinted) for who in chosen)
                ports = self._slice_ports(service, PORTS if named and not set(chosen) & set(NODES) else ())
                slices.append(Slice(len(slices), family, endpoints, ports))
        return dataclasses.replace(service, slices=tuple(slices))

    def _backends(self, service: Wanted) -> list[str]:
        pods = list(PODS)
        host = all(port.target in NODE_PORTS for port in service.ports)
        return pods + list(NODES) if host and self._maybe(0.5) else pods

    def _slice_ports(self, service: Wanted, targets: Sequence[int]) -> tuple[tuple[str, int, str], ...]:
        ports = [
            (
                port.name,
                self._random.choice(targets or NODE_PORTS) if targets or self._maybe(0.05) else port.target,
                port.protocol,
            )
            for port in service.ports
        ]
        if self._maybe(0.05):
            ports.pop(self._random.randrange(len(ports)))
        if self._maybe(0.05):
            ports.append(("more", 8080, "TCP"))
        return tuple(ports)

    def _endpoint(self, who: str, hinted: str) -> Endpoint:
        state = self._random.choices(list(CONDITIONS), _CHANCES)[0]
        written = self._random.choice(WRITINGS) if self._maybe(0.02) else ""
        return self._hint(Endpoint(who, state, said_where=not self._maybe(0.03), written=written), hinted)

    def _hint(self, endpoint: Endpoint, hinted: str) -> Endpoint:
        zones: tuple[str, ...] = ()
        nodes: tuple[str, ...] = ()
        if hinted in ("zones", "both") or (hinted == "some" and self._maybe(0.5)):
            zones = tuple(self._random.sample(("za", "zb", "zc"), self._random.choice((1, 1, 2))))
        if hinted in ("nodes", "both"):
            nodes = (self._random.choice(("n1", "n2", "n2", "n3")),)
        return endpoint._replace(zones=zones, nodes=nodes)

    def _restate(self, service: Wanted) -> Wanted:
        """Endpoints become ready, begin to end, and end, as in a rollout."""

        def next_state(endpoint: Endpoint) -> Endpoint:
            if self._maybe(0.5):
                return endpoint
            return endpoint._replace(state=self._random.choices(list(CONDITIONS), _CHANCES)[0])

        return self._each_endpoint(service, next_state)

    def _rehint(self, service: Wanted) -> Wanted:
        hinted = self._random.choice(("", "zones", "nodes", "both", "some"))
        return self._each_endpoint(service, lambda endpoint: self._hint(endpoint, hinted))

    def _unslice(self, service: Wanted) -> Wanted:
        """One slice goes."""
        if not service.slices:
            return service
        gone = self._random.choice(service.slices)
        return dataclasses.replace(service, slices=tuple(each for each in service.slices if each != gone))

    def _each_endpoint(self, service: Wanted, change: Callable[[Endpoint], Endpoint]) -> Wanted:
        slices = tuple(
            each._replace(endpoints=tuple(change(endpoint) for endpoint in each.endpoints))
            for each in service.slices
        )
        return dataclasses.replace(service, slices=slices)

    def _maybe(self, chance: float) -> bool:
        return self._random.random() < chance
