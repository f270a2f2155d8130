"""What should become of a packet, from the services and the host alone (kube-proxy's semantics)."""

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from rulecast.model import Endpoint, Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig
from tests.trace.packets import DROPPED, REJECTED, RESET, Outcome, Packet, Shares, passed


class _Claim(NamedTuple):
    """A service behind an address; the lowest claim to an address has it."""

    rank: int
    """0: cluster IP, 1: load balancer, 2: external IP."""
    key: ServiceKey


class Oracle:
    """One node."""

    def __init__(
        self,
        views: Mapping[ServiceKey, ServiceView],
        host: HostConfig,
        family: Family,
        *,
        local: Collection[str],
    ) -> None:
        self._views = {key: view for key, view in views.items() if view.service.name.family is family}
        self._host, self._config = host, host.families[family]
        self._local = frozenset(local)
        self._services: dict[tuple[str, str, int], _Claim] = {}
        self._node_ports: dict[tuple[str, int], ServiceKey] = {}
        for key, view in self._views.items():
            port = view.service
            protocol = port.name.protocol.lower()
            addresses = [(0, port.cluster_ip)]
            addresses += [(1, address) for address in port.load_balancer_ips]
            addresses += [(2, address) for address in port.external_ips]
            for rank, address in addresses:
                at = address, protocol, port.port
                self._services[at] = min(self._services.get(at, _Claim(9, key)), _Claim(rank, key))
            if port.node_port:
                at_port = protocol, port.node_port
                self._node_ports[at_port] = min(self._node_ports.get(at_port, key), key)
        self._cluster_ips = {view.service.cluster_ip for view in self._views.values()}

    def shares(self, packet: Packet) -> Shares:
        """Every outcome with its share."""
        claim = self._services.get((packet.destination, packet.protocol, packet.port))
        if claim is not None:
            view = self._views[claim.key]
            if claim.rank == 1 and self._stranger(packet, view):
                return {DROPPED: Fraction(1)}
            if claim.rank == 0:
                return self._cluster_ip(packet, view)
            return self._external(packet, view)
        if self._answers_node_ports(packet.destination):
            key = self._node_ports.get((packet.protocol, packet.port))
            if key is not None:
                return self._external(packet, self._views[key])
        return {self._unclaimed(packet): Fraction(1)}

    def _cluster_ip(self, packet: Packet, view: ServiceView) -> Shares:
        internal_local = view.service.internal_local
        pool = view.local if internal_local else view.cluster
        masquerade = self._host.masquerade_all or (self._detects and not _from_our_pod(packet, self._config))
        return self._picked(packet, view, pool, masquerade=masquerade)

    def _external(self, packet: Packet, view: ServiceView) -> Shares:
        if not view.service.external_local:
            return self._picked(packet, view, view.cluster, masquerade=True)
        if _from_our_pod(packet, self._config):
            return self._picked(packet, view, view.cluster, masquerade=False)
        if packet.source in self._local:
            return self._picked(packet, view, view.cluster, masquerade=True)
        return self._picked(packet, view, view.local, masquerade=False)

    def _picked(
        self, packet: Packet, view: ServiceView, pool: Iterable[Endpoint], *, masquerade: bool
    ) -> Shares:
        if not view.service.has_endpoints:
            return {_refused(packet): Fraction(1)}
        members = tuple(pool)
        if not members:
            return {DROPPED: Fraction(1)}
        ours = {endpoint.ip for endpoint in view.local}
        found: Shares = {}
        for endpoint in members:
            to_itself = endpoint.ip == packet.source and endpoint.ip in ours
            # What a local process gets passes no postrouting on its way from elsewhere.
            leaves = endpoint.ip not in self._local or not packet.interface
            outcome = passed(*endpoint, masqueraded=leaves and (masquerade or to_itself))
            found[outcome] = found.get(outcome, Fraction(0)) + Fraction(1, len(members))
        return found

    def _stranger(self, packet: Packet, view: ServiceView) -> bool:
        port = view.service
        if not port.restrict_sources:
            return False
        ranges = [ipaddress.ip_network(text) for text in port.source_ranges]

        def within(address: str) -> bool:
            return any(ipaddress.ip_address(address) in network for network in ranges)

        # A node whose address is allowed may use the balancer's address as its own source.
        itself = packet.source == packet.destination and any(map(within, self._config.node_ips))
        return not (within(packet.source) or itself)

    def _answers_node_ports(self, address: str) -> bool:
        chosen = self._config.nodeport_addresses
        if chosen is None:
            return address in self._local and not ipaddress.ip_address(address).is_loopback
        return address in chosen

    def _unclaimed(self, packet: Packet) -> Outcome:
        address = packet.destination
        if address in self._cluster_ips:
            return _refused(packet)
        value = ipaddress.ip_address(address)
        if address not in self._local and any(
            value in ipaddress.ip_network(cidr) for cidr in self._config.service_cidrs
        ):
            return DROPPED
        return passed(address, packet.port)

    @property
    def _detects(self) -> bool:
        detector = self._config.detector
        return bool(detector.source_cidr or detector.interface or detector.interface_prefix)


def _refused(packet: Packet) -> Outcome:
    return RESET if packet.protocol == "tcp" else REJECTED


def _from_our_pod(packet: Packet, config: FamilyConfig) -> bool:
    detector = config.detector
    if detector.source_cidr:
        return ipaddress.ip_address(packet.source) in ipaddress.ip_network(detector.source_cidr)
    if detector.interface:
        return packet.interface == detector.interface
    return bool(detector.interface_prefix) and packet.interface.startswith(detector.interface_prefix)
