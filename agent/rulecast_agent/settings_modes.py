"""The flags that belong to one mode."""

import argparse
from collections.abc import Callable

import msgspec

from rulecast.errors import UsageError


class IptablesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of --mode iptables."""

    backend: str = "auto"
    """auto (what the host uses), nft or legacy."""
    localhost_nodeports: bool = False


class IpvsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of --mode ipvs. Times are seconds; 0 keeps the kernel's."""

    scheduler: str = "rr"
    mark_bit: int = 13
    """Of packets for external addresses, between routing's two hooks."""
    strict_arp: bool = False
    tcp_timeout: float = 0.0
    tcp_fin_timeout: float = 0.0
    udp_timeout: float = 0.0
    exclude_cidrs: tuple[str, ...] = ()


SCHEDULERS = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh")


def add_mode_flags(
    parser: argparse.ArgumentParser,
    *,
    duration: Callable[[str], float],
    cidrs: Callable[[str], tuple[str, ...]],
    bit: Callable[[str], int],
) -> None:
    """Add them; the callables parse their values."""
    group = parser.add_argument_group("--mode iptables")
    group.add_argument(
        "--iptables-backend",
        choices=("auto", "nft", "legacy"),
        default="auto",
        help="auto: the one that kubelet or most rules of this host use",
    )
    group.add_argument(
        "--iptables-localhost-nodeports",
        action="store_true",
        help="node ports answer on 127.0.0.1 too, if all addresses serve them (sets route_localnet)",
    )
    group = parser.add_argument_group("--mode ipvs")
    group.add_argument("--ipvs-scheduler", choices=SCHEDULERS, default="rr")
    group.add_argument(
        "--ipvs-mark-bit",
        metavar="0..31",
        type=bit,
        default=13,
        help="packet mark bit that brings packets of external addresses to IPVS (default 13)",
    )
    group.add_argument("--ipvs-strict-arp", action="store_true", help="set arp_ignore and arp_announce")
    for name in ("tcp", "tcpfin", "udp"):
        group.add_argument(f"--ipvs-{name}-timeout", metavar="DURATION", type=duration, default="0")
    group.add_argument(
        "--ipvs-exclude-cidrs",
        metavar="CIDR[,CIDR]",
        type=cidrs,
        default=(),
        help="virtual servers of these addresses are never touched",
    )


def ipvs_settings(flags: argparse.Namespace) -> IpvsSettings:
    """Read parsed flags. Raises UsageError."""
    if flags.ipvs_mark_bit == flags.masquerade_bit:
        raise UsageError(f"--ipvs-mark-bit and --masquerade-bit are both {flags.masquerade_bit}")
    return IpvsSettings(
        scheduler=flags.ipvs_scheduler,
        mark_bit=flags.ipvs_mark_bit,
        strict_arp=flags.ipvs_strict_arp,
        tcp_timeout=flags.ipvs_tcp_timeout,
        tcp_fin_timeout=flags.ipvs_tcpfin_timeout,
        udp_timeout=flags.ipvs_udp_timeout,
        exclude_cidrs=flags.ipvs_exclude_cidrs,
    )


def iptables_settings(flags: argparse.Namespace) -> IptablesSettings:
    """Read parsed flags."""
    return IptablesSettings(
        backend=flags.iptables_backend, localhost_nodeports=flags.iptables_localhost_nodeports
    )
