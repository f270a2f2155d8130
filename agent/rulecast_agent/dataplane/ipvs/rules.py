"""The nft table beside IPVS: a constant number of rules, with sets for what differs by service. Pure.

nft and not ipset with iptables: one transaction changes sets and rules, verdict maps decide in one lookup,
and what writes and reads their elements is there already.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rulecast.model import Family, Protocol
from rulecast_agent.dataplane.base import HostConfig, LocalDetector
from rulecast_agent.dataplane.nftables.names import short_hash
from rulecast_agent.kernel.ipvs import PROTOCOLS

TABLE = "rulecast-ipvs"
SERVICES = "services"
NO_ENDPOINTS = "no-endpoint-services"
FIREWALL_IPS, FIREWALL_SELF = "firewall-ips", "firewall-self"
MARKS, MARK_VALUES = "marks", "mark-values"
VIRTUAL_IPS, LEAVING_IPS, EXTERNAL_IPS = "virtual-ips", "leaving-ips", "external-ips"
EXTERNAL_FRONTENDS, LEAVING_FRONTENDS = "external-frontends", "leaving-frontends"
HAIRPIN = "hairpin-connections"
REJECT = "reject-chain"
CLUSTER_IP, EXTERNAL, LOCAL, LOCAL_NONE = "cluster-ip", "external", "local", "local-none"

_WORD = {Family.IPV4: "ip", Family.IPV6: "ip6"}


def sets(family: Family) -> dict[str, str]:
    """The declarations of the sets and maps."""
    ip = _WORD[family]
    frontend = f"{ip} daddr . meta l4proto . th dport"
    return {
        SERVICES: f"map {{ typeof {frontend} : verdict; }}",
        NO_ENDPOINTS: f"map {{ typeof {frontend} : verdict; }}",
        FIREWALL_IPS: f"map {{ typeof {frontend} : verdict; }}",
        MARKS: f"map {{ typeof {frontend} : meta mark; }}",
        MARK_VALUES: "set { type mark; }",
        VIRTUAL_IPS: f"set {{ typeof {ip} daddr; }}",
        EXTERNAL_IPS: f"set {{ typeof {ip} daddr; }}",
        LEAVING_IPS: f"set {{ typeof {ip} daddr; }}",
        EXTERNAL_FRONTENDS: f"set {{ typeof {frontend}; }}",
        LEAVING_FRONTENDS: f"set {{ typeof {frontend}; }}",
        FIREWALL_SELF: f"set {{ typeof {ip} saddr . {frontend}; }}",
        HAIRPIN: f"set {{ typeof {ip} saddr . {frontend}; }}",
    }


BYTE_ORDER = sys.byteorder


def pack_mark(mark: int) -> bytes:
    """As nft keeps it, in host byte order."""
    return mark.to_bytes(4, BYTE_ORDER)


PROTOCOL_OF = {number: Protocol(name) for name, number in PROTOCOLS.items()}


class Chain(NamedTuple):
    """Its hook, "" for none, and its rules."""

    hook: str
    rules: tuple[str, ...]


def chains(family: Family, host: HostConfig, *, route_mark: int) -> dict[str, Chain]:
    """The chains by name; those that are gone to come first.

    `route_mark`: the bit that makes packets local.
    """
    ip = _WORD[family]
    config = host.families[family]
    frontend = f"{ip} daddr . meta l4proto . th dport"
    bit = host.masquerade_mark
    mark = f"meta mark set meta mark or {bit:#x}"
    own, elsewhere = _source(ip, config.detector, ""), _source(ip, config.detector, "!= ")
    if host.masquerade_all:
        cluster_ip: tuple[str, ...] = (mark,)
    elif elsewhere:
        cluster_ip = (f"{elsewhere} {mark}",)
    else:
        # A process of the node that connects to an address on our interface has that address as its source.
        cluster_ip = (f"{ip} saddr @{VIRTUAL_IPS} {mark}",)
    ours = ((f"{own} accept",) if own else ()) + (f"fib saddr type local {mark} accept",)
    classify = (
        # Here and not in input and output: IPVS refuses what the node itself sends before output.
        f"ct state new {ip} daddr @{LEAVING_IPS} drop",
        f"ct state new {ip} saddr . {frontend} @{FIREWALL_SELF} goto classify",
        f"ct state new {frontend} vmap @{FIREWALL_IPS}",
        "ct state new goto classify",
    )
    refuse = (
        f"ct state new {frontend} vmap @{NO_ENDPOINTS}",
        # Nothing but what is served answers at an address that only Services have.
        f"ct state new {ip} daddr @{VIRTUAL_IPS} {frontend} vmap @{SERVICES}",
        f"ct state new {ip} daddr @{VIRTUAL_IPS} goto {REJECT}",
    )
    unallocated = tuple(f"ct state new {ip} daddr {cidr} drop" for cidr in config.service_cidrs)
    route = f"meta mark set meta mark or {route_mark:#x}"
    made: dict[str, tuple[str, tuple[str, ...]]] = {
        REJECT: ("", ("meta l4proto tcp reject with tcp reset", "reject")),
        CLUSTER_IP: ("", cluster_ip),
        EXTERNAL: ("", (mark,)),
        # IPVS looks for a virtual server with the packet's mark before one with its address.
        LOCAL: ("", (*ours, f"meta mark set {frontend} map @{MARKS}")),
        LOCAL_NONE: ("", (*ours, "drop")),
        "classify": ("", (f"{frontend} vmap @{SERVICES}",)),
        "prerouting": ("type filter hook prerouting priority -110", classify),
        "output-pre": ("type filter hook output priority -110", classify),
        "route": (
            # After what translates destinations (-100): then it is not ours any more.
            "type filter hook prerouting priority -90",
            (
                "ct direction reply accept",
                # Open connections that IPVS has not translated: who has the address began to answer them.
                f"ct state != new ct reply {ip} saddr @{EXTERNAL_IPS} accept",
                f"{frontend} @{EXTERNAL_FRONTENDS} {route} accept",
                f"ct state != new {frontend} @{LEAVING_FRONTENDS} {route} accept",
                # Errors about what we sent, such as of a path's MTU.
                f"ct state related ct original {ip} daddr @{EXTERNAL_IPS} {route}",
            ),
        ),
        "input": (
            "type filter hook input priority 0",
            (
                f"meta mark & {route_mark:#x} != 0 meta mark set meta mark & {0xFFFFFFFF ^ route_mark:#x}",
                *refuse,
            ),
        ),
        "forward": (
            "type filter hook forward priority 0",
            (f"ct state new {frontend} vmap @{NO_ENDPOINTS}", *unallocated),
        ),
        "output": ("type filter hook output priority 0", (*refuse, *unallocated)),
        "postrouting": (
            "type nat hook postrouting priority 100",
            (
                f"{ip} saddr . {frontend} @{HAIRPIN} masquerade fully-random",
                f"meta mark & {bit:#x} != 0 meta mark set meta mark & {0xFFFFFFFF ^ bit:#x} "
                "masquerade fully-random",
            ),
        ),
        "unmark": (
            # Before a tunnel takes the mark over to a packet of its own, which IPVS would then take for ours.
            "type filter hook postrouting priority 90",
            (f"meta mark @{MARK_VALUES} meta mark set 0",),
        ),
    }
    return {name: Chain(*chain) for name, chain in made.items()}


def firewall_rule(family: Family, cidrs: tuple[str, ...]) -> str:
    """Drops every source outside of `cidrs`; who is inside goes on like anyone."""
    return f"{_WORD[family]} saddr != {{ {', '.join(cidrs)} }} drop"


def script(family: Family, made: Mapping[str, Chain], firewalls: Mapping[str, tuple[str, ...]]) -> str:
    """Create what is missing, and give every chain its rules, in one transaction."""
    word = _WORD[family]
    lines = [f'add table {word} {TABLE} {{ comment "Owned by rulecast; edits are undone"; }}']
    for name, declaration in sets(family).items():
        kind, _, body = declaration.partition(" ")
        lines.append(f"add {kind} {word} {TABLE} {name} {body}")
    for name, chain in made.items():
        hook = f" {{ {chain.hook}; policy accept; }}" if chain.hook else ""
        lines.append(f"add chain {word} {TABLE} {name}{hook}")
        lines.append(f"flush chain {word} {TABLE} {name}")
    lines += [_rule(family, name, rule) for name, chain in made.items() for rule in chain.rules]
    return "\n".join(lines) + "\n" + firewall_script(family, firewalls)


def firewall_script(family: Family, firewalls: Mapping[str, tuple[str, ...]]) -> str:
    """Create the chains of source ranges."""
    lines = []
    for name, cidrs in firewalls.items():
        lines.append(f"add chain {_WORD[family]} {TABLE} {name}")
        lines.append(f"flush chain {_WORD[family]} {TABLE} {name}")
        # Not accepted here: the packet has to be classified like any other.
        lines += [_rule(family, name, rule) for rule in (firewall_rule(family, cidrs), "goto classify")]
    return "\n".join(lines) + "\n"


def deletion_script(family: Family, unused: Iterable[str]) -> str:
    """Delete chains to which nothing leads."""
    return "".join(f"delete chain {_WORD[family]} {TABLE} {name}\n" for name in unused)


def _rule(family: Family, chain: str, rule: str) -> str:
    return f'add rule {_WORD[family]} {TABLE} {chain} {rule} comment "{short_hash(rule)[:8]}"'


def _source(ip: str, detector: LocalDetector, negation: str) -> str:
    if detector.source_cidr:
        return f"{ip} saddr {negation}{detector.source_cidr}"
    if detector.interface:
        return f'iifname {negation}"{detector.interface}"'
    if detector.interface_prefix:
        return f'iifname {negation}"{detector.interface_prefix}*"'
    return ""
