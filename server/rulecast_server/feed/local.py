"""A session within the process, for one node on its own: frames by call instead of by gRPC."""

import time
from collections.abc import Callable, Mapping

from rulecast.model import Changes, ServiceKey
from rulecast.wire.messages import Ack, Hello, Resync, WireError
from rulecast.wire.requests import decode_request
from rulecast_server.feed.log import DeltaLog
from rulecast_server.feed.registry import AckTracker
from rulecast_server.feed.session import Session


class LocalSession:
    """Delivers each step to a callback as soon as it is published. Synchronous."""

    def __init__(
        self,
        log: DeltaLog,
        deliver: Callable[[bytes], None],
        *,
        mark_interval: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.log = log
        self.acks = AckTracker()
        self._deliver = deliver
        self._interval = mark_interval
        self._clock = clock
        self._session: Session | None = None

    def receive(self, request: bytes) -> None:
        """Take a serialized WatchRequest; the first one must be a hello, and each hello begins anew.

        Raises WireError.
        """
        message = decode_request(request)
        if isinstance(message, Hello):
            self._session = Session(
                self.log,
                node=message.node_name,
                zstd=message.zstd,
                position=message.position,
                mark_interval=self._interval,
            )
            self.acks = AckTracker()
        elif self._session is None:
            raise WireError("the first request is not a hello")
        elif isinstance(message, Resync):
            self._session.resync(message)
        elif isinstance(message, Ack):
            self.acks.received(message, at_most=self.log.revision)
        self.pump()

    def publish(
        self,
        changes: Changes,
        *,
        trigger_times: Mapping[ServiceKey, float] | None = None,
        resource_versions: Mapping[str, int] | None = None,
        changed_versions: Mapping[str, int] | None = None,
    ) -> None:
        """Append a projection to the log and deliver what it means for the node."""
        self.log.apply(
            changes,
            trigger_times=trigger_times,
            resource_versions=resource_versions,
            changed_versions=changed_versions,
        )
        self.pump()

    def pump(self, *, idle: bool = False) -> None:
        """Deliver what there is; with `idle` (each mark interval), a mark even when that is nothing."""
        if self._session is None:
            return
        now = self._clock()
        frames = self._session.idle_step(now) if idle else self._session.next_step(now)
        if frames:
            self.acks.sent(self.log.revision, now)
        for frame in frames:
            self._deliver(frame)
