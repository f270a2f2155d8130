"""What another mode left in the kernel goes once this one's rules are in: no gap, and nothing stale."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import DataplaneError

_log = logging.getLogger(__name__)


class Succession:
    """A `reconcile.Follower`, and a job beside it."""

    def __init__(self, others: Sequence[Callable[[], bool]]) -> None:
        """`others`: remove one mode's rules each; True when there were some."""
        self._others = others
        self._settled = asyncio.Event()

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> None:  # noqa: ARG002
        """See `reconcile.Follower`."""
        self._settled.set()

    def nodeport_addresses(self, addresses: Mapping[Family, tuple[str, ...] | None]) -> None:
        """See `reconcile.Follower`."""

    async def run(self) -> None:
        """Wait for the first state, then remove; what cannot be looked at is told and left."""
        await self._settled.wait()
        for remove in self._others:
            try:
                if await asyncio.to_thread(remove):
                    _log.info("removed the rules that another mode had left")
            except DataplaneError as error:
                _log.warning("rules of another mode may be left: %s", error)
