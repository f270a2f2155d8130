"""The chains that no service shapes, and the hooks into the kernel's own chains. Pure."""

from rulecast.model import Family, Protocol
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig
from rulecast_agent.dataplane.iptables import matches, names
from rulecast_agent.dataplane.iptables.dispatch import Rules

_LOOPBACK = {Family.IPV4: "127.0.0.0/8", Family.IPV6: "::1/128"}
MASQUERADE = "-j MASQUERADE --random-fully"

HOOKS = {
    "nat": {
        "PREROUTING": f"-j {names.SERVICES}",
        "OUTPUT": f"-j {names.SERVICES}",
        "POSTROUTING": f"-j {names.POSTROUTING}",
    },
    "filter": {
        "INPUT": f"-j {names.INPUT}",
        "FORWARD": f"-j {names.FORWARD}",
        "OUTPUT": f"-j {names.OUTPUT}",
    },
}
"""One jump in each, put first."""


def host_chains(
    family: Family, host: HostConfig, *, localhost_node_ports: bool, drop_invalid: bool
) -> dict[str, dict[str, Rules]]:
    """By table and name. kube-proxy's KUBE-SERVICES, KUBE-POSTROUTING, KUBE-FORWARD and KUBE-FIREWALL."""
    config = host.families[family]
    localhost = localhost_node_ports and family is Family.IPV4 and config.nodeport_addresses is None
    node_ports = _node_ports(family, config, localhost=localhost)
    undelivered = f"{matches.NEW} -j {names.UNDELIVERED}"
    others = (
        f"{matches.NEW} -j {names.CLUSTER_IPS}",
        *(f"-d {cidr} {matches.NEW} -j DROP" for cidr in config.service_cidrs),
    )
    mark = host.masquerade_mark
    # What conntrack gives up on is not translated back, and its client resets (kubernetes/kubernetes#74839).
    invalid = ("-m conntrack --ctstate INVALID -j DROP",) if drop_invalid else ()
    loopback = _LOOPBACK[family]
    # Where route_localnet is on, as kube-proxy leaves it behind and we may set it, neighbors reach what
    # listens on the loopback, unless this stands in their way (CVE-2020-8558).
    guard = (
        (f"-d {loopback} ! -i lo -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",)
        if family is Family.IPV4
        else ()
    )
    return {
        "nat": {
            names.SERVICES: (
                f"-j {names.FRONTENDS}",
                *(f"{match} -j {names.NODE_PORTS}" for match in node_ports),
            ),
            names.POSTROUTING: (
                f"-m conntrack --ctstate DNAT -j {names.HAIRPIN}",
                f"{matches.unmarked(mark)} -j RETURN",
                # The mark is cleared, so that an encapsulated packet which passes here again is left alone.
                matches.flip_mark(mark),
                MASQUERADE,
            ),
        },
        "filter": {
            names.INPUT: (
                *guard,
                undelivered,
                *(f"{match} {matches.NEW} -j {names.PORTS}" for match in node_ports),
            ),
            names.FORWARD: (
                *invalid,
                undelivered,
                *others,
                # Where the policy of FORWARD is DROP, as container engines set it.
                f"{matches.marked(mark)} -j ACCEPT",
                "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
            ),
            names.OUTPUT: (undelivered, *others),
            names.REFUSE: (
                f"-p tcp {matches.refusals(family, Protocol.TCP)}",
                matches.refusals(family),
            ),
        },
    }


def _node_ports(family: Family, config: FamilyConfig, *, localhost: bool) -> list[str]:
    if config.nodeport_addresses is None:
        exclude = "" if localhost else f"! -d {_LOOPBACK[family]} "
        return [f"{exclude}{matches.LOCAL_DESTINATION}"]
    return [
        f"-d {matches.host(address)}"
        for address in config.nodeport_addresses
        if not (address.startswith("127.") or address == "::1")
    ]
