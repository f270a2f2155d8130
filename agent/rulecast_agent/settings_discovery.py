"""The flags by which an agent finds its servers in a cluster."""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rulecast.errors import UsageError
from rulecast.flags import HostPort, host_port

_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class DiscoverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to ask for the servers' addresses."""

    namespace: str
    service: str
    """A headless Service of the servers."""
    apiservers: tuple[HostPort, ...]
    """Addresses that work without any Service: what we program cannot be needed to begin."""
    credentials: Path
    """Directory with `token` and `ca.crt`, as kubelet mounts it."""

    @property
    def server_name(self) -> str:
        """The name in the servers' certificate, whatever their addresses."""
        return f"{self.service}.{self.namespace}.svc"


def add_discovery_flags(
    parser: argparse.ArgumentParser, *, servers: Callable[[str], tuple[HostPort, ...]]
) -> None:
    """Add them; `servers` parses a list of addresses."""
    add = parser.add_argument_group("finding the servers (instead of --server)").add_argument
    add(
        "--server-service",
        metavar="NAMESPACE/NAME",
        type=_service,
        help="headless Service whose EndpointSlices hold the servers' addresses",
    )
    add(
        "--apiserver",
        metavar="ADDR[,ADDR...]",
        type=servers,
        default=(),
        help="where to ask: not the address of a Service, which is what this agent makes work"
        " (default: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT)",
    )
    add(
        "--apiserver-credentials",
        metavar="DIR",
        type=Path,
        default=Path(_SERVICE_ACCOUNT),
        help="directory with token and ca.crt (default: the pod's ServiceAccount)",
    )


def discovery_settings(
    flags: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[DiscoverySettings | None, tuple[str, ...]]:
    """Read parsed flags; also gives warnings, a line each. Raises UsageError."""
    if flags.server_service is None:
        if flags.apiserver:
            raise UsageError("--apiserver has no use without --server-service")
        return None, ()
    for other in ("server", "standalone", "insecure"):
        if getattr(flags, other):
            raise UsageError(f"--server-service and --{other} exclude each other")
    namespace, service = flags.server_service
    settings = DiscoverySettings(
        namespace=namespace,
        service=service,
        apiservers=flags.apiserver or _from_environment(environment),
        credentials=flags.apiserver_credentials,
    )
    for name in ("token", "ca.crt"):
        path = settings.credentials / name
        try:
            path.open("rb").close()
        except OSError as error:
            raise UsageError(f"--apiserver-credentials: {path}: {error.strerror}") from None
    if flags.state_dir is None:
        return settings, ("no --state-dir: an agent that starts while no apiserver answers finds no server",)
    return settings, ()


def _from_environment(environment: Mapping[str, str]) -> tuple[HostPort, ...]:
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise UsageError("--server-service needs --apiserver, or KUBERNETES_SERVICE_HOST in the environment")
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    try:
        return (host_port(f"{host}:{port}"),)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT: {error}") from None


def _service(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not slash or not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME of a Service")
    return namespace, name
