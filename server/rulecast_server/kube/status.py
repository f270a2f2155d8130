"""What sources tell about themselves, and the boundary at which events leave them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from rulecast_server.kube.decode import BadObject, Key
from rulecast_server.kube.objects import ObjectEvent

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes what a source found; both calls are synchronous and short."""

    def events(self, events: Sequence[ObjectEvent]) -> None:
        """Objects changed. If this raises, the events come again; taking one twice must be harmless."""

    def synced(self) -> None:
        """Every required collection was delivered whole; called once, after its events."""


class Source(Protocol):
    """Where Services, EndpointSlices, Nodes and ServiceCIDRs come from."""

    @property
    def status(self) -> Mapping[str, "ResourceStatus"]:
        """By the plural of the resource."""

    @property
    def failures(self) -> int:
        """Exceptions from the sink so far."""

    def problems(self) -> list[str]:
        """What is wrong now, a line each, for healthz. Never contains a credential."""

    async def run(self, sink: Sink) -> None:
        """Deliver until cancelled."""

    async def close(self) -> None:
        """Release connections; after `run` has ended."""


class ResourceStatus(msgspec.Struct, kw_only=True):
    """Live counters of one resource; read at any time, written only by its reflector."""

    resource: str
    required: bool
    connected: bool = False
    """A list or watch is open, or its last one ended well."""
    disabled: bool = False
    """The server does not have this resource, or does not let us see it; only for those not required."""
    synced: bool = False
    """A whole list was delivered."""
    last_contact: float | None = None
    """Unix seconds of the last byte from the server (or the last good reading of files)."""
    version: int = 0
    """The newest resourceVersion seen, of which everything was delivered."""
    changed: int = 0
    """The resourceVersion of the newest object or deletion that came."""
    objects: int = 0
    lists: int = 0
    streamed_lists: int = 0
    """Of them, those asked for as a watch with initial events."""
    relists: int = 0
    """Lists after the first one that was taken."""
    watches: int = 0
    bookmarks: int = 0
    received: int = 0
    """Watch events other than bookmarks and errors."""
    delivered: int = 0
    """Events given to the sink."""
    stale: int = 0
    """Lists and events ignored because newer state was known."""
    errors: Counter[str] = msgspec.field(default_factory=Counter)
    """Failed requests and watches by reason."""
    last_error: str | None = None
    """Why it is not connected; None while it is."""
    bad_objects: int = 0
    """How often an object could not be decoded."""
    bad: dict[Key, str] = msgspec.field(default_factory=dict)
    """Objects that cannot be decoded now, and why; their last good state stays in use."""

    def contact(self) -> None:
        """Bytes came."""
        self.last_contact = time.time()

    def failed(self, reason: str, detail: str) -> None:
        """A request or a watch failed."""
        self.errors[reason] += 1
        if self.last_error is None:
            _log.warning("%s: %s: %s", self.resource, reason, detail)
        self.connected = False
        self.last_error = f"{reason}: {detail}"

    def works(self) -> None:
        """A request was answered."""
        if self.last_error is not None:
            _log.info("%s: connected again", self.resource)
        self.connected = True
        self.last_error = None

    def report_bad(self, item: BadObject) -> None:
        """An object could not be decoded."""
        self.bad_objects += 1
        if self.bad.get(item.key) != item.detail:
            _log.error("%s %s: skipped: %s", self.resource, "/".join(item.key), item.detail)
        self.bad[item.key] = item.detail

    def problems(self) -> list[str]:
        """Lines for healthz."""
        lines = []
        if self.last_error is not None and not self.disabled:
            lines.append(f"{self.resource}: {self.last_error}")
        elif self.required and not self.synced:
            lines.append(f"{self.resource}: not listed yet")
        lines += [f"{self.resource} {'/'.join(key)}: {detail}" for key, detail in self.bad.items()]
        return lines


class Outlet:
    """Hands events to the sink such that one which the sink chokes on holds up no other.

    An exception from the sink must not lose an update in silence (kubernetes/kubernetes#28674): the batch is
    given again one by one, and what still fails is kept, named in `problems`, and tried again.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._refused: dict[tuple[str, str, str], tuple[ObjectEvent, str]] = {}
        self.failures = 0
        """Exceptions from the sink."""

    def deliver(self, events: Sequence[ObjectEvent]) -> None:
        """Give a batch; never raises."""
        if self._refused:
            for event in events:
                self._refused.pop((event.resource, event.namespace, event.name), None)
        try:
            self._sink.events(events)
        except Exception:
            self.failures += 1
            _log.exception("a batch of %d events was refused", len(events))
            for event in events:
                self._single(event)

    def retry(self) -> None:
        """Give what was refused again."""
        for event, _ in list(self._refused.values()):
            self._single(event)

    def problems(self) -> list[str]:
        """Lines for healthz."""
        return [
            f"{event.resource} {event.namespace}/{event.name}: not processed: {why}"
            for event, why in self._refused.values()
        ]

    def _single(self, event: ObjectEvent) -> None:
        key = (event.resource, event.namespace, event.name)
        try:
            self._sink.events([event])
        except Exception as error:
            self.failures += 1
            self._refused[key] = (event, f"{type(error).__name__}: {error}")
        else:
            self._refused.pop(key, None)


class Gate:
    """Calls back once, when everything required has arrived."""

    def __init__(self, required: Collection[str], then: Callable[[], None]) -> None:
        self._missing = set(required)
        self._then = then
        self._done = False

    def arrive(self, name: str) -> None:
        """One has arrived; further calls for it change nothing. Raises what the callback raises, and then
        the next arrival calls it again."""
        self._missing.discard(name)
        if not self._missing and not self._done:
            self._then()
            self._done = True
