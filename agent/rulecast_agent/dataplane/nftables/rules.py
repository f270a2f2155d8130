"""The text of every rule. All chains but those of affinity and firewalls follow from name and host alone."""

import re
from collections.abc import Iterable, Mapping

import msgspec

from rulecast.model import Family
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.dataplane.nftables.names import WORD

LAYOUT_VERSION = 1
"""Part of every rule's fingerprint: another version rewrites all rules, in one transaction."""

_PICK = re.compile(r"(nodeport-)?(?:(cluster-ip|external)|local)-(tcp|udp|sctp)-(\d+)(?:-(\d+))?")
_HOOK_NUMBER = {"prerouting": 0, "input": 1, "forward": 2, "output": 3, "postrouting": 4}


class Chain(msgspec.Struct, frozen=True, gc=False):
    """One chain as it should be."""

    rules: tuple[str, ...]
    hook: tuple[str, str, int] | None = None
    """(type, hook, priority) of a base chain; its policy is accept."""

    @property
    def fingerprint(self) -> tuple[str, ...]:
        """One short hash a rule, written as its comment: what a read-back compares."""
        return tuple(names.short_hash(f"{LAYOUT_VERSION} {rule}")[:8] for rule in self.rules)

    @property
    def kernel_hook(self) -> tuple[str, int, int, int] | None:
        """`hook` as a netlink dump has it."""
        if self.hook is None:
            return None
        return (self.hook[0], _HOOK_NUMBER[self.hook[1]], self.hook[2], 1)


class SetShape(msgspec.Struct, frozen=True, gc=False):
    """Declaration of a named set or map, and the sizes by which a foreign shape is told."""

    declaration: str
    is_map: bool
    key_length: int
    data_length: int


def set_shapes(family: Family) -> dict[str, SetShape]:
    """The constant sets and maps."""
    ip, width = WORD[family], 4 if family is Family.IPV4 else 16
    service = f"{ip} daddr . meta l4proto . th dport"
    nodeport = "meta l4proto . th dport"
    verdict = 16

    def table_map(key: str, length: int, data: str, data_length: int) -> SetShape:
        return SetShape(f"map NAME {{ typeof {key} : {data}; }}", True, length, data_length)

    def plain(key: str, length: int) -> SetShape:
        return SetShape(f"set NAME {{ typeof {key}; }}", False, length, 0)

    slot = "numgen random mod 65536"
    slots = {
        name: table_map(
            f"{key}{protocol} dport . {slot}", length, f"{ip} daddr . {protocol} dport", width + 4
        )
        for protocol in names.PROTOCOL_NUMBER.values()
        for name, key, length in (
            (f"endpoints-{protocol}", f"{ip} daddr . ", width + 8),
            (f"nodeport-endpoints-{protocol}", "", 8),
        )
    }
    return {
        names.SERVICES: table_map(service, width + 8, "verdict", verdict),
        names.NODEPORTS: table_map(nodeport, 8, "verdict", verdict),
        names.NO_ENDPOINT_SERVICES: table_map(service, width + 8, "verdict", verdict),
        names.NO_ENDPOINT_NODEPORTS: table_map(nodeport, 8, "verdict", verdict),
        names.FIREWALL_IPS: table_map(service, width + 8, "verdict", verdict),
        **slots,
        names.FIREWALL_SELF: plain(f"{ip} saddr . {service}", 2 * width + 8),
        names.HAIRPIN: plain(f"{ip} saddr . {service}", 2 * width + 8),
        names.CLUSTER_IPS: plain(f"{ip} daddr", width),
        names.NODEPORT_IPS: plain(f"{ip} daddr", width),
    }


class RuleWriter:
    """Writes the rules of one family for one host configuration."""

    def __init__(self, *, family: Family, host: HostConfig) -> None:
        self._ip = WORD[family]
        self._loopback = "127.0.0.0/8" if family is Family.IPV4 else "::1"
        self._config: FamilyConfig = host.families[family]
        self._mark = host.masquerade_mark
        self._masquerade_all = host.masquerade_all
        self._service = f"{self._ip} daddr . meta l4proto . th dport"
        self._masquerade = f"meta mark set meta mark or {self._mark:#x}"

    def base_chains(self) -> dict[str, Chain]:
        """The chains that the kernel calls, hooked as kube-proxy's nftables mode does."""
        ip, service = self._ip, self._service
        # th dport needs no match on the protocol: only TCP, UDP and SCTP keys are in the maps.
        if self._config.nodeport_addresses is None:
            nodeport = f"fib daddr type local {ip} daddr != {self._loopback} meta l4proto . th dport vmap"
        else:
            nodeport = f"{ip} daddr @{names.NODEPORT_IPS} meta l4proto . th dport vmap"
        firewall = (
            f"ct state new {ip} saddr . {service} @{names.FIREWALL_SELF} accept",
            f"ct state new {service} vmap @{names.FIREWALL_IPS}",
        )
        nat = (f"{service} vmap @{names.SERVICES}", f"{nodeport} @{names.NODEPORTS}")
        no_endpoints = f"ct state new {service} vmap @{names.NO_ENDPOINT_SERVICES}"
        cluster_ips = [f"ct state new {ip} daddr @{names.CLUSTER_IPS} goto {names.REJECT_CHAIN}"]
        if self._config.service_cidrs:
            cidrs = ", ".join(names.collapse(self._config.service_cidrs))
            cluster_ips.append(f"ct state new {ip} daddr {{ {cidrs} }} drop")
        after = (no_endpoints, *cluster_ips)
        unmarked = 0xFFFFFFFF ^ self._mark
        postrouting = (
            f"{ip} saddr . {ip} daddr . meta l4proto . th dport @{names.HAIRPIN} masquerade fully-random",
            # The mark is cleared, so that an encapsulated packet which passes here again is left alone.
            f"meta mark & {self._mark:#x} != 0 meta mark set meta mark & {unmarked:#x} "
            "masquerade fully-random",
        )
        return {
            "filter-prerouting-pre-dnat": Chain(firewall, ("filter", "prerouting", -110)),
            "filter-output-pre-dnat": Chain(firewall, ("filter", "output", -110)),
            "filter-input": Chain(
                (f"ct state new {nodeport} @{names.NO_ENDPOINT_NODEPORTS}", no_endpoints),
                ("filter", "input", 0),
            ),
            "filter-forward": Chain(after, ("filter", "forward", 0)),
            "filter-output": Chain(after, ("filter", "output", 0)),
            "nat-prerouting": Chain(nat, ("nat", "prerouting", -100)),
            "nat-output": Chain(nat, ("nat", "output", -100)),
            "nat-postrouting": Chain(postrouting, ("nat", "postrouting", 100)),
        }

    def fixed_chains(self) -> dict[str, Chain]:
        """Chains without a hook that are always there. reject is not valid in nat chains."""
        return {names.REJECT_CHAIN: Chain(("meta l4proto tcp reject with tcp reset", "reject"))}

    def pick_chain(self, name: str) -> Chain | None:
        """The chain of an endpoint count, from its name alone; None for any other name.

        `cluster-ip-PROTOCOL-N`, `external-PROTOCOL-N`, `local-PROTOCOL-N-M`; for node ports with `nodeport-`.
        """
        match = _PICK.fullmatch(name)
        if match is None or bool(match[2]) == bool(match[5]):
            return None
        nodeport, protocol, count = match[1] is not None, match[3], int(match[4])
        if match[2]:
            return Chain((*self.masquerade(match[2]), self._dnat(nodeport, protocol, count)))
        cluster = self._dnat(nodeport, protocol, count) if count else "drop"
        local = self._dnat(nodeport, protocol, int(match[5]), names.LOCAL_OFFSET) if int(match[5]) else "drop"
        return Chain(self.local_policy(cluster, local))

    def masquerade(self, kind: str) -> tuple[str, ...]:
        """The marking in front of a `cluster-ip` or `external` pick.

        kube-proxy without a detector masquerades no traffic to cluster IPs, unless all of it.
        """
        if kind == "external" or self._masquerade_all:
            return (self._masquerade,)
        elsewhere = self._source(own=False)
        return (f"{elsewhere} {self._masquerade}",) if elsewhere else ()

    def local_policy(self, cluster: str, local: str) -> tuple[str, ...]:
        """externalTrafficPolicy Local: our pods and this node act as if back from a load balancer."""
        own = self._source(own=True)
        short_circuit = (f"{own} {cluster}",) if own else ()
        return (*short_circuit, f"fib saddr type local {self._masquerade} {cluster}", local)

    def firewall(self, ranges: Iterable[str]) -> Chain:
        """Drops every source that is not in `ranges` (collapsed, not empty)."""
        return Chain((f"{self._ip} saddr != {{ {', '.join(ranges)} }} drop",))

    def _dnat(self, nodeport: bool, protocol: str, count: int, offset: int = 0) -> str:
        key = f"{protocol} dport" if nodeport else f"{self._ip} daddr . {protocol} dport"
        name = f"nodeport-endpoints-{protocol}" if nodeport else f"endpoints-{protocol}"
        number = f"numgen random mod {count}" + (f" offset {offset}" if offset else "")
        return f"dnat {self._ip} to {key} . {number} map @{name}"

    def _source(self, *, own: bool) -> str:
        detector = self._config.detector
        equal = "" if own else "!= "
        if detector.source_cidr:
            return f"{self._ip} saddr {equal}{detector.source_cidr}"
        # iifname compares text: an interface of that name need not exist yet (kubernetes/kubernetes#134024).
        if detector.interface:
            return f'iifname {equal}"{detector.interface}"'
        if detector.interface_prefix:
            return f'iifname {equal}"{detector.interface_prefix}*"'
        return ""


def write_chain(family: Family, name: str, chain: Chain, *, flush: bool) -> list[str]:
    """The lines that create the chain with its rules, or with `flush` put them in place of what it holds.

    A flush makes the command wait until the kernel has freed what went: 28 ms against 5 ms.
    """
    at = f"{WORD[family]} {names.TABLE} {name}"
    hook = ""
    if chain.hook:
        kind, where, priority = chain.hook
        hook = f" {{ type {kind} hook {where} priority {priority}; policy accept; }}"
    lines = [f"add chain {at}{hook}"]
    if flush:
        lines.append(f"flush chain {at}")
    lines += [
        f'add rule {at} {rule} comment "{mark}"'
        for rule, mark in zip(chain.rules, chain.fingerprint, strict=True)
    ]
    return lines


def declare(family: Family, sets: Mapping[str, str]) -> list[str]:
    """The lines that create sets from their declarations; those that exist stay."""
    at = f"{WORD[family]} {names.TABLE}"
    lines = []
    for name, declaration in sets.items():
        kind, _, body = declaration.partition(" NAME ")
        lines.append(f"add {kind} {at} {name} {body}")
    return lines
