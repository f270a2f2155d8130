"""What one peer may take, as values and as budgets that refill with time."""

import time
from collections.abc import Callable

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what peers can cost. Seconds; rates are a second's."""

    request_bytes: int = 256 << 10
    """An agent's largest request, an ack with 100 errors, is some 60 KiB."""
    metadata_bytes: int = 16 << 10
    """A token is 1 to 2 KiB."""
    streams_per_connection: int = 100
    """Of all kinds; an agent has one. A proxy that merges connections needs more."""
    streams_per_node: int = 8
    streams: int = 20_000
    """Watch streams in all."""
    greetings: int = 10_000
    """Watch streams whose hello or identity is not established yet, in all."""
    greetings_per_host: int = 1_024
    strangers_per_host: int = 256
    """Connections of one address on which no agent has been let in."""
    handshake: float = 30.0
    """TCP accepted to HTTP/2 settings. Thousands at once take one core some ten seconds."""
    hello: float = 10.0
    idle_connection: float = 300.0
    """A connection without a stream is ended after this."""
    unread: float = 60.0
    """A stream whose peer takes nothing for so long is cut, and its connection with it."""
    ping_strikes: int = 2
    """Probes that come too early before the connection is told ENHANCE_YOUR_CALM and ended."""
    requests_rate: float = 250.0
    requests_burst: float = 1000.0
    """Beyond this a stream's requests are read no faster than the rate. Twice what an agent could ack whose
    every write to the kernel took 8 ms."""
    resyncs_rate: float = 5.0
    resyncs_burst: float = 50.0
    flood: float = 30.0
    """A stream that is held back for so long without a pause is ended."""
    inspections: int = 64
    """Inspection calls at one time; they are not cheap with thousands of nodes."""


class Bucket:
    """A token bucket. Time is given with each call, in seconds of any clock."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, *, burst: float, rate: float, now: float) -> None:
        self._burst = burst
        self._rate = rate
        self._level = burst
        self._at = now

    def level(self, now: float) -> float:
        """What is left; negative when more was taken."""
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level

    def take(self, now: float, count: float = 1.0) -> float:
        """Take; returns the seconds to wait until it was there to be taken."""
        self.level(now)
        self._level -= count
        return max(0.0, -self._level / self._rate)

    def half(self, now: float) -> bool:
        """At least half is left."""
        return self.level(now) >= self._burst / 2

    def full(self, now: float) -> bool:
        """Nothing is missing."""
        return self.level(now) >= self._burst


class Budgets:
    """A bucket for each name, kept only while something is missing from it."""

    _MAX = 100_000

    def __init__(self, *, burst: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._rate = rate
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def left(self, name: str) -> bool:
        """Whether one can be taken."""
        bucket = self._buckets.get(name)
        return bucket is None or bucket.level(self._clock()) >= 1.0

    def take(self, name: str) -> None:
        """Take one."""
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= self._MAX:
                self._forget(now)
            bucket = self._buckets[name] = Bucket(burst=self._burst, rate=self._rate, now=now)
        bucket.take(now)

    def _forget(self, now: float) -> None:
        for name in [name for name, bucket in self._buckets.items() if bucket.full(now)]:
            del self._buckets[name]
        if len(self._buckets) >= self._MAX:
            self._buckets.clear()
