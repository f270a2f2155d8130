"""The agent's flags as one frozen value. Names and defaults follow kube-proxy's flags where it has them."""

import argparse
import enum
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from rulecast.address import AddressError, canonical_cidr, is_ipv6
from rulecast.errors import UsageError
from rulecast.flags import HostPort, Parser, host_port, readable_file
from rulecast.model import Family
from rulecast_agent.settings_discovery import DiscoverySettings, add_discovery_flags, discovery_settings
from rulecast_agent.settings_modes import (
    IptablesSettings,
    IpvsSettings,
    add_mode_flags,
    iptables_settings,
    ipvs_settings,
)

MODES = ("nftables", "iptables", "ipvs")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_INTERFACE = re.compile(r"[^\s/:]{1,15}")


class DetectLocalMode(enum.StrEnum):
    """kube-proxy's detectLocalMode."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """How traffic of this node's pods is told."""

    mode: DetectLocalMode = DetectLocalMode.CLUSTER_CIDR
    cluster_cidrs: Mapping[Family, str] = {}
    """Canonical; the first one given for each family."""
    bridge_interface: str = ""
    interface_name_prefix: str = ""


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's side of TLS: whom it believes, and by what it is known."""

    ca: Path
    cert: Path | None = None
    """Both or neither of certificate and key; neither only with a token."""
    key: Path | None = None
    token: Path | None = None
    """File of the ServiceAccount token that is bound to our node."""
    server_name: str = ""
    """Name expected in the server's certificate; empty: the host that was dialed."""


class ConntrackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Connection-tracking sysctls; a 0 or None leaves what the host has."""

    max_per_core: int = 32768
    minimum: int = 131072
    tcp_timeout_established: float = 86400.0
    tcp_timeout_close_wait: float = 3600.0
    tcp_be_liberal: bool = False
    udp_timeout: float = 0.0
    udp_timeout_stream: float = 0.0


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All of `rulecast agent`. Times are seconds."""

    node_name: str
    servers: tuple[HostPort, ...] = ()
    """Empty with `standalone` and with `discovery`."""
    discovery: DiscoverySettings | None = None
    standalone: bool = False
    mode: str = "nftables"
    detection: Detection = Detection()
    nodeport_addresses: tuple[str, ...] | None = None
    """Canonical CIDRs; None: the node's primary address of each family."""
    masquerade_all: bool = False
    masquerade_bit: int = 14
    http: HostPort = HostPort("0.0.0.0", 10256)  # noqa: S104  (as kube-proxy: load balancers probe it)
    state_dir: Path | None = None
    tls: TlsSettings | None = None
    """None: plain text, which only --insecure or --standalone allows."""
    sync_period: float = 30.0
    """An update that waits for twice this long makes the agent unhealthy; also the longest retry delay."""
    min_sync_period: float = 0.1
    """Least pause between two writes. kube-proxy pauses 1 s: its syncs cost seconds, ours milliseconds."""
    verify_period: float = 600.0
    iptables: IptablesSettings = IptablesSettings()
    ipvs: IpvsSettings = IpvsSettings()
    conntrack: ConntrackSettings = ConntrackSettings()
    log_format: str = "text"
    log_level: str = "info"
    warnings: tuple[str, ...] = ()
    """What was given and is not used, a line each, to be logged at start."""


def duration(text: str) -> float:
    """Parse a Go duration such as `1m30s`, `250ms` or `0`; a bare number means seconds.

    Raises argparse.ArgumentTypeError.
    """
    parts = _PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text, re.ASCII) and float(text) < 1e9:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30s or 1m30s")


def positive_duration(text: str) -> float:
    """A `duration` above zero. Raises argparse.ArgumentTypeError."""
    seconds = duration(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0")
    return seconds


def build_parser() -> Parser:
    """The parser of `rulecast agent`; the caller may add the source flags that --standalone takes."""
    parser = Parser(prog="rulecast agent", allow_abbrev=False)
    add = parser.add_argument
    add("--server", metavar="ADDR[,ADDR...]", type=_servers, default=(), help="HOST:PORT of each replica")
    add("--standalone", action="store_true", help="no central server: watch for this node alone")
    add("--node-name", metavar="NAME", help="own Node (default: NODE_NAME, else the host name in lower case)")
    add("--mode", choices=MODES, default="nftables")
    add("--http", metavar="HOST:PORT", type=host_port, default="0.0.0.0:10256", help="health and metrics")
    add("--state-dir", metavar="DIR", type=_state_dir, help="keep the last good state here")
    add_discovery_flags(parser, servers=_servers)
    rules = parser.add_argument_group("rules")
    add = rules.add_argument
    add("--cluster-cidr", metavar="CIDR[,CIDR]", type=_cidrs, default=(), help="addresses of all pods")
    add(
        "--nodeport-addresses",
        metavar="CIDR[,CIDR]|primary",
        type=_nodeport_addresses,
        default="primary",
        help="local addresses on which node ports answer",
    )
    add("--masquerade-all", action="store_true", help="masquerade all traffic to cluster IPs")
    add("--masquerade-bit", metavar="0..31", type=_bit, default=14, help="packet mark bit (default 14)")
    add("--detect-local-mode", choices=[str(mode) for mode in DetectLocalMode], default="ClusterCIDR")
    add("--pod-bridge-interface", metavar="NAME", type=_interface, help="for BridgeInterface")
    add("--pod-interface-name-prefix", metavar="PREFIX", type=_interface)
    add("--sync-period", metavar="DURATION", type=positive_duration, default="30s")
    add("--min-sync-period", metavar="DURATION", type=duration, default="100ms", help="between two writes")
    add("--verify-period", metavar="DURATION", type=positive_duration, default="10m", help="full read-back")
    tls = parser.add_argument_group("transport security")
    tls.add_argument("--tls-cert", metavar="FILE", type=readable_file, help="client certificate")
    tls.add_argument("--tls-key", metavar="FILE", type=readable_file)
    tls.add_argument("--tls-ca", metavar="FILE", type=readable_file, help="verify the server against this CA")
    tls.add_argument("--token-file", metavar="FILE", type=readable_file, help="bound ServiceAccount token")
    tls.add_argument("--tls-server-name", metavar="NAME", default="")
    tls.add_argument("--insecure", action="store_true", help="plain text")
    _add_conntrack_flags(parser)
    add_mode_flags(parser, duration=duration, cidrs=_cidrs, bit=_bit)
    logs = parser.add_argument_group("logs")
    logs.add_argument("--log-format", choices=("text", "json"), default="text")
    logs.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def settings_of(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> AgentSettings:
    """Read parsed flags. Raises UsageError when they contradict each other."""
    if flags.min_sync_period > flags.sync_period:
        raise UsageError("--min-sync-period is longer than --sync-period")
    discovery, warnings = discovery_settings(flags, environment)
    tls = _tls(flags, server_name=discovery.server_name if discovery else "")
    detection, more = _detection(flags)
    return AgentSettings(
        node_name=node_name(flags.node_name, environment),
        servers=flags.server,
        discovery=discovery,
        standalone=flags.standalone,
        mode=flags.mode,
        detection=detection,
        nodeport_addresses=flags.nodeport_addresses,
        masquerade_all=flags.masquerade_all,
        masquerade_bit=flags.masquerade_bit,
        http=flags.http,
        state_dir=flags.state_dir,
        tls=tls,
        sync_period=flags.sync_period,
        min_sync_period=flags.min_sync_period,
        verify_period=flags.verify_period,
        iptables=iptables_settings(flags),
        ipvs=ipvs_settings(flags),
        conntrack=ConntrackSettings(
            max_per_core=flags.conntrack_max_per_core,
            minimum=flags.conntrack_min,
            tcp_timeout_established=flags.conntrack_tcp_timeout_established,
            tcp_timeout_close_wait=flags.conntrack_tcp_timeout_close_wait,
            tcp_be_liberal=flags.conntrack_tcp_be_liberal,
            udp_timeout=flags.conntrack_udp_timeout,
            udp_timeout_stream=flags.conntrack_udp_timeout_stream,
        ),
        log_format=flags.log_format,
        log_level=flags.log_level,
        warnings=warnings + more,
    )


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> AgentSettings:
    """Parse a command line. Raises UsageError."""
    return settings_of(build_parser().parse_args(argv), environment)


def node_name(given: str | None, environment: Mapping[str, str]) -> str:
    """The name of our Node: as given, or from NODE_NAME, verbatim; else the host name in lower case.

    A name that was chosen must equal the slices' nodeName byte for byte (kubernetes/kubernetes#71851).
    Raises UsageError when it is empty or no object can have it.
    """
    source, name = "--node-name", given
    if name is None and environment.get("NODE_NAME"):
        source, name = "NODE_NAME", environment["NODE_NAME"]
    if name is None:
        source, name = "host name", socket.gethostname().lower()
    if not name or len(name) > 253 or "/" in name or not name.isprintable() or " " in name:
        raise UsageError(f"{source} {name!r}: not a node name")
    return name


def _add_conntrack_flags(parser: Parser) -> None:
    group = parser.add_argument_group("connection tracking (0 leaves what the host has)")
    add = group.add_argument
    add("--conntrack-max-per-core", metavar="N", type=_count, default=32768)
    add("--conntrack-min", metavar="N", type=_count, default=131072)
    add("--conntrack-tcp-timeout-established", metavar="DURATION", type=duration, default="24h")
    add("--conntrack-tcp-timeout-close-wait", metavar="DURATION", type=duration, default="1h")
    add("--conntrack-tcp-be-liberal", action="store_true")
    add("--conntrack-udp-timeout", metavar="DURATION", type=duration, default="0")
    add("--conntrack-udp-timeout-stream", metavar="DURATION", type=duration, default="0")


def _tls(flags: argparse.Namespace, *, server_name: str) -> TlsSettings | None:
    cert = {"--tls-cert": flags.tls_cert, "--tls-key": flags.tls_key}
    given = {
        **cert,
        "--tls-ca": flags.tls_ca,
        "--token-file": flags.token_file,
        "--tls-server-name": flags.tls_server_name,
    }
    used = [name for name, value in given.items() if value]
    if flags.standalone:
        if flags.server:
            raise UsageError("--standalone and --server exclude each other")
        if used:
            raise UsageError(f"{used[0]} has no use with --standalone")
        return None
    if not flags.server and not flags.server_service:
        raise UsageError("--server or --server-service is required (or --standalone for a node on its own)")
    if flags.insecure:
        if used:
            raise UsageError(f"--insecure excludes {', '.join(used)}")
        return None
    needed = ["--tls-ca"]
    if any(cert.values()) or not flags.token_file:
        needed = [*cert, *needed]
    missing = [name for name in needed if not given[name]]
    if missing:
        raise UsageError(f"{', '.join(missing)} required (or --insecure for plain text)")
    return TlsSettings(
        ca=flags.tls_ca,
        cert=flags.tls_cert,
        key=flags.tls_key,
        token=flags.token_file,
        server_name=flags.tls_server_name or server_name,
    )


def _detection(flags: argparse.Namespace) -> tuple[Detection, tuple[str, ...]]:
    mode = DetectLocalMode(flags.detect_local_mode)
    needed: dict[DetectLocalMode, tuple[str, str]] = {
        DetectLocalMode.BRIDGE_INTERFACE: ("--pod-bridge-interface", flags.pod_bridge_interface or ""),
        DetectLocalMode.INTERFACE_NAME_PREFIX: (
            "--pod-interface-name-prefix",
            flags.pod_interface_name_prefix or "",
        ),
    }
    if mode in needed and not needed[mode][1]:
        raise UsageError(f"--detect-local-mode {mode} needs {needed[mode][0]}")
    warnings = [
        f"{name} is not used with --detect-local-mode {mode}"
        for other, (name, value) in needed.items()
        if value and other is not mode
    ]
    cidrs: dict[Family, str] = {}
    for cidr in flags.cluster_cidr:
        family = Family.IPV6 if is_ipv6(cidr) else Family.IPV4
        if family in cidrs:
            warnings.append(
                f"--cluster-cidr {cidr} is not used: {cidrs[family]} of the same family comes first"
            )
        cidrs.setdefault(family, cidr)
    if mode is DetectLocalMode.CLUSTER_CIDR and not cidrs:
        warnings.append("no --cluster-cidr: traffic of pods is not told from traffic of others")
    return (
        Detection(
            mode=mode,
            cluster_cidrs=cidrs,
            bridge_interface=flags.pod_bridge_interface or "",
            interface_name_prefix=flags.pod_interface_name_prefix or "",
        ),
        tuple(warnings),
    )


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _servers(text: str) -> tuple[HostPort, ...]:
    servers = [host_port(part) for part in _parts(text)]
    for server, part in zip(servers, _parts(text), strict=True):
        if part.startswith(":") or server.port == 0:
            raise argparse.ArgumentTypeError(f"{part!r} is not HOST:PORT to connect to")
    return tuple(dict.fromkeys(servers))


def _cidrs(text: str) -> tuple[str, ...]:
    try:
        return tuple(canonical_cidr(part) for part in _parts(text))
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _nodeport_addresses(text: str) -> tuple[str, ...] | None:
    if text == "primary":
        return None
    try:
        return _cidrs(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (CIDR[,CIDR] or the word primary)") from None


def _ranged(low: int, high: int, what: str) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return convert


_bit = _ranged(0, 31, "a bit from 0 to 31")
_count = _ranged(0, 2**31 - 1, "a number from 0 to 2147483647")


def _interface(text: str) -> str:
    if not _INTERFACE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an interface name")
    return text


def _state_dir(text: str) -> Path:
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return path
