"""The facts of this host that shape the rules, brought together as a HostConfig."""

import ipaddress
from collections.abc import Collection, Sequence

from rulecast.address import is_ipv6
from rulecast.model import ClusterInfo, Family, NodeInfo
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig
from rulecast_agent.detect import detectors
from rulecast_agent.settings import AgentSettings


def of_family(texts: Sequence[str], family: Family) -> tuple[str, ...]:
    """The canonical addresses or CIDRs of one family, in their order."""
    return tuple(text for text in texts if is_ipv6(text) is (family is Family.IPV6))


def nodeport_addresses(
    cidrs: Sequence[str] | None, node_ips: Sequence[str], interface_ips: Collection[str], family: Family
) -> tuple[str, ...] | None:
    """The addresses of one family on which node ports answer; None: every local one but loopback.

    `cidrs` None means the node's primary address (nothing while that is unknown, never a guess). Else the
    rules are kube-proxy's: CIDRs of the other family only, or one of length zero, mean the whole family;
    otherwise it is each interface address in one of them. Loopback addresses never serve node ports.
    """
    if cidrs is None:
        return of_family(node_ips, family)[:1]
    own = of_family(cidrs, family)
    if not own or any(cidr.endswith("/0") for cidr in own):
        return None
    networks = [ipaddress.ip_network(cidr) for cidr in own]
    candidates = [ipaddress.ip_address(ip) for ip in of_family(tuple(interface_ips), family)]
    chosen = [ip for ip in candidates if not ip.is_loopback and any(ip in network for network in networks)]
    return tuple(str(ip) for ip in sorted(chosen, key=int))


def host_config(
    settings: AgentSettings,
    *,
    families: Collection[Family],
    node: NodeInfo | None,
    cluster: ClusterInfo,
    interface_ips: Collection[str],
) -> HostConfig | None:
    """All that the rules need and that no Service says; None while the local detector is unknown.

    Only `families` are programmed: those that the kernel has.
    """
    detector = detectors(settings.detection, node)
    if detector is None:
        return None
    node_ips = node.addresses if node else ()
    return HostConfig(
        families={
            family: FamilyConfig(
                detector=detector[family],
                node_ips=of_family(node_ips, family),
                nodeport_addresses=nodeport_addresses(
                    settings.nodeport_addresses, node_ips, interface_ips, family
                ),
                service_cidrs=of_family(cluster.service_cidrs, family),
            )
            for family in sorted(families)
        },
        masquerade_all=settings.masquerade_all,
        masquerade_mark=1 << settings.masquerade_bit,
    )
