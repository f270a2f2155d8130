"""The nftables mode of the agent."""

import time
from collections.abc import Callable, Mapping

from rulecast.model import ClusterInfo, Family, Revision, ServiceKey
from rulecast.view import Receipt, ServiceView, Update
from rulecast_agent.dataplane.base import DataplaneError, Drift, HostConfig
from rulecast_agent.dataplane.changes import of_family, with_owed
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.dataplane.nftables.findings import DESCRIBED, Findings
from rulecast_agent.dataplane.nftables.render import sample_script
from rulecast_agent.dataplane.nftables.table import FamilyTable
from rulecast_agent.kernel.nft import Execer, NftCommand, NftMissing, NftRefused
from rulecast_agent.kernel.nft_netlink import NetlinkError, NftSocket, Refused

_FULL_CHECK_PAUSE = 50
"""Pause after a full read-back, in lengths of it: soon for small tables, 2% of a core for big ones."""
_KERNEL_ERRORS = (NftMissing, NftRefused, NetlinkError, Refused)


class NftablesDataplane:
    """Programs services into the table `rulecast` of the families ip and ip6. See `docs/nftables.md`.

    It acts in the network namespace in which it was made, and touches and lists no other table.
    """

    def __init__(
        self,
        *,
        nft: Execer | None = None,
        full_check_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`full_check_seconds`: elements are read back within this time after others changed the ruleset.

        Earlier if that is cheap, see `_FULL_CHECK_PAUSE`.
        """
        self._nft: Execer = nft or NftCommand()
        self._full_check_seconds = full_check_seconds
        self._clock = clock
        self._socket: NftSocket | None = None
        self._tables: dict[Family, FamilyTable] = {}
        self._host: HostConfig | None = None
        self._revision = Revision(0)
        self._owed: dict[ServiceKey, ServiceView | None] = {}
        """Refused or failed changes, for `retry`."""
        self._started = False
        self._unknown = False
        """An error left us without knowledge of what the kernel has."""
        self._generation = -1
        self._foreign = False
        """Others committed something that was not looked at yet."""
        self._full_check_due = False
        self._last_full = -1e9
        self._full_check_pause = 0.0

    def probe(self) -> None:
        """See `Dataplane.probe`."""
        try:
            self._open().has_table(names.NFPROTO[Family.IPV4], names.TABLE)
            self._nft.run("", check=True)
        except _KERNEL_ERRORS as error:
            raise DataplaneError(f"nftables: {error}") from error

    def apply(self, update: Update, host: HostConfig) -> Receipt:
        """See `Dataplane.apply`."""
        self._revision = update.revision
        if not self._started:
            return self._start(update, host)
        held = (key for table in self._tables.values() for key in table.state.layouts)
        changes = with_owed(update, owed=self._owed, held=held)
        return self._transact(changes, host)

    def retry(self) -> Receipt | None:
        """See `Dataplane.retry`."""
        if self._host is None or not (self._owed or self._unknown):
            return None
        if not self._started:
            owed = Update(revision=self._revision, full=False, services={}, node=None, cluster=ClusterInfo())
            return self._start(owed, self._host)
        return self._transact(dict(self._owed), self._host)

    def check(self) -> Drift | None:
        """See `Dataplane.check`."""
        if not self._started:
            return None
        try:
            return self._check()
        except _KERNEL_ERRORS as error:
            self._unknown = True
            raise DataplaneError(f"nftables: {error}") from error

    def verify(self) -> Drift:
        """See `Dataplane.verify`."""
        if not self._started:
            return Drift()
        try:
            return self._converge()
        except _KERNEL_ERRORS as error:
            self._unknown = True
            raise DataplaneError(f"nftables: {error}") from error

    def cleanup(self) -> bool:
        """See `Dataplane.cleanup`."""
        found = False
        try:
            for family in Family:
                if self._open().has_table(names.NFPROTO[family], names.TABLE):
                    self._open().delete_table(names.NFPROTO[family], names.TABLE)
                    found = True
        except _KERNEL_ERRORS as error:
            raise DataplaneError(f"nftables: {error}") from error
        self._started = False
        self._tables = {}
        self._owed = {}
        return found

    def close(self) -> None:
        """Close the netlink socket; the rules stay."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _open(self) -> NftSocket:
        if self._socket is None:
            try:
                self._socket = NftSocket()
            except OSError as error:
                raise NetlinkError(error.errno or 0, "nf_tables netlink socket") from error
        return self._socket

    def _start(self, update: Update, host: HostConfig) -> Receipt:
        begin = time.perf_counter()
        wanted = dict(update.services) if update.full else {**self._owed, **update.services}
        views = {key: view for key, view in wanted.items() if view is not None}
        self._host = host
        errors: dict[ServiceKey, str] = {}
        operations = 0
        try:
            probe(self._nft, host)
            self._tables = {
                family: FamilyTable(
                    family=family, host=host, socket=self._open(), nft=self._nft, clock=self._clock
                )
                for family in host.families
            }
            for family, table in self._tables.items():
                findings = table.start(of_family(views, family))
                errors |= findings.errors
                operations += findings.operations
            self._generation = self._open().generation()
        except _KERNEL_ERRORS as error:
            self._owed = dict(wanted)
            raise DataplaneError(f"nftables: {error}") from error
        self._started = True
        self._unknown = False
        # Somebody may have committed between our own transactions of the load.
        self._foreign = True
        self._last_full = self._clock()
        self._full_check_pause = self._full_check_seconds
        self._owed = {key: views[key] for key in errors}
        return self._receipt(begin, errors, operations)

    def _transact(self, changes: Mapping[ServiceKey, ServiceView | None], host: HostConfig) -> Receipt:
        begin = time.perf_counter()
        errors: dict[ServiceKey, str] = {}
        operations = 0
        try:
            before = self._begin()
            if self._unknown:
                self._converge()
                changes = {**self._owed, **changes}
                before = self._begin()
            if host != self._host:
                operations += self._rehost(host)
            for family, table in self._tables.items():
                layouts = table.state.layouts
                mine = {}
                for key, view in of_family(changes, family).items():
                    held = layouts.get(key)
                    if (held.view if held else None) != view:
                        mine[key] = view
                if mine:
                    findings = table.change(mine)
                    errors |= findings.errors
                    changes = {**findings.dropped, **changes}
                    operations += findings.operations
            self._end(before)
        except _KERNEL_ERRORS as error:
            self._unknown = True
            self._owed = dict(changes)
            raise DataplaneError(f"nftables: {error}") from error
        self._owed = {key: changes[key] for key in errors}
        return self._receipt(begin, errors, operations)

    def _rehost(self, host: HostConfig) -> int:
        if self._host is None or set(host.families) != set(self._host.families):
            raise NftRefused("the families of a running agent cannot change")
        operations = 0
        for table in self._tables.values():
            operations += table.rehost(host).operations
        self._host = host
        return operations

    def _begin(self) -> int:
        """The generation from which our own commits are counted; a foreign one before it is remembered."""
        generation = self._open().generation()
        if generation != self._generation:
            self._foreign = True
        for table in self._tables.values():
            table.commits = 0
        return generation

    def _end(self, before: int) -> None:
        commits = sum(table.commits for table in self._tables.values())
        self._generation = (before + commits) & 0xFFFFFFFF

    def _check(self) -> Drift | None:
        generation = self._open().generation()
        foreign = self._foreign or generation != self._generation
        drift = None
        if self._unknown or (foreign and not all(table.intact() for table in self._tables.values())):
            drift = self._converge()
        else:
            self._full_check_due = self._full_check_due or foreign
            self._foreign = False
            self._generation = generation
            if self._full_check_due and self._clock() - self._last_full >= self._full_check_pause:
                drift = self._converge()
        before = self._begin()
        for table in self._tables.values():
            table.sweep()
        self._end(before)
        return drift if drift is not None and drift.count else None

    def _converge(self) -> Drift:
        begin = time.perf_counter()
        before = self._begin()
        found = Findings()
        for table in self._tables.values():
            findings = table.converge()
            found.count += findings.count
            found.lines += findings.lines
            for key, view in findings.dropped.items():
                self._owed.setdefault(key, view)
        self._end(before)
        self._unknown = False
        self._foreign = False
        self._full_check_due = False
        self._last_full = self._clock()
        self._full_check_pause = min(
            self._full_check_seconds, _FULL_CHECK_PAUSE * (time.perf_counter() - begin)
        )
        return Drift(differences=found.lines[:DESCRIBED], count=found.count)

    def _receipt(self, begin: float, errors: dict[ServiceKey, str], operations: int) -> Receipt:
        return Receipt(
            revision=self._revision, seconds=time.perf_counter() - begin, errors=errors, operations=operations
        )


def probe(nft: Execer, host: HostConfig) -> None:
    """Try every form of rule that may be used, without committing. Raises NftRefused at the first bad one."""
    for family in host.families:
        nft.run(sample_script(family, host), check=True)
