"""What was seen of a question on one side, and whether two sides saw the same."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rulecast.lab import Answer
from tests.conformance.cases import Case
from tests.conformance.wanted import Wanted


class Seen(NamedTuple):
    """All that some tries saw: verdicts, or `BACKEND:PORT` and the address that the backend saw."""

    outcomes: frozenset[tuple[str, str]]

    def __str__(self) -> str:
        return ", ".join(f"{who} as {source}" if source else who for who, source in sorted(self.outcomes))

    @property
    def reached(self) -> bool:
        return any(source for _, source in self.outcomes)


STAYS = Seen(frozenset({("stays", "")}))
"""Of a flow: the backend that it began with still answers."""


class Difference(NamedTuple):
    """Two sides that did not come to agree."""

    case: Case
    ours: Seen
    theirs: Seen

    def __str__(self) -> str:
        return f"{self.case}: ours {self.ours}; kube-proxy {self.theirs}"


class Known(NamedTuple):
    """A difference that has its reason; `row` is how its row in docs/differences.md begins."""

    row: str
    explains: Callable[[Difference, Wanted | None, Wanted | None], bool]
    """Of a difference about a service as it is and as it was a step before."""
    mode: str = ""
    """How the mode of kube-proxy begins; empty: every one."""
    ours: str = ""
    """The mode of ours; empty: every one."""


def seen(answers: Iterable[Answer]) -> Seen:
    """Put tries together."""
    return Seen(
        frozenset(
            (f"{each.reached.backend}:{each.reached.port}", each.reached.source)
            if each.reached
            else (str(each.verdict), "")
            for each in answers
        )
    )


def agree(sticky: bool, ours: Seen, theirs: Seen) -> bool:
    """The same backends, sources and verdicts. With affinity each side stays at a choice of its own."""
    if sticky and ours.reached and theirs.reached:
        return len(ours.outcomes) == len(theirs.outcomes)
    return ours == theirs
