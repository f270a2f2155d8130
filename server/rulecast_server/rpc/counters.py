"""What happened at the door, for metrics and logs."""

import logging
import time
from collections import Counter
from collections.abc import Callable

import grpc
import msgspec

from rulecast_server.rpc.limits import Bucket

_log = logging.getLogger(__name__)


class RpcCounters(msgspec.Struct, kw_only=True):
    """Monotone."""

    refused: Counter[str] = msgspec.field(default_factory=Counter)
    """Calls that were not let in or were ended for what they did, by status code."""
    unread_cuts: int = 0
    """Connections ended because a stream's peer took nothing."""
    excess_cuts: int = 0
    """Connections ended because their address had too many on which nobody was let in."""
    revoked: int = 0
    """Streams that were ended because their identity no longer held."""
    throttled: int = 0
    """Requests that were read later because too many came."""


class SparseLog:
    """Warnings about peers, as long as they are few: strangers must not be able to fill a disk."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = Bucket(burst=20, rate=1.0, now=clock())
        self._silent = 0

    def warning(self, text: str, *values: object) -> None:
        """As of a logger."""
        now = self._clock()
        if self._bucket.level(now) < 1.0:
            self._silent += 1
            return
        self._bucket.take(now)
        more = f" (and {self._silent} such lines before it were left out)" if self._silent else ""
        self._silent = 0
        _log.warning(text + "%s", *values, more)


class RefusalLog:
    """Counts refusals, and tells them."""

    def __init__(self, counters: RpcCounters) -> None:
        self._counters = counters
        self._log = SparseLog()

    def refused(self, code: grpc.StatusCode, peer: str, what: str, why: str) -> None:
        """`peer` was refused `what`."""
        self._counters.refused[code.name.lower()] += 1
        self._log.warning("%s was refused %s: %s", peer, what, why)
