"""ServiceAccount tokens as identities: reviewed by the API server, remembered for a bounded time."""

import asyncio
import base64
import contextlib
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from rulecast_server.kube.reviews import ReviewError, User
from rulecast_server.rpc.authorize import Denial, Refused
from rulecast_server.rpc.limits import Budgets

_log = logging.getLogger(__name__)

_MAX_ENTRIES = 50_000
_MAX_WAITING = 5_000
"""Reviews that wait for their turn."""
_MAX_WAITING_OF_HOST = 64
"""Of them, such as are not known and came from one address."""
_PAUSE = 2.0
"""Seconds without a question after the API server failed to answer one."""


class Reviewer(Protocol):
    """Who can tell what a token is worth. Both raise ReviewError when there is no answer."""

    async def token(self, token: str, audience: str) -> User | None:
        """Who holds it; None when it is not good for this audience."""
        ...

    async def access(self, user: User, path: str) -> bool:
        """May the user get this path?"""
        ...


class TokenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    audience: str = "rulecast"
    fresh: float = 120.0
    """A good token is reviewed again after this: the longest that a revoked one is of use."""
    grace: float = 600.0
    """With the API server out of reach, a token last found good at most this long ago stays good."""
    denied: float = 10.0
    """A bad token is not reviewed again for so long."""
    at_once: int = 16
    """Reviews on their way at one time."""


class Identity(msgspec.Struct, frozen=True):
    """A token's user, and for how many seconds that is to be believed."""

    user: User
    holds: float


class _Entry(msgspec.Struct, frozen=True):
    user: User | None
    reviewed: float
    again: float


class TokenIdentities:
    """Tokens to users. Keeps hashes, never a token."""

    def __init__(
        self,
        reviewer: Reviewer,
        settings: TokenSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reviewer = reviewer
        self._settings = settings
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._asking: dict[bytes, asyncio.Task[User | None]] = {}
        self._turns = asyncio.Semaphore(settings.at_once)
        self._failures = Budgets(burst=20, rate=1.0)
        self._of_host: Counter[str] = Counter()
        self._down_until = 0.0
        self._down = ""
        self.counters: Counter[str] = Counter()
        """Reviews by result: good, bad, failed; and `stale`, times that an old result was used for want of
        an answer."""

    @property
    def problem(self) -> str:
        """Why reviews fail now; empty when they do not."""
        return self._down

    @property
    def waiting(self) -> int:
        """Tokens whose review is on its way or waits for its turn."""
        return len(self._asking)

    async def identify(self, token: str, host: str) -> Identity:
        """Who holds the token, which came from `host`. Raises Refused."""
        now = self._clock()
        expires = expiry(token)
        if expires is not None and now >= expires:
            raise Refused(Denial.UNAUTHENTICATED, "the token expired")
        key = hashlib.sha256(token.encode()).digest()
        entry = self._entries.get(key)
        if entry is None or now >= entry.again:
            entry = await self._renew(key, token, host, entry)
        if entry.user is None:
            raise Refused(Denial.UNAUTHENTICATED, "the API server does not accept the token")
        now = self._clock()
        holds = entry.again - now if expires is None else min(entry.again, expires) - now
        return Identity(entry.user, max(0.1, holds))

    async def _renew(self, key: bytes, token: str, host: str, known: _Entry | None) -> _Entry:
        unknown = known is None or known.user is None
        if unknown and not self._failures.left(host):
            raise Refused(Denial.RESOURCE_EXHAUSTED, "too many bad tokens came from this address")
        if unknown and self._of_host[host] >= _MAX_WAITING_OF_HOST:
            raise Refused(Denial.RESOURCE_EXHAUSTED, "too many tokens of this address wait for a review")
        try:
            with self._waits(host):
                user = await self._ask(key, token)
        except ReviewError as error:
            self._trouble(error)
            now = self._clock()
            if known is None or known.user is None or now >= known.reviewed + self._settings.grace:
                raise Refused(Denial.UNAVAILABLE, "the token cannot be reviewed now") from None
            self.counters["stale"] += 1
            again = min(now + self._settings.fresh / 4, known.reviewed + self._settings.grace)
            return self._keep(key, _Entry(known.user, known.reviewed, again))
        now = self._clock()
        if user is None:
            self.counters["bad"] += 1
            self._failures.take(host)
            return self._keep(key, _Entry(None, now, now + self._settings.denied))
        self.counters["good"] += 1
        # Agents that came together need not be reviewed together for ever.
        return self._keep(key, _Entry(user, now, now + self._settings.fresh * random.uniform(0.8, 1.0)))  # noqa: S311

    @contextlib.contextmanager
    def _waits(self, host: str) -> Iterator[None]:
        self._of_host[host] += 1
        try:
            yield
        finally:
            self._of_host[host] -= 1
            if not self._of_host[host]:
                del self._of_host[host]

    async def _ask(self, key: bytes, token: str) -> User | None:
        """One question for all that ask about one token at a time."""
        asking = self._asking.get(key)
        if asking is None:
            if len(self._asking) >= _MAX_WAITING:
                raise Refused(Denial.UNAVAILABLE, "too many tokens wait for a review")
            asking = self._asking[key] = asyncio.create_task(self._review(token), name="token review")
            asking.add_done_callback(lambda task: self._answered(key, task))
        # Who leaves does not take the answer from those who wait for the same.
        return await asyncio.shield(asking)

    def _answered(self, key: bytes, task: asyncio.Task[User | None]) -> None:
        del self._asking[key]
        # Taken here as well: all who waited may have left, and nobody's error is a bug to asyncio.
        if not task.cancelled():
            task.exception()

    async def _review(self, token: str) -> User | None:
        async with self._turns:
            if self._clock() < self._down_until:
                raise ReviewError(self._down)
            try:
                user = await self._reviewer.token(token, self._settings.audience)
            except ReviewError:
                self.counters["failed"] += 1
                self._down_until = self._clock() + _PAUSE
                raise
            if self._down:
                _log.info("tokens can be reviewed again")
                self._down = ""
            return user

    def _trouble(self, error: ReviewError) -> None:
        if not self._down:
            _log.error(
                "tokens cannot be reviewed: %s; known ones are good for %g s", error, self._settings.grace
            )
        self._down = str(error)

    def _keep(self, key: bytes, entry: _Entry) -> _Entry:
        self._entries.pop(key, None)
        if len(self._entries) >= _MAX_ENTRIES:
            now = self._clock()
            useless = [key for key, held in self._entries.items() if held.user is None or held.again < now]
            for each in useless or list(self._entries)[: _MAX_ENTRIES // 10]:
                del self._entries[each]
        self._entries[key] = entry
        return entry


class _Claims(msgspec.Struct):
    exp: float | None = None


def expiry(token: str) -> float | None:
    """When a JWT says that it expires, in unix seconds; None for what is no JWT.

    Not verified: it may end what the API server accepted, and never stands in for a review.
    """
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        payload = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return msgspec.json.decode(payload, type=_Claims).exp
    except (ValueError, msgspec.MsgspecError):
        return None
