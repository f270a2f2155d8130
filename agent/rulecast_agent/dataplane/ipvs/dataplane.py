"""The IPVS mode of the agent. See `docs/ipvs.md`."""

import errno
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

import msgspec

from rulecast.model import Family, Revision, ServiceKey
from rulecast.view import Receipt, ServiceView, Update
from rulecast_agent.dataplane.base import DataplaneError, Drift, HostConfig
from rulecast_agent.dataplane.changes import of_family, with_owed
from rulecast_agent.dataplane.ipvs.addresses import MARKED_TABLE, Routing, local_addresses
from rulecast_agent.dataplane.ipvs.family import Findings, IpvsFamily, Kernel, is_ours
from rulecast_agent.dataplane.ipvs.packets import PacketTable
from rulecast_agent.dataplane.ipvs.planner import Element
from rulecast_agent.dataplane.ipvs.servers import Servers
from rulecast_agent.kernel import sysctl
from rulecast_agent.kernel.ipvs import Ipvs, Scheduling, Timeouts, VirtualServer
from rulecast_agent.kernel.links import Dummy
from rulecast_agent.kernel.netlink_batch import NetlinkFailed
from rulecast_agent.kernel.nft import Execer, NftCommand, NftMissing, NftRefused
from rulecast_agent.kernel.nft_netlink import NetlinkError, NftSocket, Refused, Value
from rulecast_agent.kernel.routing_rules import RoutingRules

INTERFACE = "rulecast-ipvs0"
_DESCRIBED = 10
_ERRORS = (NetlinkFailed, NftMissing, NftRefused, NetlinkError, Refused)
_SWEEP_PAUSE = 5.0
"""Seconds between two looks at all connections that drain."""
_FULL_CHECK_PAUSE = 50
"""Pause after a full read-back, in lengths of it; IPVS does not tell of changes."""
_LONGEST_PAUSE = 30.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line adds."""

    scheduling: Scheduling = Scheduling("rr")
    timeouts: Timeouts = Timeouts()
    strict_arp: bool = False
    route_mark: int = 0x2000
    """The bit that packets of external addresses have on their way to IPVS."""
    exclude_cidrs: tuple[str, ...] = ()
    """Virtual servers of these addresses are nobody's business of ours."""
    local_addresses: Callable[[], frozenset[str]] = frozenset
    """Of the host's interfaces but ours."""


class IpvsDataplane:
    """Programs services as virtual servers, addresses of an interface, and a table `rulecast-ipvs` of nft.

    It acts in the network namespace in which it was made, and touches nobody else's virtual servers.
    """

    def __init__(
        self,
        *,
        options: Options | None = None,
        nft: Execer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options or Options()
        self._exclude = [ip_network(cidr) for cidr in self._options.exclude_cidrs]
        self._nft: Execer = nft or NftCommand()
        self._clock = clock
        self._ipvs: Ipvs | None = None
        self._dummy: Dummy | None = None
        self._rules: RoutingRules | None = None
        self._socket: NftSocket | None = None
        self._servers: Servers | None = None
        self._families: dict[Family, IpvsFamily] = {}
        self._host: HostConfig | None = None
        self._revision = Revision(0)
        self._owed: dict[ServiceKey, ServiceView | None] = {}
        self._unknown = False
        self._sweep_at = 0.0
        self._verify_at = 0.0

    def probe(self) -> None:
        """See `Dataplane.probe`."""
        try:
            # Refused without CAP_NET_ADMIN, though it only reads.
            self._open().services()
            self._nft.run("", check=True)
            if not Path("/sys/module/dummy").exists() and not _can_load("dummy"):
                raise DataplaneError("ipvs: the kernel has no module dummy")
            scheduler = self._options.scheduling.scheduler
            if not _can_load(f"ip_vs_{scheduler}"):
                raise DataplaneError(
                    f"ipvs: the kernel has no module ip_vs_{scheduler}, for --ipvs-scheduler"
                )
        except _ERRORS as error:
            raise DataplaneError(f"ipvs: {error}") from error

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
        """See `Dataplane.check`. What has drained is deleted."""
        if not self._families or self._servers is None:
            return None
        try:
            now = self._clock()
            if self._servers.draining:
                if now >= self._sweep_at:
                    self._servers.sweep()
                    self._sweep_at = now + _SWEEP_PAUSE
                else:
                    self._servers.sweep_leaving()
                for family in self._families.values():
                    family.finish()
            mended = [
                f"the routing rule, {name.name}" for name, each in self._families.items() if each.mend_rule()
            ]
            if self._dummy is not None and self._dummy.ensure():
                mended.append(f"the interface {INTERFACE}")
                self._unknown = True
            for family in self._families.values():
                if family.local_addresses_changed() and self._host is not None:
                    self._owed |= {key: family.views.get(key) for key in family.rehost(self._host).errors}
            if not self._unknown and now < self._verify_at:
                return Drift(differences=mended, count=len(mended)) if mended else None
            drift = self._verify(mended)
        except _ERRORS as error:
            self._unknown = True
            raise DataplaneError(f"ipvs: {error}") from error
        return drift if drift.count else None

    def verify(self) -> Drift:
        """See `Dataplane.verify`."""
        try:
            return self._verify()
        except _ERRORS as error:
            self._unknown = True
            raise DataplaneError(f"ipvs: {error}") from error

    def cleanup(self) -> bool:
        """See `Dataplane.cleanup`."""
        found = False
        try:
            try:
                self._open()
            except NetlinkFailed as error:
                if error.code != errno.ENOENT:
                    raise
            socket = self._nft_socket()
            dummy, routing_rules = Dummy(INTERFACE), RoutingRules()
            dummy.find()
            for family in Family:
                packets = PacketTable(family=family, socket=socket, nft=self._nft)
                held: Mapping[Element, Value] = packets.elements() if packets.there() else {}
                addresses = local_addresses(dummy, family)
                if self._ipvs is not None:
                    servers = Servers(self._ipvs)
                    ours = functools.partial(is_ours, family=family, held=held, addresses=addresses)
                    servers.read(ours)
                    found |= bool(servers.held)
                    servers.delete(list(servers.held))
                found |= routing_rules.delete(family, MARKED_TABLE)
                found |= packets.cleanup()
            found |= dummy.delete()
            dummy.close()
            routing_rules.close()
        except _ERRORS as error:
            raise DataplaneError(f"ipvs: {error}") from error
        self._families = {}
        self._owed = {}
        return found

    def close(self) -> None:
        """Close the sockets; what was programmed stays."""
        for each in (self._ipvs, self._dummy, self._rules, self._socket):
            if each is not None:
                each.close()
        self._ipvs = self._dummy = self._rules = self._socket = None

    def _open(self) -> Ipvs:
        if self._ipvs is None:
            _can_load("ip_vs")
            try:
                self._ipvs = Ipvs()
            except NetlinkFailed as error:
                if error.code == errno.ENOENT:
                    raise NetlinkFailed(errno.ENOENT, "the kernel has no IPVS (module ip_vs)") from None
                raise
        return self._ipvs

    def _nft_socket(self) -> NftSocket:
        if self._socket is None:
            self._socket = NftSocket()
        return self._socket

    def _write(self, changes: dict[ServiceKey, ServiceView | None], host: HostConfig) -> Receipt:
        begin = time.perf_counter()
        found = Findings({}, 0, [])
        try:
            if not self._families:
                self._start(changes, host, found)
            else:
                if self._unknown:
                    self._verify()
                self._change(changes, host, found)
        except _ERRORS as error:
            self._unknown = True
            self._host = host
            self._owed = changes
            raise DataplaneError(f"ipvs: {error}") from error
        self._unknown = False
        self._owed = {key: changes[key] for key in found.errors if key in changes}
        return Receipt(
            revision=self._revision,
            seconds=time.perf_counter() - begin,
            errors=found.errors,
            operations=found.operations,
        )

    def _start(
        self, changes: Mapping[ServiceKey, ServiceView | None], host: HostConfig, found: Findings
    ) -> None:
        ipvs = self._open()
        for line in sysctl.set_ipvs(strict_arp=self._options.strict_arp):
            raise NetlinkFailed(errno.EACCES, line)
        if any(self._options.timeouts):
            ipvs.commit([ipvs.set_timeouts(self._options.timeouts)])
        self._dummy, self._rules = self._dummy or Dummy(INTERFACE), self._rules or RoutingRules()
        self._dummy.ensure()
        routing = Routing(self._dummy, self._rules, self._options.route_mark)
        servers = Servers(ipvs)
        families = {}
        socket = self._nft_socket()
        for family in host.families:
            packets = PacketTable(
                family=family, socket=socket, nft=self._nft, route_mark=self._options.route_mark
            )
            families[family] = IpvsFamily(
                family=family,
                host=host,
                how=self._options.scheduling,
                kernel=Kernel(servers, routing),
                packets=packets,
                local_addresses=self._options.local_addresses,
            )
        held = {family: each.elements() for family, each in families.items()}
        planned = {}
        for family, each in families.items():
            views = {key: view for key, view in of_family(changes, family).items() if view is not None}
            planned[family] = each.plan(views, held[family])
        servers.read(
            lambda server: (
                server.family in held
                and not self._excluded(server)
                and families[server.family].owns(server, held[server.family])
            )
        )
        for family, each in families.items():
            _add(found, each.start(planned[family], held[family]))
        self._servers = servers
        self._families = families
        self._host = host
        self._verify_at = self._clock() + _LONGEST_PAUSE

    def _change(
        self, changes: Mapping[ServiceKey, ServiceView | None], host: HostConfig, found: Findings
    ) -> None:
        if host != self._host:
            if set(host.families) != set(self._families):
                raise NftRefused("the families of a running agent cannot change")
            for tables in self._families.values():
                _add(found, tables.rehost(host))
            self._host = host
        for family, tables in self._families.items():
            mine = {
                key: view for key, view in of_family(changes, family).items() if tables.views.get(key) != view
            }
            if mine:
                _add(found, tables.change(mine))

    def _excluded(self, server: VirtualServer) -> bool:
        """Not to be taken for ours, wherever it is."""
        if server.mark or not self._exclude:
            return False
        address = ip_address(server.address)
        return any(address in network for network in self._exclude)

    def _verify(self, mended: Sequence[str] = ()) -> Drift:
        begin = self._clock()
        lines = list(mended)
        if self._servers is not None:
            known = set(self._servers.held)
            held = {family: tables.elements() for family, tables in self._families.items()}
            self._servers.read(
                lambda server: (
                    server in known
                    or (
                        server.family in self._families
                        and not self._excluded(server)
                        and self._families[server.family].owns(server, held[server.family])
                    )
                )
            )
            for family in self._families.values():
                lines += family.verify().lines
        self._unknown = False
        took = self._clock() - begin
        self._verify_at = self._clock() + min(_LONGEST_PAUSE, max(1.0, _FULL_CHECK_PAUSE * took))
        return Drift(differences=lines[:_DESCRIBED], count=len(lines))


def _can_load(module: str) -> bool:
    """Whether a module is in the kernel; one that is not loaded is asked for."""
    if Path(f"/sys/module/{module}").exists() or not Path("/proc/modules").exists():
        # A kernel without modules does not tell what it has: what it lacks is told when it is used.
        return True
    return sysctl.load_module(module)


def _add(found: Findings, more: Findings) -> None:
    found.errors |= more.errors
    found.operations += more.operations
    found.lines += more.lines
