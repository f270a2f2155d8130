"""The iptables mode of the agent. See `docs/iptables.md`."""

import time
from collections.abc import Callable, Mapping

from rulecast.model import Family, Revision, ServiceKey
from rulecast.view import Receipt, ServiceView, Update
from rulecast_agent.dataplane.base import DataplaneError, Drift, HostConfig
from rulecast_agent.dataplane.changes import of_family, with_owed
from rulecast_agent.dataplane.iptables import names
from rulecast_agent.dataplane.iptables.family import Findings, IptablesFamily, Options
from rulecast_agent.dataplane.iptables.watch import Watch
from rulecast_agent.kernel.iptables import (
    Backend,
    Iptables,
    IptablesMissing,
    IptablesRefused,
    available,
    detect,
)

_DESCRIBED = 10
"""Differences that a read-back names."""
_ERRORS = (IptablesMissing, IptablesRefused)


class IptablesDataplane:
    """Programs services into chains `RULECAST-…` of the nat and filter tables of one backend.

    It acts in the network namespace in which it was made.
    """

    def __init__(
        self,
        *,
        backend: Backend | None = None,
        options: Options | None = None,
        make: Callable[..., Iptables] = Iptables,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`backend` None: the one that this host uses already."""
        self._backend = backend
        self._options = options or Options()
        self._make = make
        self._families: dict[Family, IptablesFamily] = {}
        self._watch: Watch | None = None
        self._clock = clock
        self._host: HostConfig | None = None
        self._revision = Revision(0)
        self._owed: dict[ServiceKey, ServiceView | None] = {}
        """Refused or failed changes, for `retry`."""
        self._unknown = False
        """An error left us without knowledge of what the kernel has."""

    @property
    def backend(self) -> Backend:
        """The backend in use. Raises IptablesMissing."""
        if self._backend is None:
            self._backend = detect(ours=names.PREFIX)
        return self._backend

    def probe(self) -> None:
        """See `Dataplane.probe`."""
        try:
            if not available(self.backend):
                raise IptablesMissing(f"iptables-{self.backend} is not installed")
            for table in ("nat", "filter"):
                self._make(backend=self.backend, family=Family.IPV4).save(table)
        except _ERRORS as error:
            raise DataplaneError(f"iptables: {error}") from error

    def apply(self, update: Update, host: HostConfig) -> Receipt:
        """See `Dataplane.apply`."""
        self._revision = update.revision
        held = (key for family in self._families.values() for key in family.views)
        changes = with_owed(update, owed=self._owed, held=held)
        return self._write(changes, host)

    def retry(self) -> Receipt | None:
        """See `Dataplane.retry`."""
        if self._host is None or not (self._owed or self._unknown):
            return None
        return self._write(dict(self._owed), self._host)

    def check(self) -> Drift | None:
        """See `Dataplane.check`."""
        watch = self._watch
        if watch is None or not self._families:
            return None
        try:
            for family in self._families.values():
                if not family.follows_sysctl() and self._host is not None:
                    watch.begin()
                    family.rehost(self._host)
                    watch.wrote()
            due = self._unknown or watch.due(lambda: all(map(IptablesFamily.hooked, self._families.values())))
            drift = self._converge() if due else None
        except _ERRORS as error:
            self._unknown = True
            raise DataplaneError(f"iptables: {error}") from error
        return drift if drift is not None and drift.count else None

    def verify(self) -> Drift:
        """See `Dataplane.verify`."""
        try:
            return self._converge()
        except _ERRORS as error:
            self._unknown = True
            raise DataplaneError(f"iptables: {error}") from error

    def cleanup(self) -> bool:
        """See `Dataplane.cleanup`. Both backends are cleaned: the host may have changed over."""
        found = [backend for backend in Backend if self.cleanup_backend(backend)]
        self._families = {}
        self._owed = {}
        return bool(found)

    def leftovers(self) -> bool:
        """Remove what is in the backend that is not used; True when there was something."""
        found = [other for other in Backend if other is not self.backend and self.cleanup_backend(other)]
        return bool(found)

    def cleanup_backend(self, backend: Backend) -> bool:
        """Remove what is ours from one backend. Raises DataplaneError."""
        found = False
        if not available(backend):
            return found
        for family in Family:
            iptables = self._make(backend=backend, family=family)
            try:
                found |= IptablesFamily.cleanup(iptables)
            except IptablesMissing as error:
                # A kernel without IPv6, say, holds nothing of ours there.
                if family is Family.IPV4:
                    raise DataplaneError(f"iptables: {error}") from error
            except IptablesRefused as error:
                raise DataplaneError(f"iptables: {error}") from error
        return found

    def close(self) -> None:
        """Close what watches the kernel; the rules stay."""
        if self._watch is not None:
            self._watch.close()

    def _write(self, changes: dict[ServiceKey, ServiceView | None], host: HostConfig) -> Receipt:
        begin = time.perf_counter()
        found = Findings({}, 0, [])
        try:
            if not self._families:
                self._start(changes, host, found)
            else:
                if self._unknown:
                    self._converge()
                self._watching().begin()
                self._change(changes, host, found)
                self._watching().wrote()
        except _ERRORS as error:
            self._unknown = True
            self._host = host
            self._owed = changes
            raise DataplaneError(f"iptables: {error}") from error
        self._unknown = False
        self._owed = {key: changes[key] for key in found.errors}
        return Receipt(
            revision=self._revision,
            seconds=time.perf_counter() - begin,
            errors=found.errors,
            operations=found.operations,
        )

    def _start(
        self, changes: Mapping[ServiceKey, ServiceView | None], host: HostConfig, found: Findings
    ) -> None:
        tools = {family: self._make(backend=self.backend, family=family) for family in host.families}
        families = {
            family: IptablesFamily(iptables=iptables, family=family, host=host, options=self._options)
            for family, iptables in tools.items()
        }
        watch = Watch(backend=self.backend, iptables=list(tools.values()), clock=self._clock)
        try:
            watch.begin()
            for family, tables in families.items():
                views = {key: view for key, view in of_family(changes, family).items() if view is not None}
                _add(found, tables.start(views))
            watch.wrote()
        except BaseException:
            watch.close()
            raise
        if self._watch is not None:
            self._watch.close()
        self._watch = watch
        self._families = families
        self._host = host
        self._options.started()

    def _change(
        self, changes: Mapping[ServiceKey, ServiceView | None], host: HostConfig, found: Findings
    ) -> None:
        if host != self._host:
            if self._host is None or set(host.families) != set(self._families):
                raise IptablesRefused("the families of a running agent cannot change")
            for tables in self._families.values():
                _add(found, tables.rehost(host))
            self._host = host
        for family, tables in self._families.items():
            mine = {
                key: view for key, view in of_family(changes, family).items() if tables.views.get(key) != view
            }
            if mine:
                _add(found, tables.change(mine))

    def _converge(self) -> Drift:
        begin = self._clock()
        lines: list[str] = []
        if self._families:
            self._watching().begin()
        for tables in self._families.values():
            lines += tables.converge().lines
        self._unknown = False
        if self._families:
            self._watching().compared(self._clock() - begin)
        return Drift(differences=lines[:_DESCRIBED], count=len(lines))

    def _watching(self) -> Watch:
        assert self._watch is not None
        return self._watch


def _add(found: Findings, more: Findings) -> None:
    found.errors |= more.errors
    found.operations += more.operations
    found.lines += more.lines
