"""One family of the IPVS mode: what is meant, and writing it in an order in which nothing is half there."""

import ipaddress
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.ipvs import rules
from rulecast_agent.dataplane.ipvs.packets import PacketTable, differences
from rulecast_agent.dataplane.ipvs.planner import ABSENT, MARK_SHIFT, Absent, Change, Element, Planner, Served
from rulecast_agent.dataplane.ipvs.servers import Servers
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.kernel.ipvs import PROTOCOLS, Scheduling, VirtualServer
from rulecast_agent.kernel.links import Dummy
from rulecast_agent.kernel.nft_netlink import Value

Writes = Mapping[Element, tuple[Value | Absent, Value | Absent]]


class Findings(msgspec.Struct):
    """What a write or a read-back came to."""

    errors: dict[ServiceKey, str] = {}
    operations: int = 0
    lines: list[str] = []


class Kernel(NamedTuple):
    """What is shared by both families."""

    servers: Servers
    dummy: Dummy
    link: int
    """Index of our interface."""


class IpvsFamily:
    """Programs the services of one family."""

    def __init__(
        self,
        *,
        family: Family,
        host: HostConfig,
        how: Scheduling,
        kernel: Kernel,
        packets: PacketTable,
        local_addresses: Callable[[], frozenset[str]],
    ) -> None:
        """`local_addresses`: those of the host's other interfaces, of both families."""
        self._family, self._host, self._how = family, host, how
        self._servers, self._dummy, self._link = kernel
        self._packets = packets
        self._local_addresses = local_addresses
        self._local: frozenset[str] = frozenset()
        self._addresses: set[str] = set()
        """On our interface."""
        self._leaving: set[str] = set()
        """Addresses on it that no service has any more."""
        self._protocols: dict[VirtualServer, str] = {}
        """Of the servers of marks."""
        self._planner = Planner(family=family, host=host, how=how)

    @property
    def views(self) -> Mapping[ServiceKey, ServiceView]:
        """What is meant."""
        return self._planner.views

    def start(self, views: Mapping[ServiceKey, ServiceView]) -> Findings:
        """Bring the kernel from whatever it holds to `views`."""
        self._refresh_local()
        held = self._packets.elements() if self._packets.there() else {}
        planner = Planner(
            family=self._family, host=self._host, how=self._how, marks=_marks_of(views, held, self._family)
        )
        planner.use_host(self._host, node_port_addresses=self._node_port_addresses())
        self._planner = planner
        change = planner.change(views)
        self._packets.program(self._host, planner.firewalls())
        return self._converge(held, change)

    def change(self, changes: Mapping[ServiceKey, ServiceView | None]) -> Findings:
        """Write what differs; what IPVS refuses keeps what it had."""
        before = {key: self._planner.views.get(key) for key in changes}
        change = self._planner.change(changes)
        findings = self._write(change)
        if findings.errors:
            self._write(self._planner.change({key: before.get(key) for key in findings.errors}))
        return findings

    def rehost(self, host: HostConfig) -> Findings:
        """Follow another host configuration."""
        self._host = host
        self._refresh_local()
        self._packets.program(host, self._planner.firewalls())
        self._planner.use_host(host, node_port_addresses=self._node_port_addresses())
        return self.change(dict(self._planner.views))

    def elements(self) -> Mapping[Element, Value]:
        """What the table holds now."""
        return self._packets.elements() if self._packets.there() else {}

    def local_addresses_changed(self) -> bool:
        """The host has other addresses than the rules were made for."""
        return self._mine(self._local_addresses()) != self._local

    def verify(self) -> Findings:
        """Read back, and write what is not as meant."""
        changed = self._packets.program(self._host, self._planner.firewalls())
        held = self._packets.elements()
        findings = self._converge(held, Change({}, {}, {}, {}))
        if changed:
            findings.lines.insert(0, f"the rules of table {rules.TABLE}")
        return findings

    def owns(self, server: VirtualServer, held: Mapping[Element, Value]) -> bool:
        """Ours are those of marks that our table knows, and of places that it or our interface has."""
        if server.family is not self._family:
            return False
        if server.mark:
            return (
                rules.MARK_VALUES,
                rules.pack_mark(server.mark),
            ) in held or server in self._planner.servers
        packed = names.pack_frontend(server.address, rules.PROTOCOL_OF[server.protocol], server.port)
        return (
            server.address in self._addresses
            or (rules.SERVICES, packed) in held
            or (rules.NO_ENDPOINTS, packed) in held
            or server in self._planner.servers
        )

    def retire_addresses(self) -> None:
        """Take addresses off the interface to which no server is left."""
        if not self._leaving:
            return
        used = {server.address for server in self._servers.held}
        gone = {address for address in self._leaving if address not in used}
        if gone:
            self._leaving -= gone
            self._set_addresses(add=set(), remove=gone)

    def _converge(self, held: Mapping[Element, Value], change: Change) -> Findings:
        self._addresses = self._dummy.addresses(self._link, self._family)
        meant = dict(self._planner.elements)
        virtual = {(rules.VIRTUAL_IPS, names.pack_address(address)) for address in self._addresses}
        writes = differences(held, {**meant, **dict.fromkeys(virtual, None)})
        owned = {server for server in self._servers.held if self.owns(server, held)}
        wanted: dict[VirtualServer, tuple[Served | None, Served | None]] = {
            server: (None, served) for server, served in self._planner.servers.items()
        }
        lines = [
            f"virtual server {server}" for server in owned - self._planner.servers.keys() - self._draining()
        ]
        for server, served in self._planner.servers.items():
            has = self._servers.held.get(server)
            live = has[1] - self._servers.draining.get(server, set()) if has else None
            if has is None or has[0] != served.how or live != set(served.endpoints):
                lines.append(f"virtual server {server}")
        lines += [f"{name} {key.hex()}" for name, key in writes]
        for server in owned - self._planner.servers.keys():
            wanted[server] = (None, None)
        addresses = self._planner.addresses - self._local
        missing, stale = addresses - self._addresses, self._addresses - addresses - self._leaving
        lines += [f"address {address}" for address in (*missing, *stale)]
        every = Change(
            wanted,
            {**self._planner.owners(), **change.owners},
            dict(writes),
            {**dict.fromkeys(missing, True), **dict.fromkeys(stale, False)},
        )
        if not lines:
            return Findings({}, 0, [])
        findings = self._write(every)
        findings.lines = lines
        return findings

    def _draining(self) -> set[VirtualServer]:
        return {
            server
            for server, endpoints in self._servers.draining.items()
            if server in self._servers.held and endpoints >= self._servers.held[server][1]
        }

    def _write(self, change: Change) -> Findings:
        findings = Findings({}, 0, [])
        self._packets.add_firewalls(self._planner.firewalls())
        served = {server: after for server, (_, after) in change.servers.items() if after is not None}
        for server, words in self._servers.serve(served).items():
            owner = change.owners.get(server)
            if owner is not None:
                findings.errors[owner] = f"IPVS: {words}"
        for server in served:
            if server.mark and server in change.owners:
                self._protocols[server] = change.owners[server].rpartition("/")[0].rpartition("/")[2]
        findings.operations += len(change.servers) + self._packets.write(change.elements)
        new = {address for address, there in change.addresses.items() if there} - self._local
        self._leaving -= new
        self._set_addresses(add=new - self._addresses, remove=set())
        self._servers.retire(
            {server: after for server, (_, after) in change.servers.items()}, is_udp=self._is_udp
        )
        self._leaving |= {
            address for address, there in change.addresses.items() if not there
        } & self._addresses
        self.retire_addresses()
        findings.operations += len(change.addresses)
        return findings

    def _set_addresses(self, *, add: set[str], remove: set[str]) -> None:
        """The set of addresses that only Services have goes with those on the interface."""
        pairs = [(address, ABSENT, None) for address in add]
        self._packets.write({(rules.VIRTUAL_IPS, names.pack_address(a)): (old, new) for a, old, new in pairs})
        failed = self._dummy.change(self._link, self._family, add=sorted(add), remove=sorted(remove))
        self._packets.write({(rules.VIRTUAL_IPS, names.pack_address(a)): (None, ABSENT) for a in remove})
        self._addresses |= add - failed.keys()
        self._addresses -= remove

    def _is_udp(self, server: VirtualServer) -> bool:
        if server.mark:
            return self._protocols.get(server) == "UDP"
        return server.protocol == PROTOCOLS["UDP"]

    def _refresh_local(self) -> None:
        self._local = self._mine(self._local_addresses())

    def _mine(self, addresses: frozenset[str]) -> frozenset[str]:
        return frozenset(a for a in addresses if (":" in a) is (self._family is Family.IPV6))

    def _node_port_addresses(self) -> list[str]:
        return sorted(a for a in self._local if not ipaddress.ip_address(a).is_loopback)


def _marks_of(
    views: Mapping[ServiceKey, ServiceView], held: Mapping[Element, Value], family: Family
) -> dict[ServiceKey, int]:
    """The marks that services had in the table that is there."""
    found: dict[ServiceKey, int] = {}
    taken: set[int] = set()
    for key, view in views.items():
        service = view.service
        if not service.external_local:
            continue
        for address in (*service.load_balancer_ips, *service.external_ips):
            packed = names.pack_frontend(address, service.name.protocol, service.port)
            value = held.get((rules.MARKS, packed))
            if isinstance(value, bytes):
                mark = int.from_bytes(value, rules.BYTE_ORDER) >> MARK_SHIFT
                if mark not in taken and mark % 2 == (family is Family.IPV6):
                    found[key] = mark
                    taken.add(mark)
                    break
    return found
