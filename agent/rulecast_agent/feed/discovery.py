"""The servers' addresses as this node knows them: found, kept on disk, and used when nobody can be asked."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rulecast.flags import HostPort
from rulecast_agent.feed.durable import replace_file
from rulecast_agent.feed.slices import Lookup, LookupFailedError, is_ip

_log = logging.getLogger(__name__)

_MAX_BYTES = 256 << 10


class _Record(msgspec.Struct):
    service: str
    servers: list[tuple[str, int]]


class AddressFile:
    """The last good addresses in a directory. Blocking.

    Whoever answers at an address still has to prove that it is a server, by its certificate: what is here
    can be useless, never harmful.
    """

    def __init__(self, directory: Path, service: str) -> None:
        """`service`: NAMESPACE/NAME; a file of another one is not used."""
        self.path = directory / "servers.json"
        self._service = service

    def load(self) -> list[HostPort]:
        """The addresses; none when there is no file. Raises LookupFailedError for one that is no use."""
        try:
            with self.path.open("rb") as file:
                content = file.read(_MAX_BYTES)
            record = msgspec.json.decode(content, type=_Record)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LookupFailedError(f"{self.path}: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LookupFailedError(f"{self.path}: unreadable: {error}") from None
        if record.service != self._service:
            raise LookupFailedError(f"{self.path}: of Service {record.service!r}, not of {self._service!r}")
        if not record.servers or not all(is_ip(host) and 0 < port < 65536 for host, port in record.servers):
            raise LookupFailedError(f"{self.path}: not a list of addresses")
        return [HostPort(host, port) for host, port in record.servers]

    def save(self, servers: Sequence[HostPort]) -> None:
        """Replace the file. Raises OSError; the old one is then still there."""
        record = _Record(self._service, [(host, port) for host, port in servers])
        replace_file(self.path, msgspec.json.encode(record) + b"\n")


class Discovery:
    """Tells which servers there are, as often as it is asked to, but without asking others as often."""

    def __init__(
        self,
        lookup: Lookup,
        file: AddressFile | None = None,
        *,
        pause: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pause`: least seconds between two lookups."""
        self._lookup = lookup
        self._file = file
        self._pause = pause
        self._clock = clock
        self._known: list[HostPort] = []
        self._loaded = False
        self._asked: float | None = None
        self._unsaved = False
        self.problem = ""
        """Why the last lookup failed, or the addresses could not be kept; one line."""
        self.lookups = 0
        self.failures = 0

    async def servers(self) -> list[str]:
        """HOST:PORT of each server: of this moment, or else the last good ones, or none."""
        if self._asked is None or self._clock() - self._asked >= self._pause:
            await self._ask()
            self._asked = self._clock()
        return [str(server) for server in self._known]

    async def _ask(self) -> None:
        self.lookups += 1
        try:
            found = list(await self._lookup())
        except LookupFailedError as error:
            self.failures += 1
            await self._restore()
            self._trouble(f"no servers' addresses: {error}")
            return
        self._loaded = True
        if sorted(found) != sorted(self._known):
            _log.info("servers: %s", ", ".join(map(str, found)))
            self._unsaved = True
        self._known = found
        if self._file is not None and self._unsaved:
            try:
                await asyncio.to_thread(self._file.save, found)
            except OSError as error:
                self._trouble(f"{self._file.path}: {error.strerror}; the servers' addresses are not kept")
                return
            self._unsaved = False
        self.problem = ""

    async def _restore(self) -> None:
        """Take what is on disk, once, while nothing better is known."""
        if self._loaded or self._file is None:
            return
        self._loaded = True
        try:
            self._known = await asyncio.to_thread(self._file.load)
        except LookupFailedError as error:
            _log.error("the addresses kept on disk are not used: %s", error)
            return
        if self._known:
            _log.info("servers, from disk: %s", ", ".join(map(str, self._known)))

    def _trouble(self, problem: str) -> None:
        if problem != self.problem:
            _log.warning("%s%s", problem, "; using the last good ones" if self._known else "")
        self.problem = problem
