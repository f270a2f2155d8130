"""The loop that keeps the kernel at what the feed says.

Updates merge while the kernel is busy. All calls of the dataplane run in one thread, one at a time, in this
order of urgency: apply what is pending, try again what was refused, look for changes made by others. Nothing
is written before the first full update, and nothing that failed is forgotten (kubernetes/kubernetes#112604).
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from rulecast.backoff import Backoff
from rulecast.model import ClusterInfo, Family, NodeInfo, Revision, ServiceKey
from rulecast.runner import Clock, LoopClock, Pacer
from rulecast.view import Receipt, ServiceView, Update
from rulecast_agent.dataplane.base import Dataplane, DataplaneError, Drift, HostConfig
from rulecast_agent.feed.base import Feed
from rulecast_agent.metrics import AgentMetrics
from rulecast_agent.nodeports import host_config
from rulecast_agent.pending import Pending
from rulecast_agent.settings import AgentSettings
from rulecast_agent.status import ProxyHealth

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
_CHECK_PERIOD = 1.0
_FIRST_RETRY = 0.25


class Follower(Protocol):
    """Acts on services once their rules are in the kernel."""

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> None:
        """These services are in the kernel as given (None: gone). On the event loop; must not block."""
        ...

    def nodeport_addresses(self, addresses: Mapping[Family, tuple[str, ...] | None]) -> None:
        """Where node ports answer from now on, by family, as `FamilyConfig` has it."""
        ...


class Addresses(Protocol):
    """The addresses of this host's interfaces."""

    @property
    def current(self) -> Collection[str]:
        """Canonical addresses, loopback included."""
        ...

    async def run(self, on_change: Callable[[], None]) -> None:
        """Watch until cancelled; `on_change` is called on the event loop after `current` changed."""
        ...


class Reconciler:
    """Drives one dataplane from one feed."""

    def __init__(
        self,
        *,
        settings: AgentSettings,
        feed: Feed,
        dataplane: Dataplane,
        families: Collection[Family],
        addresses: Addresses,
        health: ProxyHealth,
        metrics: AgentMetrics,
        followers: Sequence[Follower] = (),
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        draw: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._feed = feed
        self._dataplane = dataplane
        self._families = families
        self._addresses = addresses
        self._health = health
        self._metrics = metrics
        self._followers = followers
        self._clock = clock or LoopClock()
        self._wall = wall
        self._wake = asyncio.Event()
        self._executor: ThreadPoolExecutor | None = None
        self._pending = Pending()
        self._node: NodeInfo | None = None
        """As last known: when the Node object goes, its facts stay in the rules."""
        self._node_missing = False
        self._cluster = ClusterInfo()
        self._revision = Revision(0)
        self._host: HostConfig | None = None
        self._applied_host: HostConfig | None = None
        self._synced = False
        self._known: set[ServiceKey] = set()
        self._unsettled: dict[ServiceKey, ServiceView | None] = {}
        """Given to the dataplane and refused: followers hear of it when it is in."""
        self._errors: Mapping[ServiceKey, str] = {}

        def backoff() -> Backoff:
            return Backoff(first=_FIRST_RETRY, limit=settings.sync_period, draw=draw)

        self._apply_pacer = Pacer(min_interval=settings.min_sync_period, backoff=backoff())
        self._retry_pacer = Pacer(min_interval=0.0, backoff=backoff())
        # Until something of ours is in the kernel, nobody can have changed it.
        self._check_at: float | None = None
        self._verify_at: float | None = None

    async def run(self) -> None:
        """Work until cancelled; rules stay. What is not a DataplaneError is a bug and ends it visibly."""
        with ThreadPoolExecutor(1, thread_name_prefix="dataplane") as executor:
            self._executor = executor
            async with asyncio.TaskGroup() as group:
                group.create_task(self._feed.run(self._on_update), name="feed")
                group.create_task(self._addresses.run(self._on_addresses), name="addresses")
                group.create_task(self._drive(), name="dataplane")

    def _on_update(self, update: Update) -> None:
        self._pending.add(update)
        self._revision = update.revision
        if update.node is None and not self._node_missing:
            _LOG.warning(
                "the server knows no Node named %r: node ports and local detection may be missing",
                self._settings.node_name,
            )
        self._node_missing = update.node is None
        self._health.node(update.node)
        self._health.queued()
        self._metrics.queued(update, len(self._pending))
        if self._host is None or (update.node or self._node) != self._node or update.cluster != self._cluster:
            self._node = update.node or self._node
            self._cluster = update.cluster
            self._refresh_host()
        self._apply_pacer.request()
        self._wake.set()

    def _on_addresses(self) -> None:
        self._refresh_host()
        if self._synced and self._host != self._applied_host:
            self._health.queued()
            self._apply_pacer.request()
            self._wake.set()

    def _refresh_host(self) -> None:
        host = host_config(
            self._settings,
            families=self._families,
            node=self._node,
            cluster=self._cluster,
            interface_ips=self._addresses.current,
        )
        if host is None and self._host is None:
            problem = (
                f"--detect-local-mode {self._settings.detection.mode} waits: "
                f"Node {self._settings.node_name!r} has no pod CIDR yet"
            )
            _LOG.warning("%s", problem)
            self._health.problem("host", problem)
            self._feed.report(problem)
        elif host is not None:
            if self._host is None:
                self._health.problem("host", "")
                self._feed.report("")
            self._host = host

    def _apply_due(self) -> float | None:
        if self._host is None or not (self._synced or self._pending.full):
            return None
        return self._apply_pacer.due()

    async def _drive(self) -> None:
        while True:
            times = (self._apply_due(), self._retry_pacer.due(), self._check_at, self._verify_at)
            due = min((at for at in times if at is not None), default=None)
            await self._clock.wait(self._wake, due)
            self._wake.clear()
            if self._is_due(self._apply_due()):
                await self._apply()
            if self._is_due(self._retry_pacer.due()):
                await self._retry()
            if self._is_due(self._verify_at):
                await self._inspect(self._dataplane.verify)
                self._verify_at = self._clock.now() + self._settings.verify_period
            if self._is_due(self._check_at):
                await self._inspect(self._dataplane.check)
                self._check_at = self._clock.now() + _CHECK_PERIOD

    def _is_due(self, at: float | None) -> bool:
        return at is not None and at <= self._clock.now()

    async def _call(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _apply(self) -> None:
        host = self._host
        assert host is not None
        update = self._pending.take() or Update(
            revision=self._revision, full=False, services={}, node=self._node, cluster=self._cluster
        )
        self._apply_pacer.begin()
        try:
            receipt = await self._call(lambda: self._dataplane.apply(update, host))
        except DataplaneError as error:
            self._pending.restore(update)
            self._apply_pacer.failed(self._clock.now())
            self._broken(error)
            return
        now = self._clock.now()
        self._apply_pacer.succeeded(now)
        if host != self._applied_host:
            self._applied_host = host
            addresses = {family: config.nodeport_addresses for family, config in host.families.items()}
            for follower in self._followers:
                follower.nodeport_addresses(addresses)
        if self._host != host:
            self._apply_pacer.request()
        if not self._synced:
            self._synced = True
            self._health.ready = True
            self._metrics.ready.set(1)
            self._check_at = now + _CHECK_PERIOD
            self._verify_at = now + self._settings.verify_period
            _LOG.info(
                "first state in the kernel: %d service ports, %.3f s", len(update.services), receipt.seconds
            )
        self._metrics.applied(update, receipt, now=self._wall())
        self._metrics.pending.set(len(self._pending))
        if update.full:
            self._unsettled = dict.fromkeys(self._known - update.services.keys())
            self._known = set(update.services)
        else:
            for key, view in update.services.items():
                (self._known.discard if view is None else self._known.add)(key)
        self._unsettled.update(update.services)
        self._settle(receipt)

    async def _retry(self) -> None:
        self._retry_pacer.begin()
        try:
            receipt = await self._call(self._dataplane.retry)
        except DataplaneError as error:
            self._retry_pacer.failed(self._clock.now())
            self._broken(error)
            return
        if receipt is not None:
            self._metrics.retried(receipt, now=self._wall())
            self._settle(receipt)

    def _settle(self, receipt: Receipt) -> None:
        """The kernel holds all that was given, except for the receipt's errors."""
        for key, words in receipt.errors.items():
            if self._errors.get(key) != words:
                _LOG.error("service port %s is not programmed: %s", key, words)
        for key in self._errors.keys() - receipt.errors.keys():
            _LOG.info("service port %s is no longer refused", key)
        self._errors = receipt.errors
        if receipt.errors:
            self._retry_pacer.failed(self._clock.now())
        else:
            self._retry_pacer.begin()
            self._retry_pacer.succeeded(self._clock.now())
        settled = self._unsettled
        self._unsettled = {key: settled.pop(key) for key in receipt.errors if key in settled}
        if settled:
            self._metrics.settled(settled)
            for follower in self._followers:
                follower.settled(settled)
        self._feed.ack(receipt)
        self._works()

    async def _inspect(self, look: Callable[[], Drift | None]) -> None:
        try:
            drift = await self._call(look)
        except DataplaneError as error:
            self._health.queued()
            self._broken(error)
            return
        if drift is not None and drift.count:
            self._metrics.drifted(drift.count)
            _LOG.warning(
                "rules were changed by someone else: %d differences mended: %s",
                drift.count,
                "; ".join(drift.differences),
            )
            # Something may have been refused on the way.
            self._retry_pacer.request()
        self._works()

    def _broken(self, error: DataplaneError) -> None:
        _LOG.error("rules cannot be written: %s", error)
        self._metrics.failed()
        self._health.problem("dataplane", str(error))
        self._feed.report(str(error))

    def _works(self) -> None:
        if self._pending and self._apply_pacer.failing:
            return
        self._health.applied()
        if self._pending:
            self._health.queued()
        if "dataplane" in self._health.problems:
            self._health.problem("dataplane", "")
            self._feed.report("")
