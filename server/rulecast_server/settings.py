"""The server's flags as one frozen value."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rulecast.errors import UsageError
from rulecast.flags import HostPort, Parser, directory, host_port, positive_seconds, readable_file

# DNS labels and subdomains, as Kubernetes names namespaces and ServiceAccounts.
_ACCOUNT = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where Services, EndpointSlices and Nodes come from. Neither set: the cluster that we run in."""

    kubeconfig: Path | None = None
    manifests: Path | None = None
    watch_timeout: float = 90.0
    """Seconds without a byte after which a watch counts as dead."""


class AccessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who is let in, and how much one peer may take. Seconds. Without effect on who is let in: --insecure."""

    agent_auth: str = "cert"
    """cert: the client certificate names the node. token: a ServiceAccount token is bound to it."""
    audience: str = "rulecast"
    """Of tokens."""
    agent_accounts: tuple[str, ...] = ("rulecast/rulecast-agent",)
    """ServiceAccounts of agents, NAMESPACE/NAME."""
    token_fresh: float = 120.0
    token_grace: float = 600.0
    inspect_groups: tuple[str, ...] = ("rulecast:inspectors",)
    streams_per_node: int = 8
    streams_per_connection: int = 100
    unread: float = 60.0
    max_connection_age: float | None = None


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All of `rulecast server`."""

    source: SourceSettings
    listen: HostPort
    http: HostPort
    insecure: bool
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    access: AccessSettings = AccessSettings()
    mark_interval: float = 10.0
    log_format: str = "text"
    log_level: str = "info"


def _mark_interval(text: str) -> float:
    if (seconds := positive_seconds(text)) > 60:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 60 seconds")
    return seconds


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose the source; `agent --standalone` has them too."""
    source = parser.add_argument_group("source (default: the cluster that this runs in)")
    source.add_argument("--kubeconfig", metavar="FILE", type=readable_file)
    source.add_argument("--manifests", metavar="DIR", type=directory)
    # An apiserver sends a bookmark about each minute; half-open connections show within this time.
    source.add_argument(
        "--watch-timeout",
        metavar="SECONDS",
        type=positive_seconds,
        default=90.0,
        help="without a byte after which a watch is abandoned",
    )


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
        "--client-ca", metavar="FILE", type=readable_file, help="who connects must show a certificate of it"
    )
    serve.add_argument("--insecure", action="store_true", help="plain text, anyone may ask")
    serve.add_argument(
        "--mark-interval",
        metavar="SECONDS",
        type=_mark_interval,
        default=10.0,
        help="an agent hears from us at least so often (at most 60)",
    )
    _add_access_flags(parser)
    logs = parser.add_argument_group("logs")
    logs.add_argument("--log-format", choices=("text", "json"), default="text")
    logs.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _add_access_flags(parser: Parser) -> None:
    add = parser.add_argument_group("access").add_argument
    add(
        "--agent-auth",
        choices=("cert", "token"),
        default="cert",
        help="agents are their certificate's node, or the node that their ServiceAccount token is bound to",
    )
    add(
        "--token-audience",
        metavar="NAME",
        type=_word,
        default="rulecast",
    )
    add(
        "--agent-service-account",
        metavar="NAMESPACE/NAME[,...]",
        type=_accounts,
        default="rulecast/rulecast-agent",
        help="whose tokens are agents' (default rulecast/rulecast-agent)",
    )
    add(
        "--token-max-age",
        metavar="SECONDS",
        type=positive_seconds,
        default=120.0,
        help="review tokens again after this; a revoked one is of use no longer (default 120)",
    )
    add(
        "--token-grace",
        metavar="SECONDS",
        type=positive_seconds,
        default=600.0,
        help="known tokens stay good without an answer of the apiserver (default 600)",
    )
    add(
        "--inspect-group",
        metavar="GROUP[,...]",
        type=_words,
        default="rulecast:inspectors",
        help="organizations (O) whose certificates may inspect, with --agent-auth cert",
    )
    add("--max-streams-per-node", metavar="N", type=_count, default=8)
    add(
        "--max-streams-per-connection",
        metavar="N",
        type=_count,
        default=100,
        help="more where a proxy merges agents' connections",
    )
    add(
        "--max-unread",
        metavar="SECONDS",
        type=positive_seconds,
        default=60.0,
        help="cut an agent that takes nothing for so long (default 60)",
    )
    add(
        "--max-connection-age",
        metavar="SECONDS",
        type=positive_seconds,
        help="end connections of this age, for new certificates to count and new replicas to get agents",
    )


def _words(text: str) -> tuple[str, ...]:
    words = tuple(part.strip() for part in text.split(","))
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty part")
    return words


def _word(text: str) -> str:
    if not text or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


def _accounts(text: str) -> tuple[str, ...]:
    accounts = _words(text)
    for account in accounts:
        if not _ACCOUNT.fullmatch(account):
            raise argparse.ArgumentTypeError(f"{account!r} is not NAMESPACE/NAME of a ServiceAccount")
    return accounts


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _access(flags: argparse.Namespace) -> AccessSettings:
    tls = (flags.tls_cert, flags.tls_key)
    if flags.insecure:
        if any((*tls, flags.client_ca)):
            raise UsageError("--insecure excludes --tls-cert, --tls-key and --client-ca")
        if flags.agent_auth == "token":
            raise UsageError("--insecure excludes --agent-auth token: tokens are secrets")
    elif flags.agent_auth == "token":
        if not all(tls):
            raise UsageError("--tls-cert and --tls-key are required with --agent-auth token")
        if flags.manifests:
            raise UsageError("--agent-auth token asks an apiserver, which --manifests has not")
    elif not all((*tls, flags.client_ca)):
        raise UsageError("--tls-cert, --tls-key and --client-ca are required (or --insecure for plain text)")
    return AccessSettings(
        agent_auth=flags.agent_auth,
        audience=flags.token_audience,
        agent_accounts=flags.agent_service_account,
        token_fresh=flags.token_max_age,
        token_grace=flags.token_grace,
        inspect_groups=flags.inspect_group,
        streams_per_node=flags.max_streams_per_node,
        streams_per_connection=flags.max_streams_per_connection,
        unread=flags.max_unread,
        max_connection_age=flags.max_connection_age,
    )


def parse(argv: Sequence[str]) -> ServerSettings:
    """Parse a command line. Raises UsageError."""
    flags = _parser().parse_args(argv)
    access = _access(flags)
    return ServerSettings(
        source=source_settings(flags),
        listen=flags.listen,
        http=flags.http,
        insecure=flags.insecure,
        tls_cert=flags.tls_cert,
        tls_key=flags.tls_key,
        client_ca=flags.client_ca,
        access=access,
        mark_interval=flags.mark_interval,
        log_format=flags.log_format,
        log_level=flags.log_level,
    )
