"""Keeps a Store equal to one collection of the API server, for ever; what changed goes to the outlet."""

import asyncio
import logging
import random
from contextlib import aclosing

import aiohttp

from rulecast.backoff import Backoff
from rulecast_server.kube.client import ApiClient
from rulecast_server.kube.decode import BadObject, Bookmark, MalformedError, Seen, ServerStatus, WatchItem
from rulecast_server.kube.listwatch import (
    ApiError,
    CutError,
    InitialEventsError,
    Listing,
    ListWatch,
    RewoundError,
    SilentError,
    WatchSettings,
)
from rulecast_server.kube.objects import ObjectEvent
from rulecast_server.kube.selectors import Resource
from rulecast_server.kube.status import Gate, Outlet, ResourceStatus
from rulecast_server.kube.store import Store

_log = logging.getLogger(__name__)


class _OlderListError(Exception):
    """The server's list is older than what we hold."""


class Reflector:
    """client-go's Reflector: list, watch, and after any failure the cheapest way back to the truth.

    | what happened | what follows |
    |---|---|
    | the watch ended, was cut, or the server failed | watch again from where we were |
    | 410 as status or event, silence, a garbled line, an old bookmark | list, diffed against the store |
    | 504 "Too large resource version", an older list | wait, then a list without a resourceVersion |
    | 400 or 422 for a streamed list, or one that does not end | paged lists from then on |
    | 400 for the field selector | none from then on; objects are filtered here |
    | 404 or 403 for an optional resource | try again rarely |

    Every row waits with backoff except the two that change what is asked. Watch events, not lists, reset it:
    a server that answers each watch with 410 must not get a list a second (kubernetes/kubernetes#85342).
    """

    def __init__(
        self,
        *,
        resource: Resource,
        client: ApiClient,
        outlet: Outlet,
        gate: Gate,
        settings: WatchSettings,
        status: ResourceStatus,
    ) -> None:
        self._resource = resource
        self._outlet = outlet
        self._gate = gate
        self._settings = settings
        self._status = status
        self._calls = ListWatch(client=client, resource=resource, settings=settings, status=status)
        self._backoff = Backoff(first=settings.backoff[0], limit=settings.backoff[1])
        self._store = Store(resource.plural)
        self._relist = True
        self._consistent = True
        self._too_large = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._cycle()
            except ApiError as error:
                wait = self._answered(error)
            except (SilentError, MalformedError, RewoundError, InitialEventsError) as error:
                self._relist = True
                wait = self._lost(error)
            except _OlderListError as error:
                self._relist = self._consistent = True
                wait = self._lost(error)
            except (CutError, aiohttp.ClientError, OSError) as error:
                wait = self._lost(error)
            except Exception as error:
                # A mistake of ours: what the store holds may not be what was delivered, so begin anew.
                _log.exception("%s: reflector failed", self._resource.plural)
                self._status.failed("internal", f"{type(error).__name__}: {error}")
                self._relist = self._consistent = True
                wait = self._backoff.next()
            await asyncio.sleep(wait)

    async def _cycle(self) -> None:
        since = 0 if self._relist else self._store.version
        floor = 0 if self._consistent else self._store.version
        async with aclosing(self._calls.list_then_watch(since=since, floor=floor)) as steps:
            async for step in steps:
                if isinstance(step, Listing):
                    await self._listed(step)
                else:
                    await self._changed(step)

    async def _listed(self, listing: Listing) -> None:
        events = self._store.replace(
            listing.seen, listing.version, consistent=listing.consistent, keep=listing.unreadable
        )
        self._status.stale = self._store.stale
        if events is None:
            raise _OlderListError(f"list at {listing.version}, known up to {self._store.version}")
        if self._status.synced:
            self._status.relists += 1
        self._status.disabled = False
        self._status.bad.clear()
        for bad in listing.bad:
            self._status.report_bad(bad)
        await self._deliver(events)
        # A version that is no number cannot be watched from; list again after each watch.
        self._relist = not listing.version
        self._consistent = False
        self._too_large = 0
        self._status.synced = True
        self._gate.arrive(self._resource.plural)

    async def _changed(self, batch: list[WatchItem]) -> None:
        events: list[ObjectEvent] = []
        try:
            for item in batch:
                event = self._take(item)
                if event is not None:
                    events.append(event)
        except Exception:
            # The store has taken these, so no list would bring them again.
            await self._deliver(events)
            raise
        self._status.stale = self._store.stale
        self._backoff.reset()
        await self._deliver(events)

    def _take(self, item: WatchItem) -> ObjectEvent | None:
        if isinstance(item, Bookmark):
            self._status.bookmarks += 1
            self._store.reach(item.version)
            return None
        assert not isinstance(item, ServerStatus), "raised by ListWatch"
        self._status.received += 1
        if isinstance(item, BadObject):
            self._status.report_bad(item)
            self._store.reach(item.version)
            return None
        self._status.bad.pop(item.key, None)
        return self._store.upsert(item) if isinstance(item, Seen) else self._store.delete(item)

    def _reached(self) -> None:
        # With the last piece: what is published in between must not claim the rest.
        self._status.version, self._status.changed = self._store.version, self._store.changed

    async def _deliver(self, events: list[ObjectEvent]) -> None:
        """Hand over in pieces. Nothing here is under a timeout: what the store took must arrive."""
        self._status.objects = len(self._store)
        size = self._settings.batch
        if not events:
            self._reached()
        for start in range(0, len(events), size):
            piece = events[start : start + size]
            if start + size >= len(events):
                self._reached()
            self._outlet.deliver(piece)
            self._status.delivered += len(piece)
            await asyncio.sleep(0)
        if not events:
            # `readany` does not suspend while bytes are waiting; a busy resource must not starve the others.
            await asyncio.sleep(0)

    def _answered(self, error: ApiError) -> float:
        """Take a server's refusal; returns how long to wait."""
        status, calls = error.status, self._calls
        listing = self._relist
        if error.expired:
            self._relist = True
        elif error.too_large:
            self._relist = True
            self._too_large += 1
            self._consistent = self._consistent or self._too_large >= self._settings.too_large_tries
        elif listing and calls.streaming and status.code in (400, 422):
            _log.info("%s: no streamed lists here: %s", self._resource.plural, error)
            calls.streaming = False
            return 0.0
        elif listing and calls.field_selector and status.code == 400:
            _log.warning("%s: field selector refused: %s", self._resource.plural, error)
            calls.field_selector = ""
            return 0.0
        elif not self._resource.required and status.code in (403, 404):
            if not self._status.disabled:
                _log.info("%s: not available: %s", self._resource.plural, error)
            self._status.disabled = True
            self._status.errors[str(status.code)] += 1
            self._relist = True
            return self._settings.optional_retry * random.uniform(0.8, 1.2)  # noqa: S311
        self._status.failed(_reason(error), str(error))
        return max(self._backoff.next(), status.retry_after or 0.0)

    def _lost(self, error: Exception) -> float:
        """Take a failure of the connection or of what came through it; returns how long to wait."""
        if isinstance(error, InitialEventsError):
            # Servers before 1.30 with the feature gate on never sent the mark (kubernetes/kubernetes#122805).
            self._calls.streaming = False
        self._status.failed(_LOST.get(type(error), "connection"), str(error) or type(error).__name__)
        return self._backoff.next()


_LOST: dict[type[Exception], str] = {
    SilentError: "silent",
    MalformedError: "malformed",
    RewoundError: "rewound",
    InitialEventsError: "initial-events",
    CutError: "cut",
    _OlderListError: "older-list",
}


def _reason(error: ApiError) -> str:
    if error.expired:
        return "expired"
    if error.too_large:
        return "too-large-resource-version"
    return str(error.status.code or error.status.reason or "error")
