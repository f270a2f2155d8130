"""One family of the IPVS mode: what is meant, and writing it in an order in which nothing is half there."""

import ipaddress
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.ipvs import rules
from rulecast_agent.dataplane.ipvs.addresses import Addresses, Routing
from rulecast_agent.dataplane.ipvs.packets import PacketTable, Writes, differences
from rulecast_agent.dataplane.ipvs.planner import (
    ABSENT,
    MARK_SHIFT,
    Change,
    Element,
    LocalAddress,
    Planner,
    Served,
)
from rulecast_agent.dataplane.ipvs.servers import Servers
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.kernel.ipvs import PROTOCOLS, Scheduling, VirtualServer
from rulecast_agent.kernel.nft_netlink import Value


class Findings(msgspec.Struct):
    """What a write or a read-back came to."""

    errors: dict[ServiceKey, str] = {}
    operations: int = 0
    lines: list[str] = []


class Kernel(NamedTuple):
    """What is shared by both families."""

    servers: Servers
    routing: Routing


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
        self._servers = kernel.servers
        self._addresses = Addresses(family=family, routing=kernel.routing)
        self._packets = packets
        self._local_addresses = local_addresses
        self._local: frozenset[str] = frozenset()
        self._moved = False
        """The host's addresses have changed, and ours were not compared with them since."""
        self._leaving: set[VirtualServer] = set()
        """Which no service has any more, and to which something may be open."""
        self._protocols: dict[VirtualServer, str] = {}
        """Of the servers of marks."""
        self._planner = Planner(family=family, host=host, how=how)

    @property
    def views(self) -> Mapping[ServiceKey, ServiceView]:
        """What is meant."""
        return self._planner.views

    def plan(self, views: Mapping[ServiceKey, ServiceView], held: Mapping[Element, Value]) -> Change:
        """Mean `views` from now on, and look what is there; `held` by the table."""
        self._refresh_local()
        self._addresses.read()
        planner = Planner(
            family=self._family, host=self._host, how=self._how, marks=_marks_of(views, held, self._family)
        )
        planner.use_host(self._host, node_port_addresses=self._node_port_addresses())
        self._planner = planner
        return planner.change(views)

    def start(self, planned: Change, held: Mapping[Element, Value]) -> Findings:
        """Bring the kernel from whatever it holds to what was planned."""
        self._packets.program(self._host, self._planner.firewalls())
        self._addresses.ensure_rule()
        findings = self._converge(held)
        findings.errors |= planned.errors
        return findings

    def change(self, changes: Mapping[ServiceKey, ServiceView | None]) -> Findings:
        """Write what differs; what IPVS refuses keeps what it had."""
        before = {key: self._planner.views.get(key) for key in changes}
        change = self._planner.change(changes)
        findings = self._write(change)
        if findings.errors:
            self._write(self._planner.change({key: before.get(key) for key in findings.errors}))
        return findings

    def rehost(self, host: HostConfig) -> Findings:
        """Follow another host configuration, or other addresses of the host."""
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

    def mend_rule(self) -> bool:
        """Bring back the routing rule that someone deleted (systemd-networkd does); whether it was gone."""
        return self._addresses.ensure_rule()

    def verify(self) -> Findings:
        """Read back, and write what is not as meant."""
        changed = self._packets.program(self._host, self._planner.firewalls())
        self._addresses.read()
        findings = self._converge(self._packets.elements())
        self._packets.delete_unused()
        if changed:
            findings.lines.insert(0, f"the rules of table {rules.TABLE}")
        return findings

    def owns(self, server: VirtualServer, held: Mapping[Element, Value]) -> bool:
        """Ours are those that are meant, and what our table or our interface knows."""
        if server in self._planner.servers:
            return True
        return is_ours(server, family=self._family, held=held, addresses=self._addresses.held)

    def finish(self) -> None:
        """Take away what was kept only for open connections that are over."""
        if not self._leaving:
            return
        held = self._servers.held
        marks_left = any(server.mark and server in held for server in self._leaving)
        # What was open by a mark went to the frontends of its service.
        gone = {one for one in self._leaving if one not in held and (one.mark or not marks_left)}
        self._leaving -= gone
        writes: Writes = {_known(one): (None, ABSENT) for one in gone}
        writes |= self._addresses.retire({server.address for server in self._leaving})
        self._packets.write(writes)

    def _converge(self, held: Mapping[Element, Value]) -> Findings:
        planner, servers = self._planner, self._servers
        addresses = self._addresses.differences(self._own_addresses())
        self._addresses.begin(addresses)
        owned = {server for server in servers.held if self.owns(server, held)}
        left = owned - planner.servers.keys()
        stale = left - self._leaving
        self._leaving = left | {one for one in self._leaving if one not in planner.servers}
        meant = {**planner.elements, **self._addresses.elements(self._own_addresses())}
        meant |= {_known(server): None for server in self._leaving}
        writes = differences(held, meant)
        wrong = [server for server, served in planner.servers.items() if not servers.right(server, served)]
        lines = [f"virtual server {server}" for server in (*stale, *wrong)]
        lines += [f"{name} {key.hex()}" for name, key in writes]
        lines += [f"address {one.address}" for one in addresses]
        findings = Findings({}, 0, lines)
        if lines:
            changes = {server: planner.servers[server] for server in wrong}
            self._program({**changes, **dict.fromkeys(left)}, planner.owners(), writes, addresses, findings)
        return findings

    def _write(self, change: Change) -> Findings:
        own = self._own_addresses
        addresses = {one: there and one.address not in self._local for one, there in change.addresses.items()}
        if self._moved:
            addresses |= self._addresses.differences(own())
            self._moved = False
        servers = {server: after for server, (_, after) in change.servers.items()}
        writes: Writes = {**change.elements, **self._addresses.begin(addresses)}
        for server, served in servers.items():
            if served is None and server in self._servers.held:
                self._leaving.add(server)
                if server.mark:
                    writes.pop(_known(server), None)
                else:
                    writes[_known(server)] = (ABSENT, None)
            elif served is not None and server in self._leaving:
                self._leaving.discard(server)
                if not server.mark:
                    writes[_known(server)] = (None, ABSENT)
        findings = Findings(dict(change.errors), 0, [])
        self._program(servers, change.owners, writes, addresses, findings)
        return findings

    def _program(
        self,
        servers: Mapping[VirtualServer, Served | None],
        owners: Mapping[VirtualServer, ServiceKey],
        writes: Writes,
        addresses: Mapping[LocalAddress, bool],
        findings: Findings,
    ) -> None:
        self._packets.add_firewalls(self._planner.firewalls())
        served = {server: after for server, after in servers.items() if after is not None}
        for server, words in self._servers.serve(served).items():
            if server in owners:
                findings.errors[owners[server]] = f"IPVS: {words}"
        for server in served:
            if server.mark and server in owners:
                self._protocols[server] = owners[server].rpartition("/")[0].rpartition("/")[2]
        findings.operations += len(servers) + self._packets.write(writes) + len(addresses)
        self._addresses.add(addresses)
        self._servers.retire(servers, is_udp=self._is_udp)
        self.finish()

    def _is_udp(self, server: VirtualServer) -> bool:
        if server.mark:
            return self._protocols.get(server) == "UDP"
        return server.protocol == PROTOCOLS["UDP"]

    def _own_addresses(self) -> set[LocalAddress]:
        return {one for one in self._planner.addresses if one.address not in self._local}

    def _refresh_local(self) -> None:
        local = self._mine(self._local_addresses())
        self._moved, self._local = local != self._local, local

    def _mine(self, addresses: frozenset[str]) -> frozenset[str]:
        return frozenset(a for a in addresses if (":" in a) is (self._family is Family.IPV6))

    def _node_port_addresses(self) -> list[str]:
        return sorted(a for a in self._local if not ipaddress.ip_address(a).is_loopback)


def is_ours(
    server: VirtualServer,
    *,
    family: Family,
    held: Mapping[Element, Value],
    addresses: Collection[LocalAddress],
) -> bool:
    """Our table, which holds `held`, knows it, or our interface, which holds `addresses`."""
    if server.family is not family:
        return False
    if _known(server) in held:
        return True
    if any(LocalAddress(server.address, marked) in addresses for marked in (False, True)):
        return True
    if server.mark:
        return False
    packed = _known(server)[1]
    return any((name, packed) in held for name in (rules.SERVICES, rules.NO_ENDPOINTS))


def _known(server: VirtualServer) -> Element:
    """By which the table knows a server that no service has any more."""
    if server.mark:
        return rules.MARK_VALUES, rules.pack_mark(server.mark)
    protocol = rules.PROTOCOL_OF[server.protocol]
    return rules.LEAVING_FRONTENDS, names.pack_frontend(server.address, protocol, server.port)


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
