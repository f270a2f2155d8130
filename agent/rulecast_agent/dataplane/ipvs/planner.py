"""What IPVS, our interface and the nft table are meant to hold, and how a change differs. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping
from ipaddress import ip_address, ip_network
from typing import NamedTuple

import msgspec

from rulecast.model import Endpoint, Family, Protocol, ServiceKey, ServicePort
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.claims import Claims, Role
from rulecast_agent.dataplane.ipvs import rules
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.kernel.ipvs import FALLBACK, PROTOCOLS, Scheduling, VirtualServer
from rulecast_agent.kernel.nft_netlink import Value

MARK_SHIFT = 16
"""Marks of virtual servers are numbers in the upper half; the masquerade bit is in the lower one."""
_MARK_TAIL = 0x0C57
"""IPVS takes any packet with a server's mark: ours must not be equal to what others mark with."""
_LAST_MARK = 0xFFFF
_FIRST_MARK = {Family.IPV4: 2, Family.IPV6: 3}
"""/proc/net/ip_vs does not tell a mark's family: even numbers are IPv4's, odd ones IPv6's."""
Element = tuple[str, bytes]


class Absent(msgspec.Struct, frozen=True):
    """No element."""


ABSENT = Absent()


class LocalAddress(NamedTuple):
    """An address whose packets are to be delivered to this node."""

    address: str
    marked: bool
    """Only those of known frontends, which are marked: others may have the address too, such as a node."""


class Served(NamedTuple):
    """A virtual server as it is meant."""

    how: Scheduling
    endpoints: frozenset[Endpoint]


class Frontend(NamedTuple):
    """What a service port needs at one address and port, if it has it."""

    address: str
    port: int
    role: Role
    served: Served | None
    elements: tuple[tuple[Element, Value], ...]


class Compiled(msgspec.Struct, frozen=True, gc=False):
    """What a service port needs. Tuples: dicts would take 7 MB more for 10,000."""

    frontends: tuple[Frontend, ...] = ()
    marked: tuple[VirtualServer, Served] | None = None
    """For what comes from outside to external addresses with the policy Local."""
    addresses: tuple[LocalAddress, ...] = ()
    hairpin: tuple[Element, ...] = ()
    ranges: tuple[str, ...] = ()
    """Of sources, collapsed; empty where no chain has to look."""
    error: str = ""
    """What of the service cannot be served."""


class Change(msgspec.Struct):
    """The difference that services make: None means gone."""

    servers: dict[VirtualServer, tuple[Served | None, Served | None]] = {}
    """Before and after."""
    owners: dict[VirtualServer, ServiceKey] = {}
    """For whom a virtual server is, after or else before."""
    elements: dict[Element, tuple[Value | Absent, Value | Absent]] = {}
    addresses: dict[LocalAddress, bool] = {}
    """Whether it is to be there."""
    errors: dict[ServiceKey, str] = {}


_NOTHING = Compiled()
_BY_FRONTEND = (
    rules.SERVICES,
    rules.NO_ENDPOINTS,
    rules.FIREWALL_IPS,
    rules.MARKS,
    rules.EXTERNAL_FRONTENDS,
)


class Planner:
    """One family."""

    def __init__(
        self,
        *,
        family: Family,
        host: HostConfig,
        how: Scheduling,
        marks: Mapping[ServiceKey, int] | None = None,
    ) -> None:
        """`marks`: those that services had before, to be kept."""
        self.family, self._how = family, how
        self.use_host(host)
        self.views: dict[ServiceKey, ServiceView] = {}
        self.servers: dict[VirtualServer, Served] = {}
        self.elements: dict[Element, Value] = {}
        self._compiled: dict[ServiceKey, Compiled] = {}
        self._claims: Claims[tuple[str, str, int]] = Claims()
        self._addresses: Counter[LocalAddress] = Counter()
        self._shared: Counter[Element] = Counter()
        self._ranges: Counter[tuple[str, ...]] = Counter()
        self._firewalls: dict[str, tuple[str, ...]] = {}
        self.marks: dict[ServiceKey, int] = dict(marks or {})
        self._free_marks: list[int] = []
        self._next_mark = max((*self.marks.values(), _FIRST_MARK[family] - 2)) + 2

    def use_host(self, host: HostConfig, *, node_port_addresses: Collection[str] = ()) -> None:
        """Compile for these facts from now on; `node_port_addresses` where the host's config says all."""
        config = host.families[self.family]
        self._node_ips = [ip_address(node) for node in config.node_ips]
        chosen = config.nodeport_addresses
        self._node_port_addresses = tuple(node_port_addresses) if chosen is None else chosen

    @property
    def addresses(self) -> set[LocalAddress]:
        """What our interface is meant to hold."""
        return {address for address, count in self._addresses.items() if count > 0}

    def owners(self) -> dict[VirtualServer, ServiceKey]:
        """For whom each virtual server is."""
        found = {}
        for key, compiled in self._compiled.items():
            if compiled.marked is not None:
                found[compiled.marked[0]] = key
            protocol = _protocol(key)
            for frontend in compiled.frontends:
                place = (protocol, frontend.address, frontend.port)
                if frontend.served is not None and self._claims.owner(place) == key:
                    server = VirtualServer(self.family, PROTOCOLS[protocol], frontend.address, frontend.port)
                    found[server] = key
        return found

    def change(self, changes: Mapping[ServiceKey, ServiceView | None]) -> Change:
        """Mean something else from now on (None: gone), and tell how that differs."""
        change = Change({}, {}, {}, {}, {})
        touched: dict[tuple[str, str, int], None] = {}
        for key, view in changes.items():
            before = self._compiled.pop(key, _NOTHING)
            after = self._compile(key, view) if view is not None else _NOTHING
            if view is not None:
                self.views[key], self._compiled[key] = view, after
                if after.error:
                    change.errors[key] = after.error
            else:
                self.views.pop(key, None)
                self._release_mark(key)
            protocol = _protocol(key)
            old, new = (
                {(protocol, each.address, each.port): each.role for each in compiled.frontends}
                for compiled in (before, after)
            )
            for _loser in self._claims.change(key, before=old, after=new):
                pass
            touched |= dict.fromkeys((*old, *new))
            self._count(change, before, after)
            if before.marked != after.marked:
                self._marked(change, key, before.marked, after.marked)
        for place in touched:
            self._place(change, place)
        return change

    def _count(self, change: Change, before: Compiled, after: Compiled) -> None:
        if before.addresses != after.addresses:
            self._addresses.subtract(before.addresses)
            self._addresses.update(after.addresses)
            for address in (*before.addresses, *after.addresses):
                change.addresses[address] = self._addresses[address] > 0
        if before.hairpin != after.hairpin:
            self._shared.subtract(before.hairpin)
            self._shared.update(after.hairpin)
            for element in (*before.hairpin, *after.hairpin):
                self._element(change, element, None if self._shared[element] > 0 else ABSENT)

        if before.ranges != after.ranges:
            self._count_ranges(before.ranges, -1)
            self._count_ranges(after.ranges, 1)

    def _count_ranges(self, ranges: tuple[str, ...], by: int) -> None:
        if not ranges:
            return
        self._ranges[ranges] += by
        if self._ranges[ranges]:
            self._firewalls[names.firewall_chain(ranges)] = ranges
        else:
            del self._ranges[ranges], self._firewalls[names.firewall_chain(ranges)]

    def _marked(
        self,
        change: Change,
        key: ServiceKey,
        before: tuple[VirtualServer, Served] | None,
        after: tuple[VirtualServer, Served] | None,
    ) -> None:
        for served, there in ((before, False), (after, True)):
            if served is not None:
                server = served[0]
                self._server(change, key, server, served[1] if there else None)
                element = (rules.MARK_VALUES, rules.pack_mark(server.mark))
                self._element(change, element, None if there else ABSENT)

    def _place(self, change: Change, place: tuple[str, str, int]) -> None:
        protocol, address, port = place
        owner = self._claims.owner(place)
        frontends = self._compiled[owner].frontends if owner is not None else ()
        frontend = next((each for each in frontends if each[:2] == (address, port)), None)
        server = VirtualServer(self.family, PROTOCOLS[protocol], address, port)
        self._server(change, owner, server, frontend.served if frontend else None)
        wanted = dict(frontend.elements) if frontend else {}
        packed = names.pack_frontend(address, Protocol(protocol), port)
        for element, value in wanted.items():
            self._element(change, element, value)
        known = [(name, packed) for name in _BY_FRONTEND]
        known.append((rules.FIREWALL_SELF, names.pack_address(address) + packed))
        for element in known:
            if element not in wanted:
                self._element(change, element, ABSENT)

    def _server(
        self, change: Change, owner: ServiceKey | None, server: VirtualServer, after: Served | None
    ) -> None:
        before = self.servers.get(server)
        if before == after:
            return
        first = change.servers.get(server, (before, None))[0]
        change.servers[server] = (first, after)
        if owner is not None:
            change.owners[server] = owner
        if after is None:
            self.servers.pop(server, None)
        else:
            self.servers[server] = after

    def _element(self, change: Change, element: Element, after: Value | Absent) -> None:
        before: Value | Absent = self.elements.get(element, ABSENT)
        if before == after:
            return
        first = change.elements.get(element, (before, after))[0]
        change.elements[element] = (first, after)
        if isinstance(after, Absent):
            self.elements.pop(element, None)
        else:
            self.elements[element] = after

    def _compile(self, key: ServiceKey, view: ServiceView) -> Compiled:
        service = view.service
        wanted = [(service.cluster_ip, service.port, Role.CLUSTER_IP)]
        wanted += [(address, service.port, Role.LOAD_BALANCER) for address in service.load_balancer_ips]
        wanted += [(address, service.port, Role.EXTERNAL_IP) for address in service.external_ips]
        if service.node_port:
            wanted += [(address, service.node_port, Role.NODE_PORT) for address in self._node_port_addresses]
        how = Scheduling(self._how.scheduler, service.affinity_seconds, self._how.flags)
        everyone = Served(how, frozenset(view.cluster)) if view.cluster else None
        local = bool(service.external_local and service.has_endpoints and view.local)
        mark = self._mark(key) if local else 0
        error = "IPVS: no mark is left for externalTrafficPolicy Local" if local and not mark else ""
        if not local:
            self._release_mark(key)
        places = set()
        frontends = []
        for address, port, role in wanted:
            if address and (address, port) not in places:
                places.add((address, port))
                served = everyone
                if role is Role.CLUSTER_IP and service.internal_local:
                    served = Served(how, frozenset(view.local)) if view.local else None
                if not service.has_endpoints:
                    served = None
                elements = self._elements(view, (address, port), role, mark)
                frontends.append(Frontend(address, port, role, served, tuple(elements.items())))
        addresses = tuple(
            dict.fromkeys(
                LocalAddress(address, role is not Role.CLUSTER_IP)
                for address, _, role in wanted
                if address and role is not Role.NODE_PORT
            )
        )
        hairpin: tuple[Element, ...] = ()
        if service.has_endpoints:
            protocol = service.name.protocol
            hairpin = tuple((rules.HAIRPIN, names.pack_hairpin(one, protocol)) for one in view.local)
        marked = None
        if mark:
            if how.persistence:
                # With persistence at a mark the kernel leaves a packet's port as it is (ip_vs_sched_persist).
                how = Scheduling("mh", 0, FALLBACK)
            server = VirtualServer(self.family, 0, "", 0, _mark_value(mark))
            marked = (server, Served(how, frozenset(view.local)))
        ranges = _ranges(service) if service.load_balancer_ips else ()
        return Compiled(tuple(frontends), marked, addresses, hairpin, ranges, error)

    def _elements(
        self, view: ServiceView, place: tuple[str, int], role: Role, mark: int
    ) -> dict[Element, Value]:
        service = view.service
        packed = names.pack_frontend(place[0], service.name.protocol, place[1])
        found: dict[Element, Value] = {}
        if not service.has_endpoints:
            found[rules.NO_ENDPOINTS, packed] = f"{rules.REJECT}"
        elif role is Role.CLUSTER_IP:
            reached = view.local if service.internal_local else view.cluster
            found[rules.SERVICES, packed] = rules.CLUSTER_IP if reached else "drop"
        elif not service.external_local:
            found[rules.SERVICES, packed] = rules.EXTERNAL if view.cluster else "drop"
        elif mark:
            found[rules.SERVICES, packed] = rules.LOCAL
            found[rules.MARKS, packed] = rules.pack_mark(_mark_value(mark))
        else:
            found[rules.SERVICES, packed] = rules.LOCAL_NONE
        if service.has_endpoints and role in (Role.LOAD_BALANCER, Role.EXTERNAL_IP):
            found[rules.EXTERNAL_FRONTENDS, packed] = None
        if service.restrict_sources and place[0] in service.load_balancer_ips and role is not Role.NODE_PORT:
            found |= self._firewall(service, place[0], packed)
        return found

    def _firewall(self, service: ServicePort, address: str, packed: bytes) -> dict[Element, Value]:
        if not service.source_ranges:
            return {(rules.FIREWALL_IPS, packed): "drop"}
        ranges = _ranges(service)
        if not ranges:
            return {}
        found: dict[Element, Value] = {(rules.FIREWALL_IPS, packed): names.firewall_chain(ranges)}
        if any(node in ip_network(cidr) for node in self._node_ips for cidr in ranges):
            found[rules.FIREWALL_SELF, names.pack_address(address) + packed] = None
        return found

    def firewalls(self) -> Mapping[str, tuple[str, ...]]:
        """The chains of source ranges that are in use: name and ranges."""
        return self._firewalls

    def _mark(self, key: ServiceKey) -> int:
        mark = self.marks.get(key)
        if mark is None:
            mark = self._free_marks.pop() if self._free_marks else self._next_mark
            if mark > _LAST_MARK:
                return 0
            if mark == self._next_mark:
                self._next_mark += 2
            self.marks[key] = mark
        return mark

    def _release_mark(self, key: ServiceKey) -> None:
        mark = self.marks.pop(key, None)
        if mark is not None:
            self._free_marks.append(mark)


def _protocol(key: ServiceKey) -> str:
    return key.rpartition("/")[0].rpartition("/")[2]


def _mark_value(mark: int) -> int:
    return mark << MARK_SHIFT | _MARK_TAIL


def _ranges(service: ServicePort) -> tuple[str, ...]:
    """The sources that may come, in the fewest CIDRs; empty when nobody or everybody may."""
    if not (service.restrict_sources and service.source_ranges):
        return ()
    ranges = names.collapse(service.source_ranges)
    return () if ranges[0].endswith("/0") else ranges
