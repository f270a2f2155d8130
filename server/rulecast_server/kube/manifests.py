"""A directory of manifests as a source, read again as its files change."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISDIR

import msgspec

from rulecast_server.kube.decode import Seen
from rulecast_server.kube.manifest_files import SUFFIXES, FileObject, ManifestError, ObjectKey, parse_file
from rulecast_server.kube.objects import ObjectEvent
from rulecast_server.kube.selectors import RESOURCES
from rulecast_server.kube.status import Outlet, ResourceStatus, Sink
from rulecast_server.kube.store import Store

_log = logging.getLogger(__name__)

Signature = tuple[int, int, int]
"""mtime in ns, size, inode."""


class _File(msgspec.Struct):
    """What is known of one file."""

    signature: Signature | None = None
    """Of the last reading, good or bad."""
    candidate: Signature | None = None
    """Seen once; read when it is seen again."""
    objects: list[FileObject] = msgspec.field(default_factory=list)
    """Of the last good reading."""
    error: str | None = None


class ManifestSource:
    """Implements Source over the *.yaml, *.yml and *.json files of a directory (not of those below it).

    A changed file is read once its time and size have stood still for one interval, so that a half-written
    one is seldom read; one that cannot be read keeps its last good objects until it can, or is deleted.
    An object that several files define counts as in the first of them by name. A directory that goes
    away as a whole changes nothing. Files whose names begin with a dot are ignored.
    """

    def __init__(self, directory: Path, *, interval: float = 0.1, retry_refused: float = 5.0) -> None:
        self._directory = directory
        self._interval = interval
        self._retry_refused = retry_refused
        self._files: dict[str, _File] = {}
        self._duplicates: dict[ObjectKey, tuple[str, ...]] = {}
        self._directory_error: str | None = None
        self._stores = {each.plural: Store(each.plural) for each in RESOURCES}
        self._status = {
            each.plural: ResourceStatus(resource=each.plural, required=True) for each in RESOURCES
        }
        self._generation = 0
        self._outlet: Outlet | None = None
        self.reloads = 0
        """Readings that changed the set of objects' files."""
        self.broken_readings = 0
        """Readings of a file that failed."""

    @property
    def status(self) -> Mapping[str, ResourceStatus]:
        """By the plural of the resource. Versions are numbers of readings."""
        return self._status

    @property
    def failures(self) -> int:
        """Exceptions from the sink."""
        return self._outlet.failures if self._outlet else 0

    def problems(self) -> list[str]:
        """What is wrong now: broken files with their lines, duplicates, refused events."""
        lines = [self._directory_error] if self._directory_error else []
        lines += [file.error for file in self._files.values() if file.error]
        lines += [
            f"{'/'.join(part for part in key if part)}: in {', '.join(names)}; {names[0]} counts"
            for key, names in self._duplicates.items()
        ]
        if self._outlet:
            lines += self._outlet.problems()
        return lines

    def load(self) -> None:
        """Read every file for the first time. Raises ManifestError at the first one that cannot be read."""
        self._scan(settled=True)
        errors = [self._directory_error, *(file.error for file in self._files.values())]
        for error in errors:
            if error:
                raise ManifestError(error)

    async def run(self, sink: Sink) -> None:
        """Deliver until cancelled; reads first, when `load` has not."""
        self._outlet = Outlet(sink)
        if not self._generation:
            await asyncio.to_thread(self._scan, settled=True)
        await self._deliver()
        sink.synced()
        retry_at = time.monotonic() + self._retry_refused
        wait = self._interval
        while True:
            await asyncio.sleep(wait)
            started = time.monotonic()
            changed = await asyncio.to_thread(self._scan, settled=False)
            # A directory with thousands of files takes milliseconds to look through.
            wait = max(self._interval, 20 * (time.monotonic() - started)) if not changed else self._interval
            if changed:
                await self._deliver()
            if started > retry_at:
                self._outlet.retry()
                retry_at = started + self._retry_refused

    async def close(self) -> None:
        """Nothing is held open."""

    def _scan(self, *, settled: bool) -> bool:
        """Read what is new; whether anything changed. `settled`: do not wait until it stands still."""
        try:
            now = self._signatures()
        except OSError as error:
            self._complain(f"{self._directory}: {error.strerror}; its last state stays in use")
            return False
        self._directory_error = None
        gone = self._files.keys() - now.keys()
        for name in gone:
            del self._files[name]
        changed = bool(gone)
        for name, signature in now.items():
            file = self._files.setdefault(name, _File())
            if signature == file.signature:
                file.candidate = None
            elif settled or signature == file.candidate:
                file.candidate = None
                changed |= self._read(name, file, signature)
            else:
                file.candidate = signature
        self._files = dict(sorted(self._files.items()))
        for status in self._status.values():
            status.contact()
            status.connected = True
        if changed or not self._generation:
            self._generation += 1
        return changed

    def _signatures(self) -> dict[str, Signature]:
        found: dict[str, Signature] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.endswith(SUFFIXES):
                    continue
                try:
                    # Through links: a mounted ConfigMap is made of them. A dangling one is no file.
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    # There, and not to be read: not a deletion.
                    found[entry.name] = (-1, error.errno or 0, 0)
                    continue
                if S_ISDIR(stat.st_mode):
                    continue
                found[entry.name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return found

    def _read(self, name: str, file: _File, signature: Signature) -> bool:
        try:
            objects = parse_file(self._directory / name)
        except ManifestError as error:
            self.broken_readings += 1
            file.signature, file.error = signature, str(error)
            if self._generation:
                _log.error("%s; its last good state stays in use", error)
            return False
        if file.error:
            _log.info("%s: good again", self._directory / name)
        file.signature, file.error, file.objects = signature, None, objects
        return True

    def _complain(self, error: str) -> None:
        if error != self._directory_error:
            _log.error("%s", error)
        self._directory_error = error

    async def _deliver(self) -> None:
        assert self._outlet is not None
        self.reloads += 1
        by_resource = self._merge()
        for plural, store in self._stores.items():
            status = self._status[plural]
            events: list[ObjectEvent] = store.replace(by_resource[plural], self._generation) or []
            status.lists += 1
            status.version, status.objects, status.synced = store.version, len(store), True
            for start in range(0, len(events), 500):
                self._outlet.deliver(events[start : start + 500])
                await asyncio.sleep(0)
            status.delivered += len(events)

    def _merge(self) -> dict[str, list[Seen]]:
        chosen: dict[ObjectKey, FileObject] = {}
        places: dict[ObjectKey, list[str]] = {}
        for name, file in self._files.items():
            for item in file.objects:
                chosen.setdefault(item.key, item)
                places.setdefault(item.key, []).append(f"{name}:{item.line}")
        duplicates = {key: tuple(names) for key, names in places.items() if len(names) > 1}
        for key in duplicates.keys() - self._duplicates.keys():
            _log.warning("%s is defined twice: %s", "/".join(key), ", ".join(duplicates[key]))
        self._duplicates = duplicates
        merged: dict[str, list[Seen]] = {plural: [] for plural in self._stores}
        for (plural, namespace, name), item in chosen.items():
            merged[plural].append(Seen((namespace, name), "", self._generation, item.object))
        return merged
