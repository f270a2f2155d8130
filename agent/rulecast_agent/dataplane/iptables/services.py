"""One service port as chains and as actions of the dispatch trees. Pure."""

import enum
from collections.abc import Sequence
from ipaddress import collapse_addresses, ip_address, ip_network
from typing import NamedTuple

import msgspec

from rulecast.model import Endpoint, Family, Protocol, ServicePort
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig
from rulecast_agent.dataplane.claims import Role
from rulecast_agent.dataplane.iptables import matches, names
from rulecast_agent.dataplane.iptables.dispatch import Rules
from rulecast_agent.dataplane.iptables.picks import pick


class Space(enum.Enum):
    """In what a place's key is one."""

    FRONTEND = enum.auto()
    NODE_PORT = enum.auto()
    HEALTH_CHECK = enum.auto()


class Place(NamedTuple):
    """Where a service answers, or is asked for its health."""

    space: Space
    key: int


class Compiled(msgspec.Struct, frozen=True, gc=False):
    """What a service port needs in the kernel. Of places that others have before it nothing is used."""

    places: dict[Place, Role] = {}
    chains: dict[str, Rules] = {}
    """Its own chains of the nat table; those that are gone to come first."""
    translated: dict[Place, Rules] = {}
    """nat: actions for its places."""
    undelivered: dict[Place, Rules] = {}
    """filter: actions for packets to its places that nat left alone."""
    hairpin: tuple[int, ...] = ()
    """Addresses of this node's endpoints."""
    cluster_ips: tuple[int, ...] = ()
    """The cluster IP, at which other ports are refused; or nothing."""


class Kept(NamedTuple):
    """A `Compiled` that is kept: dicts of one or two entries would take 4 MB more for 10,000 services."""

    frontends: tuple[tuple[Place, Role, Rules, Rules], ...]
    chains: tuple[tuple[str, Rules], ...]
    hairpin: tuple[int, ...]
    cluster_ips: tuple[int, ...]

    def unpack(self) -> Compiled:
        """As it was compiled."""
        return Compiled(
            places={place: role for place, role, _, _ in self.frontends},
            chains=dict(self.chains),
            translated={place: rules for place, _, rules, _ in self.frontends if rules},
            undelivered={place: rules for place, _, _, rules in self.frontends if rules},
            hairpin=self.hairpin,
            cluster_ips=self.cluster_ips,
        )


def keep(compiled: Compiled) -> Kept:
    """Pack it."""
    translated, undelivered = compiled.translated, compiled.undelivered
    return Kept(
        tuple(
            (place, role, translated.get(place, ()), undelivered.get(place, ()))
            for place, role in compiled.places.items()
        ),
        tuple(compiled.chains.items()),
        compiled.hairpin,
        compiled.cluster_ips,
    )


def collapsed(cidrs: Sequence[str]) -> tuple[str, ...]:
    """Without those that others hold."""
    networks = [ip_network(cidr) for cidr in cidrs]
    return tuple(str(network) for network in collapse_addresses(networks))  # type: ignore[type-var]


class ServiceCompiler:
    """For one family and host configuration."""

    def __init__(self, *, family: Family, host: HostConfig) -> None:
        self._family = family
        self._config: FamilyConfig = host.families[family]
        self._mark = matches.set_mark(host.masquerade_mark)
        self._masquerade_all = host.masquerade_all

    def compile(self, view: ServiceView) -> Compiled:
        """Everything that the service wants."""
        service = view.service
        cluster_ips = (int(ip_address(service.cluster_ip)),) if service.cluster_ip else ()
        found = Compiled({}, {}, {}, {}, (), cluster_ips)
        chains = _Chains(self, view, found.chains)
        protocol = service.name.protocol
        wanted = [(service.cluster_ip, Role.CLUSTER_IP)]
        wanted += [(address, Role.LOAD_BALANCER) for address in service.load_balancer_ips]
        wanted += [(address, Role.EXTERNAL_IP) for address in service.external_ips]
        for address, role in wanted:
            place = Place(Space.FRONTEND, matches.service_key(protocol, service.port, address or "0.0.0.0"))  # noqa: S104
            if address and place not in found.places:
                self._place(found, chains, view, role, place, address)
        if service.node_port:
            place = Place(Space.NODE_PORT, matches.service_key(protocol, service.node_port))
            self._place(found, chains, view, Role.NODE_PORT, place, "")
        if service.health_check_node_port:
            key = matches.service_key(Protocol.TCP, service.health_check_node_port)
            place = Place(Space.HEALTH_CHECK, key)
            found.places[place] = Role.NODE_PORT
            found.undelivered[place] = ("-j ACCEPT",)
        if service.has_endpoints and view.local:
            hairpin = tuple(dict.fromkeys(int(ip_address(endpoint.ip)) for endpoint in view.local))
            found = msgspec.structs.replace(found, hairpin=hairpin)
        return found

    def _place(
        self, found: Compiled, chains: "_Chains", view: ServiceView, role: Role, place: Place, address: str
    ) -> None:
        found.places[place] = role
        target = chains.target(role, address)
        if target:
            found.translated[place] = (f"-j {target}",)
        rules = self._undelivered(view, role, address)
        if rules:
            found.undelivered[place] = rules

    def _undelivered(self, view: ServiceView, role: Role, address: str) -> Rules:
        """For packets that the nat table did not translate: strangers, and those for whom there is nobody."""
        service = view.service
        refuse = matches.refusals(self._family, service.name.protocol)
        if address in service.load_balancer_ips and service.restrict_sources:
            # Whoever may come was translated, unless there is no endpoint at all.
            allowed = () if service.has_endpoints else self.allowed(service, address)
            return (*(f"{source} {refuse}".lstrip() for source in allowed), "-j DROP")
        if not service.has_endpoints:
            return (refuse,)
        if role is Role.CLUSTER_IP:
            reached = view.local if service.internal_local else view.cluster
        elif service.external_local:
            reached = view.local
        else:
            reached = view.cluster
        return () if reached else ("-j DROP",)

    def allowed(self, service: ServicePort, address: str) -> tuple[str, ...]:
        """The source matches that a guarded load-balancer address lets in."""
        ranges = collapsed(service.source_ranges)
        if any(cidr.endswith("/0") for cidr in ranges):
            return ("",)
        found = [f"-s {cidr}" for cidr in ranges]
        nodes = [ip_address(node) for node in self._config.node_ips]
        # A node that may come may also have the guarded address itself as source, on an interface.
        if any(node in ip_network(cidr) for node in nodes for cidr in ranges):
            found.append(f"-s {matches.host(address)}")
        return tuple(found)

    def cluster_ip_marks(self) -> Rules:
        """kube-proxy without a detector masquerades no traffic to cluster IPs, unless all of it."""
        if self._masquerade_all:
            return (self._mark,)
        elsewhere = matches.from_elsewhere(self._config.detector)
        return (f"{elsewhere} {self._mark}",) if elsewhere else ()

    def external(self, *, local_policy: bool, cluster: str, local: Rules) -> Rules:
        """Rules for external addresses; `cluster` picks from all, `local` from this node's endpoints."""
        if not local_policy:
            return (self._mark, f"-j {cluster}")
        rules = []
        if cluster:
            own = matches.from_our_pod(self._config.detector)
            if own:
                rules.append(f"{own} -j {cluster}")
            rules.append(f"{matches.LOCAL_SOURCE} {self._mark}")
            rules.append(f"{matches.LOCAL_SOURCE} -j {cluster}")
        return (*rules, *local)

    def pick(
        self, view: ServiceView, kind: str, members: Sequence[Endpoint]
    ) -> tuple[Rules, dict[str, Rules]]:
        """The rules that pick one of `members`, and the chains that they need."""
        service = view.service
        if not service.affinity_seconds:
            return pick(service.key, kind, members)
        protocol = f"-p {service.name.protocol.lower()}"
        lists = [names.recent_list(service.key, endpoint) for endpoint in members]
        stay = [
            f"{protocol} {matches.remembered(name, service.affinity_seconds, self._family)} "
            f"{matches.translate(endpoint)}"
            for name, endpoint in zip(lists, members, strict=True)
        ]
        choose = []
        for index, (name, endpoint) in enumerate(zip(lists, members, strict=True)):
            left = len(members) - index
            chance = f" {matches.random_share(left)}" if left > 1 else ""
            put = matches.remember(name, self._family)
            choose.append(f"{protocol}{chance} {put} {matches.translate(endpoint)}")
        return (*stay, *choose), {}


class _Chains:
    """Makes the chains of one service as they are asked for."""

    def __init__(self, compiler: ServiceCompiler, view: ServiceView, found: dict[str, Rules]) -> None:
        self._compiler, self._view, self._found = compiler, view, found
        self._service = view.service

    def target(self, role: Role, address: str) -> str:
        """The chain for packets to a place; "" when nat leaves them alone."""
        service = self._service
        if not service.has_endpoints:
            return ""
        if role is Role.CLUSTER_IP:
            return self._cluster_ip()
        chain = self._external()
        if chain and address in service.load_balancer_ips and service.restrict_sources:
            allowed = self._compiler.allowed(service, address)
            if not allowed:
                return ""
            # The address is in the rules, where a node may have it itself.
            name = f"{names.PREFIX}FW-{names.digest(service.key, address)}"
            return self._add(name, tuple(f"{source} -j {chain}".lstrip() for source in allowed))
        return chain

    def _cluster_ip(self) -> str:
        service, compiler = self._service, self._compiler
        marks = compiler.cluster_ip_marks()
        local = service.internal_local
        if not (self._view.local if local else self._view.cluster):
            return ""
        name = names.service_chain("SVI" if local else "SVC", service.key)
        if name in self._found:
            return name
        # With no mark to set, or when others pick from the same set, the pick is a chain of its own.
        if service.externally_reachable:
            picker = self._picker(local=local)
            return self._add(name, (*marks, f"-j {picker}")) if marks else picker
        rules, chains = self._picks(local=local)
        self._found.update(chains)
        return self._add(name, (*marks, *rules))

    def _external(self) -> str:
        service = self._service
        name = names.service_chain("EXT", service.key)
        if name in self._found:
            return name
        cluster = self._picker(local=False)
        if not service.external_local:
            rules = self._compiler.external(local_policy=False, cluster=cluster, local=()) if cluster else ()
        else:
            local = self._picker(local=True)
            to_local = (f"-j {local}",) if local else ()
            rules = self._compiler.external(local_policy=True, cluster=cluster, local=to_local)
        return self._add(name, rules) if rules else ""

    def _picker(self, *, local: bool) -> str:
        """The chain that only picks; "" when there is nothing to pick from."""
        if not (self._view.local if local else self._view.cluster):
            return ""
        name = names.service_chain("LOC" if local else "ALL", self._service.key)
        if name not in self._found:
            rules, chains = self._picks(local=local)
            self._found.update(chains)
            self._add(name, rules)
        return name

    def _picks(self, *, local: bool) -> tuple[Rules, dict[str, Rules]]:
        members = self._view.local if local else self._view.cluster
        return self._compiler.pick(self._view, "L" if local else "A", members)

    def _add(self, name: str, rules: Rules) -> str:
        text = self._service.key.rpartition("/")[0].rpartition("/")[0].removesuffix(":")
        first, *others = rules
        self._found[name] = (_with_comment(first, text), *others)
        return name


def _with_comment(rule: str, text: str) -> str:
    """The rule with a comment in front of its target."""
    matching, _, target = rule.rpartition("-j ")
    return f"{matching}{matches.comment(text)} -j {target}"
