"""Exponential backoff with jitter."""

import random


class Backoff:
    """Grows from `first` to `limit` seconds by `factor`; each delay is drawn from its upper half.

    Jitter keeps thousands of agents that lost the same server from coming back in step.
    """

    def __init__(
        self,
        *,
        first: float,
        limit: float,
        factor: float = 2.0,
        draw: random.Random | None = None,
    ) -> None:
        self._first = first
        self._limit = limit
        self._factor = factor
        self._draw = draw or random.Random()  # noqa: S311  (spreads load, guards no secret)
        self._ceiling = first
        self.failures = 0
        """Since the last reset."""

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        ceiling = self._ceiling
        self._ceiling = min(ceiling * self._factor, self._limit)
        self.failures += 1
        return ceiling * (1 + self._draw.random()) / 2

    def reset(self) -> None:
        """Begin anew after a success."""
        self._ceiling = self._first
        self.failures = 0
