"""One service as elements of the shared maps: frontends, verdicts and endpoint slots. Pure."""

from collections.abc import Iterator, Sequence
from ipaddress import ip_address, ip_network
from typing import NamedTuple

import msgspec

from rulecast.model import Endpoint, Family, ServicePort
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.claims import Role
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.kernel.nft_netlink import Value


class Frontend(NamedTuple):
    """One place where a service answers; `key` is its packed key in the services or nodeports map."""

    key: bytes
    role: Role
    address: str


class Layout(msgspec.Struct, frozen=True, gc=False):
    """A service as it is, or is to be, in the kernel."""

    view: ServiceView
    cluster: tuple[Endpoint, ...]
    """Slot order, dense from slot 0."""
    local: tuple[Endpoint, ...]
    frontends: tuple[Frontend, ...]
    """Where it answers. An address and port that another service has before it is not among them."""


class Run(NamedTuple):
    """Consecutive endpoint slots of one frontend."""

    set_name: str
    frontend: bytes
    first: int


def frontends(service: ServicePort) -> Iterator[Frontend]:
    """Where the service wants to answer, each place once."""
    protocol = service.name.protocol
    seen = set()
    wanted = [(service.cluster_ip, Role.CLUSTER_IP)]
    wanted += [(address, Role.LOAD_BALANCER) for address in service.load_balancer_ips]
    wanted += [(address, Role.EXTERNAL_IP) for address in service.external_ips]
    for address, role in wanted:
        if address and address not in seen:
            seen.add(address)
            yield Frontend(names.pack_frontend(address, protocol, service.port), role, address)
    if service.node_port:
        yield Frontend(names.pack_frontend("", protocol, service.node_port), Role.NODE_PORT, "")


def arrange(before: Sequence[Endpoint], members: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Slots for `members`, moving as few as can be: who stays within the new length keeps the slot.

    At most LOCAL_OFFSET slots; the rest of a greater set gets no traffic.
    """
    if not before:
        return tuple(members[: names.LOCAL_OFFSET])
    members = members[: names.LOCAL_OFFSET]
    wanted = dict.fromkeys(members)
    slots: list[Endpoint | None] = [None] * len(wanted)
    for slot, endpoint in enumerate(before[: len(slots)]):
        if endpoint in wanted:
            slots[slot] = endpoint
            del wanted[endpoint]
    if not wanted:
        return tuple(e for e in slots if e is not None)
    free = iter(wanted)
    return tuple(e if e is not None else next(free) for e in slots)


def arranged(before: Layout | None, view: ServiceView, owned: tuple[Frontend, ...]) -> Layout:
    """The layout of `view` with these frontends, next to what is there."""
    return Layout(
        view,
        arrange(before.cluster if before else (), view.cluster),
        arrange(before.local if before else (), view.local),
        owned,
    )


class LayoutCompiler:
    """Elements of a layout, for one family and host configuration."""

    def __init__(self, *, family: Family, host: HostConfig) -> None:
        self.family = family
        self._node_ips = [ip_address(a) for a in host.families[family].node_ips]

    def verdict(self, layout: Layout, frontend: Frontend) -> str:
        """The chain to go to, "drop", or the reject chain, as kube-proxy decides."""
        service = layout.view.service
        if not service.has_endpoints:
            return names.REJECT_CHAIN
        nodeport = "nodeport-" if frontend.role is Role.NODE_PORT else ""
        count, local = len(layout.cluster), len(layout.local)
        if frontend.role is Role.CLUSTER_IP:
            count = local if service.internal_local else count
            kind = "cluster-ip"
        elif service.external_local:
            if not count and not local:
                return "drop"
            kind = "local"
        else:
            kind = "external"
        if kind != "local" and not count:
            return "drop"
        if service.affinity_seconds:
            return affinity_chain(kind, layout)
        protocol = service.name.protocol.lower()
        counts = f"{count}-{local}" if kind == "local" else f"{count}"
        return f"{nodeport}{kind}-{protocol}-{counts}"

    def entries(self, layout: Layout) -> Iterator[tuple[str, bytes, Value]]:
        """The verdict and firewall elements of the service (those that are its alone)."""
        service = layout.view.service
        for frontend in layout.frontends:
            nodeport = frontend.role is Role.NODE_PORT
            verdict = self.verdict(layout, frontend)
            if verdict == names.REJECT_CHAIN:
                yield (
                    names.NO_ENDPOINT_NODEPORTS if nodeport else names.NO_ENDPOINT_SERVICES,
                    frontend.key,
                    verdict,
                )
            else:
                yield names.NODEPORTS if nodeport else names.SERVICES, frontend.key, verdict
            if frontend.address in service.load_balancer_ips and service.restrict_sources:
                yield from self._firewall(service, frontend)

    def firewall_ranges(self, service: ServicePort) -> tuple[str, ...]:
        """The collapsed source ranges that guard its load-balancer addresses; () when no chain is needed."""
        if not (service.restrict_sources and service.load_balancer_ips and service.source_ranges):
            return ()
        ranges = names.collapse(service.source_ranges)
        return () if ranges[0].endswith("/0") else ranges

    def _firewall(self, service: ServicePort, frontend: Frontend) -> Iterator[tuple[str, bytes, Value]]:
        if not service.source_ranges:
            yield names.FIREWALL_IPS, frontend.key, "drop"
            return
        ranges = self.firewall_ranges(service)
        if not ranges:
            return
        yield names.FIREWALL_IPS, frontend.key, names.firewall_chain(ranges)
        networks = [ip_network(r) for r in ranges]
        # A node that may come may also have the guarded address itself as source, on an interface.
        if any(node in network for node in self._node_ips for network in networks):
            yield names.FIREWALL_SELF, names.pack_address(frontend.address) + frontend.key, None

    def runs(self, layout: Layout) -> dict[Run, tuple[Endpoint, ...]]:
        """The endpoint slots of the service. With session affinity it has chains instead."""
        service = layout.view.service
        found: dict[Run, tuple[Endpoint, ...]] = {}
        if not service.has_endpoints or service.affinity_seconds:
            return found
        for frontend in layout.frontends:
            set_name = names.slot_map(frontend.key)
            if frontend.role is Role.CLUSTER_IP and service.internal_local:
                found[Run(set_name, frontend.key, 0)] = layout.local
                continue
            found[Run(set_name, frontend.key, 0)] = layout.cluster
            if frontend.role is not Role.CLUSTER_IP and service.external_local:
                found[Run(set_name, frontend.key, names.LOCAL_OFFSET)] = layout.local
        return found

    def shared(self, layout: Layout) -> Iterator[tuple[str, bytes]]:
        """Set elements that several services may need at once."""
        service = layout.view.service
        if service.cluster_ip:
            yield names.CLUSTER_IPS, names.pack_address(service.cluster_ip)
        if service.has_endpoints:
            protocol = service.name.protocol
            for endpoint in layout.local:
                yield names.HAIRPIN, names.pack_hairpin(endpoint, protocol)

    def elements(self, layout: Layout) -> Iterator[tuple[str, bytes, Value]]:
        """Every element that is the service's alone."""
        yield from self.entries(layout)
        for run, endpoints in self.runs(layout).items():
            for slot, endpoint in enumerate(endpoints, run.first):
                yield run.set_name, names.pack_slot(run.frontend, slot), names.pack_endpoint(endpoint)


def affinity_chain(kind: str, layout: Layout) -> str:
    """A service's own chain of a kind, when it has session affinity."""
    return f"affinity-{kind}-{names.service_suffix(layout.view.service.key)}"
