"""The last good state on disk, for a node that starts while no server answers.

A file of a fixed head and a zstd-compressed body. It is replaced as a whole, by rename, so that a crash
leaves the old one or the new one; its checksum tells what a full disk or a bad one made of it. A file that is
not wholly right, or is another node's, is reported and not used.
"""

import asyncio
import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import xxhash
import zstandard

from rulecast.model import ClusterInfo, EndpointSet, Kind, NodeInfo, ResourceId, Scope, ServicePort, Value
from rulecast.wire.messages import WireError
from rulecast.wire.validate import check_key, check_value
from rulecast_agent.feed.durable import replace_file

_log = logging.getLogger(__name__)

_MAGIC = b"RULECAST"
_FORMAT = 1
_HEAD = struct.Struct(">8sHQQ16s")
"""Magic, format, length of the body, length of it decompressed, XXH3 128 of the body."""
_MAX_SIZE = 1 << 30

Contents = list[tuple[Scope, list[tuple[ResourceId, Value]]]]


class CheckpointError(Exception):
    """A checkpoint cannot be used, or not be written. `str()` is one line that names the file."""


class _ScopeRecord(msgspec.Struct, array_like=True):
    scope: str
    services: list[ServicePort]
    sets: list[tuple[int, str, EndpointSet]]
    node: NodeInfo | None
    cluster: ClusterInfo | None


class _Record(msgspec.Struct):
    node_name: str
    saved_at: float
    scopes: list[_ScopeRecord]
    reached: dict[str, int] = {}


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One node's committed content."""

    node_name: str
    saved_at: float
    """Unix seconds."""
    contents: Contents
    reached: Mapping[str, int] = {}
    """resourceVersions of the newest objects in it, by collection."""


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The file's bytes."""
    record = _Record(
        node_name=checkpoint.node_name,
        saved_at=checkpoint.saved_at,
        scopes=[_scope_record(scope, resources) for scope, resources in checkpoint.contents],
        reached=dict(checkpoint.reached),
    )
    plain = msgspec.msgpack.encode(record)
    body = zstandard.ZstdCompressor(level=1).compress(plain)
    return _HEAD.pack(_MAGIC, _FORMAT, len(body), len(plain), xxhash.xxh3_128_digest(body)) + body


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Read a file's bytes.

    Raises CheckpointError, without a file's name.
    """
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise CheckpointError("not a checkpoint")
    _, version, length, plain_length, checksum = _HEAD.unpack_from(data)
    if version != _FORMAT:
        raise CheckpointError(f"of format {version}; this version reads {_FORMAT}")
    body = data[_HEAD.size :]
    if len(body) != length or plain_length > _MAX_SIZE:
        raise CheckpointError(f"{len(body)} bytes instead of {length}")
    if xxhash.xxh3_128_digest(body) != checksum:
        raise CheckpointError("wrong checksum")
    try:
        plain = zstandard.ZstdDecompressor().decompress(body, max_output_size=plain_length)
        if len(plain) != plain_length:
            raise CheckpointError(f"{len(plain)} bytes decompressed instead of {plain_length}")
        record = msgspec.msgpack.decode(plain, type=_Record)
        contents = [(Scope(each.scope), _resources(each)) for each in record.scopes]
        for _, resources in contents:
            for resource, value in resources:
                if resource.key:
                    check_key(resource.key)
                check_value(value)
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, WireError) as error:
        raise CheckpointError(f"unreadable: {error}") from None
    return Checkpoint(
        node_name=record.node_name, saved_at=record.saved_at, contents=contents, reached=record.reached
    )


def _scope_record(scope: Scope, resources: list[tuple[ResourceId, Value]]) -> _ScopeRecord:
    record = _ScopeRecord(scope, [], [], None, None)
    for (kind, key), value in resources:
        if isinstance(value, ServicePort):
            record.services.append(value)
        elif isinstance(value, EndpointSet):
            record.sets.append((int(kind), key, value))
        elif isinstance(value, NodeInfo):
            record.node = value
        else:
            record.cluster = value
    return record


def _resources(record: _ScopeRecord) -> list[tuple[ResourceId, Value]]:
    resources: list[tuple[ResourceId, Value]] = []
    if record.cluster is not None:
        resources.append((ResourceId(Kind.CLUSTER, ""), record.cluster))
    if record.node is not None:
        resources.append((ResourceId(Kind.NODE, ""), record.node))
    resources += [(ResourceId(Kind.SERVICE, service.key), service) for service in record.services]
    resources += [(ResourceId(Kind(kind), key), value) for kind, key, value in record.sets]
    return resources


class CheckpointFile:
    """The file of one node in a directory. Blocking."""

    def __init__(self, directory: Path, node_name: str) -> None:
        self.path = directory / "desired.checkpoint"
        self._node_name = node_name

    def load(self) -> Checkpoint | None:
        """The saved state; None when there is none.

        Raises CheckpointError for a file that cannot be used.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        try:
            checkpoint = decode_checkpoint(data)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if checkpoint.node_name != self._node_name:
            raise CheckpointError(
                f"{self.path}: of node {checkpoint.node_name!r}, not of {self._node_name!r}"
            )
        return checkpoint

    def save(self, contents: Contents, saved_at: float, *, reached: Mapping[str, int] | None = None) -> int:
        """Replace the file; returns its size. Durable when it returns.

        Raises CheckpointError; the old file is then still there.
        """
        data = encode_checkpoint(
            Checkpoint(node_name=self._node_name, saved_at=saved_at, contents=contents, reached=reached or {})
        )
        try:
            replace_file(self.path, data)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        return len(data)


class CheckpointWriter:
    """Saves in the background, not more often than each `interval` seconds, in a thread."""

    def __init__(
        self,
        file: CheckpointFile,
        contents: Callable[[], Contents],
        *,
        reached: Callable[[], Mapping[str, int]] = dict,
        holding: Callable[[], bool] = lambda: False,
        interval: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`holding`: the contents are not what the node has, and not to be saved."""
        self.error = ""
        """Why the last attempt failed; empty when it did not."""
        self.saved_at: float | None = None
        self.saves = 0
        self.failures = 0
        self._file = file
        self._contents, self._reached, self._holding = contents, reached, holding
        self._interval = interval
        self._clock = clock
        self._changed = asyncio.Event()
        self._lock = threading.Lock()
        self._taken = self._saved = 0
        """Numbers of the contents taken last and saved last. Not times: a clock may be set back."""

    def changed(self) -> None:
        """There is something newer than what was saved."""
        self._changed.set()

    async def run(self) -> None:
        """Save until cancelled; then once more, if need be."""
        try:
            while True:
                await self._changed.wait()
                if self._holding():
                    await asyncio.sleep(min(self._interval, 1.0))
                    continue
                self._changed.clear()
                saving = asyncio.ensure_future(asyncio.to_thread(self._save, *self._take()))
                try:
                    await asyncio.shield(saving)
                except asyncio.CancelledError:
                    # A thread does not end with its task, and must not replace what is saved last.
                    await asyncio.wait((saving,))
                    raise
                await asyncio.sleep(self._interval)
        finally:
            if self._changed.is_set() and not self._holding():
                self._save(*self._take())

    def _take(self) -> tuple[Contents, Mapping[str, int], float, int]:
        self._taken += 1
        return self._contents(), dict(self._reached()), self._clock(), self._taken

    def _save(self, contents: Contents, reached: Mapping[str, int], now: float, number: int) -> None:
        # The last save of a run may find one that was cancelled still at work in its thread.
        with self._lock:
            if number > self._saved:
                self._saved = number
                self._try(contents, reached, now)

    def _try(self, contents: Contents, reached: Mapping[str, int], now: float) -> None:
        try:
            self._file.save(contents, now, reached=reached)
        except CheckpointError as error:
            self.failures += 1
            if not self.error:
                _log.error("the state cannot be saved: %s", error)
            self.error = str(error)
        else:
            self.error = ""
            self.saves += 1
            self.saved_at = now
