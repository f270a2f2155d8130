"""When repeated work may run: at once after quiet, spaced under load, later after errors."""

import asyncio
import time
from typing import Protocol

from rulecast.backoff import Backoff


class Clock(Protocol):
    """Monotonic seconds and waiting, so that a test can be both."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    async def wait(self, event: asyncio.Event, until: float | None) -> None:
        """Return when `event` is set or `until` has come (None: only the event counts)."""
        ...


class LoopClock:
    """The real one."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()

    async def wait(self, event: asyncio.Event, until: float | None) -> None:
        """See `Clock.wait`."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass


class Pacer:
    """Tells when requested work is due (client-go's and kube-proxy's BoundedFrequencyRunner).

    A request after quiet is due at once. Otherwise `min_interval` seconds pass between the end of one run and
    the start of the next, so that many requests become one run; after a failure the backoff's delay instead.
    A failed run stays requested.
    """

    def __init__(self, *, min_interval: float, backoff: Backoff) -> None:
        self._min_interval = min_interval
        self._backoff = backoff
        self._requested = False
        self._not_before = float("-inf")

    @property
    def failing(self) -> bool:
        """The last run failed."""
        return self._backoff.failures > 0

    def request(self) -> None:
        """Ask for a run."""
        self._requested = True

    def due(self) -> float | None:
        """From when on the run may start; None when none is requested."""
        return self._not_before if self._requested else None

    def begin(self) -> None:
        """A run starts; requests from here on are for another one."""
        self._requested = False

    def succeeded(self, now: float) -> None:
        """The run ended well at `now`."""
        self._backoff.reset()
        self._not_before = now + self._min_interval

    def failed(self, now: float) -> None:
        """The run failed at `now` and is wanted again."""
        self._requested = True
        self._not_before = now + max(self._min_interval, self._backoff.next())
