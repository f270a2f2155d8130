"""Connections and UDP flows that stay while everything around them changes."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rulecast.model import Protocol
from tests.conformance.cases import Case
from tests.conformance.compare import Difference, Seen
from tests.conformance.twins import Side, Twins
from tests.netns.flows import Flow, tcp, udp

MOST = 12
"""Pairs of flows at a time."""
_TRIES = 6
_THREADS = 16
# Apart from the ports of the questions and of the kernel's own choice.
_source_ports = itertools.cycle(range(20000, 30000))


class Pair(NamedTuple):
    """A flow on each side, both at the same backend."""

    case: Case
    backend: str
    flows: tuple[Flow, Flow]


class Staying(contextlib.AbstractContextManager["Staying"]):
    """The flows of one scenario."""

    def __init__(self, twins: Twins) -> None:
        self._twins = twins
        self._pairs: list[Pair] = []
        self._pool = ThreadPoolExecutor(_THREADS)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._close(self._pairs)

    def differences(self, counts: Counter[str]) -> list[Difference]:
        """Ask every flow again; one that does not answer on a side as on the other ends."""
        answers = list(self._pool.map(Flow.ask, (flow for pair in self._pairs for flow in pair.flows)))
        found = []
        left = []
        for pair, ours, theirs in zip(self._pairs, answers[::2], answers[1::2], strict=True):
            counts["flows"] += 1
            became = [_became(pair.backend, answer) for answer in (ours, theirs)]
            if became == ["stays", "stays"]:
                left.append(pair)
                continue
            self._close([pair])
            if became[0] != became[1]:
                found.append(Difference(pair.case, *(Seen(frozenset({(each, "")})) for each in became)))
        self._pairs = left
        return found

    def open(self, cases: Sequence[Case]) -> None:
        """Begin flows for some of these questions, where both sides are answered by the same backend."""
        for case in cases:
            if len(self._pairs) >= MOST:
                return
            if case.source is None and (pair := self._pair(case)):
                self._pairs.append(pair)

    def _pair(self, case: Case) -> Pair | None:
        ours = self._begin(self._twins.ours, case)
        if ours is None:
            return None
        first, backend = ours
        for _ in range(_TRIES):
            theirs = self._begin(self._twins.theirs, case)
            if theirs is not None and theirs[1] == backend:
                return Pair(case, backend, (first, theirs[0]))
            if theirs is None:
                break
            theirs[0].__exit__()
        first.__exit__()
        return None

    @staticmethod
    def _begin(side: Side, case: Case) -> tuple[Flow, str] | None:
        make = tcp if case.protocol is Protocol.TCP else udp
        try:
            flow = make(side.client(case.host), case.address, case.port, next(_source_ports))
        except OSError:
            return None
        answer = flow.ask()
        if answer in ("refused", "dropped"):
            flow.__exit__()
            return None
        return flow, answer

    @staticmethod
    def _close(pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            for flow in pair.flows:
                flow.__exit__()


def _became(backend: str, answer: str) -> str:
    if answer == backend:
        return "stays"
    return answer if answer in ("refused", "dropped") else "moved"
