"""A feed whose server is in the same process: frames come by call. For one node on its own."""

import asyncio
from collections.abc import Callable

from rulecast.view import Receipt, Update
from rulecast_agent.feed.base import FeedStatus
from rulecast_agent.feed.session import AgentSession


class LocalFeed:
    """Runs the agent's side of the protocol over two callables. A `Feed`."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._send: Callable[[bytes], None] | None = None
        self._on_update: Callable[[Update], None] | None = None

    @property
    def status(self) -> FeedStatus:
        """See `Feed`."""
        return self._session.status

    def connect(self, send: Callable[[bytes], None]) -> None:
        """Where requests go; the other side must answer through `deliver`. Before `run`."""
        self._send = send

    def deliver(self, data: bytes) -> None:
        """Take one frame. Raises WireError."""
        update = self._session.frame(data)
        if update is not None and self._on_update is not None:
            self._on_update(update)
        self._write()

    async def run(self, on_update: Callable[[Update], None]) -> None:
        """See `Feed`."""
        assert self._send is not None
        self._on_update = on_update
        self._send(self._session.hello("in this process"))
        await asyncio.Event().wait()

    def ack(self, receipt: Receipt) -> None:
        """See `Feed`."""
        self._session.ack(receipt)
        self._write()

    def report(self, node_error: str) -> None:
        """See `Feed`."""
        self._session.report(node_error)
        self._write()

    def _write(self) -> None:
        if self._send is None or self._on_update is None:
            return
        while (request := self._session.request()) is not None:
            self._send(request)
