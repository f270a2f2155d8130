"""Ask both sides the same, as often as it takes to be sure."""

import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rulecast.lab import Answer, Probe, Verdict, run_probes
from rulecast.model import Protocol
from tests.conformance.cases import Case, sticky
from tests.conformance.compare import Difference, agree, seen
from tests.conformance.places import FAMILIES
from tests.conformance.twins import Side, Twins
from tests.conformance.wanted import Endpoint, Port, Slice, Wanted
from tests.netns.cluster import SLOWNESS
from tests.netns.objects import CLUSTER_IP, Object, frontend

SETTLING = 30.0 * SLOWNESS
AGREEING = 5.0 * SLOWNESS
"""Seconds of patience; only ever used up when something is broken."""
_TRIES = 7
# All of four equal backends, but for one case in a million.
_SURE = 54
_SHORT = 0.35 * SLOWNESS
# An ICMP error does not end connect() of TCP over IPv6 before the second SYN, a second later.
_LONG = max(2.3, 2 * _SHORT)
_MARKER = 250
_RULESETS = {
    "nft": ("nft", "list", "ruleset"),
    "iptables": ("iptables-legacy-save",),
    "ip6tables": ("ip6tables-legacy-save",),
    "ipvs": ("sh", "-c", "cat /proc/net/ip_vs /proc/net/ip_vs_conn 2>&- || true"),
}
_source_ports = itertools.cycle(range(33000, 64000))


class Judge:
    """Brings both sides to a state, and compares them."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        self._generation = 0

    def settle(self, objects: Sequence[Object]) -> None:
        """Make these all that exists, and wait until every kernel has them. Raises AssertionError.

        Services and slices come in watches of their own, each in order: a service that got another port and
        another endpoint after everything else shows that all was seen, and families are written apart.
        """
        self._generation += 1
        marker = _marker(self._generation)
        self.twins.put([*objects, *marker.objects()])
        backend = marker.slices[0].endpoints[0].who
        port = marker.ports[0].port
        todo = [
            (side, client, frontend(CLUSTER_IP, _MARKER, family))
            for side in self.twins.sides
            for client in ("cli1", "cli2")
            for family in FAMILIES
        ]
        end = time.monotonic() + SETTLING
        while todo:
            answers = run_probes(
                Probe(side.client(client).namespace, address, port, timeout=0.15 * SLOWNESS)
                for side, client, address in todo
            )
            todo = [
                each
                for each, answer in zip(todo, answers, strict=True)
                if answer.reached is None or answer.reached.backend != backend
            ]
            for side in self.twins.sides:
                side.check()
            missing = [f"{side.name} by {client} at {address}" for side, client, address in todo]
            assert time.monotonic() < end, f"not settled in {SETTLING:g} s: {missing}"

    def save(self, directory: Path) -> Path:
        """Write every node's ruleset, and every log so far, into a directory."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for side in self.twins.sides:
            for node in side.lab.nodes.values():
                for program, argv in _RULESETS.items():
                    listed = node.namespace.run(*argv)
                    if listed.strip():
                        (directory / f"{side.name}-{node.name}.{program}").write_text(listed)
            for log in side.directory.glob(f"{side.name}-*.log"):
                shutil.copy(log, directory)
        return directory

    def differences(
        self,
        cases: Sequence[Case],
        services: Mapping[int, Wanted],
        counts: Counter[str],
        explains: Callable[[Difference], str | None],
    ) -> tuple[list[Difference], list[Case]]:
        """The cases in which the sides do not come to agree, and those that backends answered.

        kube-proxy's first answers are counted. What has an explanation is asked for once more, no longer.
        """
        first = self._ask(cases, dict.fromkeys(cases, 1), _SHORT)
        counts.update(f"saw {theirs[0].verdict}, {case.protocol}" for case, (_, theirs) in first.items())
        again = {case: _TRIES - 1 for case, both in first.items() if any(map(_reached, both))}
        rest = self._ask(list(again), again, _SHORT)
        open_, answered = [], []
        for case, both in first.items():
            later = rest.get(case, ([], []))
            ours, theirs = (seen([*one, *more]) for one, more in zip(both, later, strict=True))
            if not agree(sticky(services.values(), case), ours, theirs):
                open_.append(Difference(case, ours, theirs))
            elif ours.reached:
                answered.append(case)
        end = time.monotonic() + AGREEING
        told: list[Difference] = []
        while open_ and time.monotonic() < end:
            found = self._again(open_, services)
            told += [each for each in found if explains(each)]
            open_ = [each for each in found if not explains(each)]
        return told + open_, answered

    def _again(self, open_: Sequence[Difference], services: Mapping[int, Wanted]) -> list[Difference]:
        tries = {each.case: _SURE if each.ours.reached or each.theirs.reached else 3 for each in open_}
        again = self._ask(list(tries), tries, _LONG)
        found = [Difference(case, seen(ours), seen(theirs)) for case, (ours, theirs) in again.items()]
        return [
            each for each in found if not agree(sticky(services.values(), each.case), each.ours, each.theirs)
        ]

    def _ask(
        self, cases: Sequence[Case], tries: Mapping[Case, int], timeout: float
    ) -> dict[Case, tuple[list[Answer], list[Answer]]]:
        """So many tries of each case on each side, all at once."""
        asked = [
            (case, index)
            for case in cases
            for index in range(len(self.twins.sides))
            for _ in range(tries[case])
        ]
        found: dict[Case, tuple[list[Answer], list[Answer]]] = {case: ([], []) for case in cases}
        sctp = [each for each in asked if each[0].protocol is Protocol.SCTP]
        rest = [each for each in asked if each[0].protocol is not Protocol.SCTP]
        answers = run_probes(_probe(case, self.twins.sides[index], timeout) for case, index in rest)
        for (case, index), answer in zip(rest, answers, strict=True):
            found[case][index].append(answer)
        for index, side in enumerate(self.twins.sides):
            of_side = [case for case, at in sctp if at == index]
            answers = side.sctp.run([_probe(case, side, _SHORT) for case in of_side])
            for case, answer in zip(of_side, answers, strict=True):
                found[case][index].append(answer)
        return found


def _reached(answers: Sequence[Answer]) -> bool:
    return any(each.verdict is Verdict.REACHED for each in answers)


def _probe(case: Case, side: Side, timeout: float) -> Probe:
    # A reused port would be an old flow to conntrack, which keeps the verdict of its first datagram.
    port = 0 if case.protocol is Protocol.TCP else next(_source_ports)
    host = side.client(case.host)
    return Probe(host.namespace, case.address, case.port, case.protocol, case.source, port, timeout)


def _marker(generation: int) -> Wanted:
    port = Port("", 1000 + generation, "TCP", 8080, 0)
    who = "A" if generation % 2 else "A2"
    slices = tuple(
        Slice(index, family, (Endpoint(who),), (("", 8080, "TCP"),)) for index, family in enumerate(FAMILIES)
    )
    return Wanted(_MARKER, "ClusterIP", FAMILIES, (port,), slices=slices)
