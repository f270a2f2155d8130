"""A clock, a feed and a dataplane that a test holds in its hands."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine

from rulecast.model import ServiceKey
from rulecast.view import Receipt, ServiceView, Update
from rulecast_agent.dataplane.base import DataplaneError, Drift, HostConfig
from rulecast_agent.feed.base import FeedStatus


async def until(condition: Callable[[], bool], *, patience: float = 5.0) -> None:
    """Wait for what must come to hold."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "did not come to hold"
        await asyncio.sleep(0.001)


async def quiet() -> None:
    """Let everything that could happen now happen."""
    for _ in range(10):
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running(work: Coroutine[object, object, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run a task for the length of the block; an error of it fails the test."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class ManualClock:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._tick = asyncio.Event()

    def now(self) -> float:
        return self.time

    async def wait(self, event: asyncio.Event, until: float | None) -> None:
        while not event.is_set() and (until is None or until > self.time):
            waiters = [asyncio.ensure_future(each.wait()) for each in (event, self._tick)]
            try:
                await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiter in waiters:
                    waiter.cancel()
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self.time += seconds
        self._tick.set()
        self._tick = asyncio.Event()


class FakeFeed:
    """Delivers what the test gives it; keeps what comes back."""

    def __init__(self) -> None:
        self.status = FeedStatus(connected=True)
        self.acks: list[Receipt] = []
        self.reports: list[str] = []
        self._deliver: Callable[[Update], None] | None = None

    async def run(self, on_update: Callable[[Update], None]) -> None:
        self._deliver = on_update
        await asyncio.Event().wait()

    async def give(self, *updates: Update) -> None:
        await until(lambda: self._deliver is not None)
        assert self._deliver is not None
        for update in updates:
            self._deliver(update)

    def ack(self, receipt: Receipt) -> None:
        self.acks.append(receipt)

    def report(self, node_error: str) -> None:
        self.reports.append(node_error)


class FakeAddresses:
    """Interface addresses that the test sets."""

    def __init__(self, *current: str) -> None:
        self.current: Collection[str] = frozenset(current)
        self._on_change: Callable[[], None] | None = None

    async def run(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        await asyncio.Event().wait()

    def set(self, *current: str) -> None:
        self.current = frozenset(current)
        assert self._on_change is not None
        self._on_change()


class FakeDataplane:
    """A kernel that is a dict. `errors` are raised by the next applies; `refused` services stay out."""

    def __init__(self) -> None:
        self.kernel: dict[ServiceKey, ServiceView] = {}
        self.applied: list[Update] = []
        self.hosts: list[HostConfig] = []
        self.calls: list[str] = []
        self.errors: list[Exception] = []
        self.check_errors: list[DataplaneError] = []
        self.drifts: list[Drift] = []
        self.refused: set[ServiceKey] = set()
        self.gate = threading.Event()
        """Clear to hold every apply inside the kernel."""
        self.gate.set()
        self.inside = 0
        self.threads: set[int] = set()
        self.overlapped = False
        self._owed: dict[ServiceKey, ServiceView | None] = {}

    def apply(self, update: Update, host: HostConfig) -> Receipt:
        with self._call("apply"):
            assert self.gate.wait(10)
            if self.errors:
                raise self.errors.pop(0)
            self.applied.append(update)
            self.hosts.append(host)
            if update.full:
                self.kernel.clear()
            return self._write({**self._owed, **update.services}, update.revision)

    def retry(self) -> Receipt | None:
        with self._call("retry"):
            if not self._owed:
                return None
            return self._write(dict(self._owed), self.applied[-1].revision)

    def check(self) -> Drift | None:
        with self._call("check"):
            if self.check_errors:
                raise self.check_errors.pop(0)
            return self.drifts.pop(0) if self.drifts else None

    def verify(self) -> Drift:
        with self._call("verify"):
            return self.drifts.pop(0) if self.drifts else Drift()

    def cleanup(self) -> bool:
        raise NotImplementedError

    def _write(self, services: dict[ServiceKey, ServiceView | None], revision: int) -> Receipt:
        self._owed = {}
        for key, view in services.items():
            if key in self.refused and view is not None:
                self._owed[key] = view
            elif view is None:
                self.kernel.pop(key, None)
            else:
                self.kernel[key] = view
        return Receipt(
            revision=revision,  # type: ignore[arg-type]
            seconds=0.001,
            errors=dict.fromkeys(self._owed, "Invalid argument"),
            operations=len(services),
        )

    @contextlib.contextmanager
    def _call(self, name: str):  # type: ignore[no-untyped-def]
        self.overlapped = self.overlapped or self.inside > 0
        self.inside += 1
        self.threads.add(threading.get_ident())
        self.calls.append(name)
        try:
            yield
        finally:
            self.inside -= 1
