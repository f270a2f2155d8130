"""How long to wait before the next attempt."""

import random
from collections.abc import Callable


class Backoff:
    """Exponential with full jitter: agents that lost the same server do not come back together."""

    def __init__(
        self,
        *,
        initial: float = 1.0,
        maximum: float = 15.0,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._initial = initial
        self._maximum = maximum
        self._limit = initial
        self._uniform = uniform

    def next(self) -> float:
        """Seconds to wait now."""
        limit, self._limit = self._limit, min(self._limit * 2, self._maximum)
        return self._uniform(0, limit)

    def reset(self) -> None:
        """The last attempt was good."""
        self._limit = self._initial
