"""Connections and UDP flows that stay while everything around them changes."""

import contextlib
import errno
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rulecast.model import Protocol
from tests.conformance.cases import Case
from tests.conformance.compare import STAYS, Difference, Seen
from tests.conformance.twins import Side, Twins
from tests.netns.cluster import SLOWNESS
from tests.netns.flows import Flow, tcp, udp

PATIENCE = 3.0 * SLOWNESS
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

    def differences(
        self, counts: Counter[str], explains: Callable[[Difference], str | None]
    ) -> list[Difference]:
        """Ask every flow again; one that does not answer on a side as on the other ends.

        A stale flow stays until the cleaner's next turn: such answers are asked for until it had one, if
        nothing explains them.
        """
        became = self._ask(self._pairs)
        counts["flows"] += len(became)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and (
            late := [
                pair
                for pair, seen in became.items()
                if _late(pair, seen) and not explains(Difference(pair.case, *seen))
            ]
        ):
            time.sleep(0.2)
            became |= self._ask(late)
        self._pairs = [pair for pair, seen in became.items() if seen == (STAYS, STAYS)]
        self._close(pair for pair in became if pair not in self._pairs)
        return [Difference(pair.case, *seen) for pair, seen in became.items() if seen[0] != seen[1]]

    def _ask(self, pairs: Sequence[Pair]) -> dict[Pair, tuple[Seen, Seen]]:
        answers = list(self._pool.map(_answer, (flow for pair in pairs for flow in pair.flows)))
        return {
            pair: (_became(pair.backend, ours), _became(pair.backend, theirs))
            for pair, ours, theirs in zip(pairs, answers[::2], answers[1::2], strict=True)
        }

    def open(self, cases: Sequence[Case]) -> None:
        """Begin flows for some of these questions, where both sides are answered by the same backend."""
        for case in cases:
            if len(self._pairs) >= MOST:
                return
            if case.source is None and case.protocol is not Protocol.SCTP and (pair := self._pair(case)):
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
        answer = flow.ask_where()
        if answer in ("refused", "dropped"):
            flow.__exit__()
            return None
        return flow, answer

    @staticmethod
    def _close(pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            for flow in pair.flows:
                flow.__exit__()


def _answer(flow: Flow) -> str:
    try:
        return flow.ask_where()
    except OSError as error:
        # An ICMP error of routing.
        return "dropped" if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) else "refused"


def _became(backend: str, answer: str) -> Seen:
    if answer == backend:
        return STAYS
    return Seen(frozenset({(answer if answer in ("refused", "dropped") else "moved", "")}))


def _late(pair: Pair, seen: tuple[Seen, Seen]) -> bool:
    """Whether another turn may change what differs. UDP flows that ours alone removed do not come back."""
    ours, theirs = seen
    return ours != theirs and (theirs != STAYS or pair.case.protocol is Protocol.TCP)
