"""A feed that begins with the last good state from disk and keeps a copy of each new one there."""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from rulecast.view import Receipt, Update
from rulecast_agent.feed.base import Feed, FeedStatus
from rulecast_agent.feed.checkpoint import CheckpointError, CheckpointFile, CheckpointWriter
from rulecast_agent.feed.session import AgentSession

_log = logging.getLogger(__name__)


class PersistentFeed:
    """Wraps a feed of whatever transport. A `Feed`.

    A node that reboots without a server programs what it had (kubernetes/kubernetes#119265), and its first
    hello tells what that is, so that only the gap is sent.
    """

    def __init__(
        self,
        feed: Feed,
        session: AgentSession,
        file: CheckpointFile,
        *,
        interval: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`session` is the one that `feed` carries; `interval` seconds pass between two savings."""
        self._feed = feed
        self._session = session
        self._file = file
        desired = session.desired
        self._writer = CheckpointWriter(
            file,
            desired.contents,
            reached=lambda: desired.reached,
            holding=lambda: desired.holding,
            interval=interval,
            clock=clock,
        )
        self._problem = ""

    @property
    def status(self) -> FeedStatus:
        """See `Feed`."""
        status = self._feed.status
        problems = status.problems
        if self._problem:
            problems += (self._problem,)
        if self._writer.error:
            problems += (f"the state cannot be saved: {self._writer.error}",)
        return msgspec.structs.replace(status, problems=problems)

    def ack(self, receipt: Receipt) -> None:
        """See `Feed`."""
        self._feed.ack(receipt)

    def report(self, node_error: str) -> None:
        """See `Feed`."""
        self._feed.report(node_error)

    async def run(self, on_update: Callable[[Update], None]) -> None:
        """See `Feed`."""
        await self._restore(on_update)

        def keep(update: Update) -> None:
            on_update(update)
            self._writer.changed()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run(), name="checkpoint")
            await self._feed.run(keep)

    async def _restore(self, on_update: Callable[[Update], None]) -> None:
        try:
            checkpoint = await asyncio.to_thread(self._file.load)
        except CheckpointError as error:
            self._problem = f"the saved state is not used: {error}"
            _log.error("%s", self._problem)
            return
        if checkpoint is None:
            return
        update = self._session.desired.restore(checkpoint.contents, checkpoint.reached)
        self._session.restored(checkpoint.saved_at)
        _log.info(
            "starting from the state saved %.0f s ago: %d services",
            time.time() - checkpoint.saved_at,
            len(update.services),
        )
        on_update(update)
