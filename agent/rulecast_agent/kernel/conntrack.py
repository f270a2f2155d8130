"""Removes stale UDP flows after rules changed, beside the rules and never in their way.

Only UDP: a TCP or SCTP peer ends its own connection. A run happens after the rules of the change are in, at
once after quiet, then spaced by what it costs; what fails is kept and tried again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

from rulecast.backoff import Backoff
from rulecast.model import Family, ServiceKey
from rulecast.runner import Clock, LoopClock, Pacer
from rulecast.view import ServiceView
from rulecast_agent.kernel.ctnetlink import ConntrackError, Removed, remove_stale
from rulecast_agent.kernel.udp_flows import Targets, UdpServices

_LOG = logging.getLogger(__name__)
_SPACING = 1.0
_REST = 1.0
"""A run is followed by a pause of so many times its length: constant churn takes half a core at most."""

Remove = Callable[[Targets, Mapping[Family, Collection[bytes]]], Removed]
Observe = Callable[[int, float, bool], None]
"""Told of each run: flows deleted, seconds, failed."""


class ConntrackCleaner:
    """Follows the services in the kernel; `run` does the work in a thread of its own."""

    def __init__(
        self,
        *,
        local_ips: Callable[[], Collection[str]],
        observe: Observe,
        remove: Remove = remove_stale,
        clock: Clock | None = None,
    ) -> None:
        """`local_ips`: all addresses of this host, for node ports that answer on every one."""
        self._local_ips = local_ips
        self._observe = observe
        self._remove = remove
        self._clock = clock or LoopClock()
        self._pacer = Pacer(min_interval=_SPACING, backoff=Backoff(first=1.0, limit=60.0))
        self._services = UdpServices()
        self._nodeport_addresses: Mapping[Family, tuple[str, ...] | None] = {}
        self._wake = asyncio.Event()

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> None:
        """See `reconcile.Follower.settled`."""
        if self._services.settled(changes):
            self._pacer.request()
            self._wake.set()

    def nodeport_addresses(self, addresses: Mapping[Family, tuple[str, ...] | None]) -> None:
        """See `reconcile.Follower.nodeport_addresses`."""
        self._nodeport_addresses = addresses

    async def run(self) -> None:
        """Work until cancelled."""
        with ThreadPoolExecutor(1, thread_name_prefix="conntrack") as executor:
            while True:
                await self._clock.wait(self._wake, self._pacer.due())
                self._wake.clear()
                due = self._pacer.due()
                if due is not None and due <= self._clock.now():
                    await self._run_once(executor)

    async def _run_once(self, executor: ThreadPoolExecutor) -> None:
        self._pacer.begin()
        targets = self._services.take()
        begin = time.perf_counter()
        try:
            removed = await asyncio.get_running_loop().run_in_executor(
                executor, self._remove, targets, self._node_port_ips()
            )
        except ConntrackError as error:
            self._services.put_back(targets)
            self._observe(0, time.perf_counter() - begin, True)
            self._pacer.failed(self._clock.now())
            _LOG.error("stale UDP flows cannot be removed: %s", error)
            return
        seconds = time.perf_counter() - begin
        self._observe(removed.deleted, seconds, False)
        self._pacer.succeeded(self._clock.now() + _REST * seconds)
        if removed.deleted:
            _LOG.info(
                "%d stale UDP flows to %d frontends removed, %.3f s", removed.deleted, len(targets), seconds
            )

    def _node_port_ips(self) -> Mapping[Family, Collection[bytes]]:
        ips: dict[Family, set[bytes]] = {family: set() for family in Family}
        local = [ip_address(ip) for ip in self._local_ips()]
        for family in Family:
            chosen = self._nodeport_addresses.get(family, ())
            if chosen is None:
                ips[family] = {ip.packed for ip in local if ip.version == family and not ip.is_loopback}
            else:
                ips[family] = {ip_address(ip).packed for ip in chosen}
        return ips
