"""The flags that belong to one mode."""

import argparse

import msgspec


class IptablesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of --mode iptables."""

    backend: str = "auto"
    """auto (what the host uses), nft or legacy."""
    localhost_nodeports: bool = False


def add_mode_flags(parser: argparse.ArgumentParser) -> None:
    """Add them."""
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


def iptables_settings(flags: argparse.Namespace) -> IptablesSettings:
    """Read parsed flags."""
    return IptablesSettings(
        backend=flags.iptables_backend, localhost_nodeports=flags.iptables_localhost_nodeports
    )
