"""Runs something that makes random choices once for each way in which they can fall out."""

from collections.abc import Callable, Sequence
from fractions import Fraction

from tests.trace.packets import Outcome, Shares

Choose = Callable[[Sequence[Fraction]], int]
"""Picks an index; each has the share given for it."""


class _OpenError(Exception):
    """A choice that nobody has made yet."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        super().__init__(shares)
        self.shares = shares


def explore(run: Callable[[Choose], Outcome]) -> Shares:
    """The outcomes of `run` with their shares."""
    found: Shares = {}
    stack: list[tuple[list[int], Fraction]] = [([], Fraction(1))]
    while stack:
        made, share = stack.pop()
        left = iter(made)

        def choose(shares: Sequence[Fraction], left: "Sequence[int] | object" = left) -> int:
            value = next(left, None)  # type: ignore[call-overload]
            if value is None:
                raise _OpenError(shares)
            return int(value)

        try:
            outcome = run(choose)
        except _OpenError as need:
            stack += [([*made, index], share * part) for index, part in enumerate(need.shares) if part]
        else:
            found[outcome] = found.get(outcome, Fraction(0)) + share
    return found
