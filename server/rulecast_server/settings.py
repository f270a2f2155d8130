"""The server's flags as one frozen value."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rulecast.errors import UsageError
from rulecast.flags import HostPort, Parser, directory, host_port, positive_seconds, readable_file


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where Services, EndpointSlices and Nodes come from. Neither set: the cluster that we run in."""

    kubeconfig: Path | None = None
    manifests: Path | None = None
    watch_timeout: float = 90.0
    """Seconds without a byte after which a watch counts as dead."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All of `rulecast server`."""

    source: SourceSettings
    listen: HostPort
    http: HostPort
    insecure: bool
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    mark_interval: float = 10.0
    log_format: str = "text"
    log_level: str = "info"


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose the source; `agent --standalone` has them too."""
    source = parser.add_argument_group("source (default: the cluster that this runs in)")
    source.add_argument("--kubeconfig", metavar="FILE", type=readable_file)
    source.add_argument("--manifests", metavar="DIR", type=directory)
    # An apiserver sends a bookmark about each minute; half-open connections show within this time.
    source.add_argument("--watch-timeout", metavar="SECONDS", type=positive_seconds, default=90.0)


def source_settings(flags: argparse.Namespace) -> SourceSettings:
    """Read the source flags back. Raises UsageError when they contradict each other."""
    if flags.kubeconfig and flags.manifests:
        raise UsageError("--kubeconfig and --manifests exclude each other")
    return SourceSettings(
        kubeconfig=flags.kubeconfig, manifests=flags.manifests, watch_timeout=flags.watch_timeout
    )


def _parser() -> Parser:
    parser = Parser(prog="rulecast server", allow_abbrev=False)
    add_source_flags(parser)
    serve = parser.add_argument_group("serving")
    serve.add_argument("--listen", metavar="HOST:PORT", type=host_port, default="0.0.0.0:9443", help="gRPC")
    serve.add_argument(
        "--http", metavar="HOST:PORT", type=host_port, default="0.0.0.0:9440", help="health and metrics"
    )
    serve.add_argument("--tls-cert", metavar="FILE", type=readable_file)
    serve.add_argument("--tls-key", metavar="FILE", type=readable_file)
    serve.add_argument(
        "--client-ca", metavar="FILE", type=readable_file, help="verify agents against this CA"
    )
    serve.add_argument("--insecure", action="store_true", help="plain text, anyone may ask")
    serve.add_argument("--mark-interval", metavar="SECONDS", type=positive_seconds, default=10.0)
    logs = parser.add_argument_group("logs")
    logs.add_argument("--log-format", choices=("text", "json"), default="text")
    logs.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def parse(argv: Sequence[str]) -> ServerSettings:
    """Parse a command line. Raises UsageError."""
    flags = _parser().parse_args(argv)
    tls = (flags.tls_cert, flags.tls_key, flags.client_ca)
    if flags.insecure and any(tls):
        raise UsageError("--insecure excludes --tls-cert, --tls-key and --client-ca")
    if not flags.insecure and not all(tls):
        raise UsageError("--tls-cert, --tls-key and --client-ca are required (or --insecure for plain text)")
    return ServerSettings(
        source=source_settings(flags),
        listen=flags.listen,
        http=flags.http,
        insecure=flags.insecure,
        tls_cert=flags.tls_cert,
        tls_key=flags.tls_key,
        client_ca=flags.client_ca,
        mark_interval=flags.mark_interval,
        log_format=flags.log_format,
        log_level=flags.log_level,
    )
