"""`rulecast certs`: make what is missing, renew what runs out, and end."""

import argparse
import asyncio
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rulecast import log
from rulecast.errors import UsageError
from rulecast.flags import Parser, readable_file
from rulecast_server.certs.pki import Openssl
from rulecast_server.certs.places import ChangedError, ClusterPlace, DirectoryPlace, Names, Place
from rulecast_server.certs.plan import Pki, Terms, next_step

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9*]([-.a-z0-9]{0,251}[a-z0-9])?")
_ROUNDS = 20
"""Steps and retries; three steps are the most that one run needs."""


class CertsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All of `rulecast certs`."""

    terms: Terms
    directory: Path | None = None
    """None: objects of the cluster that we run in, or that the kubeconfig names."""
    kubeconfig: Path | None = None
    names: Names
    log_format: str = "text"


def _parser() -> Parser:
    parser = Parser(
        prog="rulecast certs",
        allow_abbrev=False,
        description="An authority and a server certificate, in a cluster's objects or in files.",
    )
    add = parser.add_argument
    add("--dir", metavar="DIR", type=Path, help="files here, instead of objects of the cluster")
    add("--kubeconfig", metavar="FILE", type=readable_file)
    add("--namespace", metavar="NAME", type=_name, default="rulecast")
    add("--service", metavar="NAME", type=_name, default="rulecast-server", help="of the servers")
    add("--name", metavar="DNS", type=_name, action="append", default=[], help="one more name of the servers")
    add("--days", metavar="N", type=_days, default=90, help="that a server certificate lives")
    add("--renew", metavar="N", type=_days, default=30, help="renew a server certificate with less days left")
    add("--authority-days", metavar="N", type=_days, default=3650)
    add("--authority-renew", metavar="N", type=_days, default=365)
    add("--log-format", choices=("text", "json"), default="text")
    return parser


def parse(argv: Sequence[str]) -> CertsSettings:
    """Parse a command line. Raises UsageError."""
    flags = _parser().parse_args(argv)
    if flags.dir and flags.kubeconfig:
        raise UsageError("--dir and --kubeconfig exclude each other")
    if not flags.renew < flags.days < flags.authority_renew < flags.authority_days:
        raise UsageError(
            "--renew, --days, --authority-renew and --authority-days must each be more than the last"
        )
    full = f"{flags.service}.{flags.namespace}.svc"
    names = dict.fromkeys([full, f"{full}.cluster.local", "localhost", *flags.name])
    return CertsSettings(
        terms=Terms(
            names=tuple(names),
            days=flags.days,
            renew=flags.renew,
            authority_days=flags.authority_days,
            authority_renew=flags.authority_renew,
        ),
        directory=flags.dir,
        kubeconfig=flags.kubeconfig,
        names=Names(namespace=flags.namespace),
        log_format=flags.log_format,
    )


def main(argv: Sequence[str]) -> int:
    """Run once. Raises UsageError for bad input and for what cannot be done."""
    settings = parse(argv)
    log.configure(output=settings.log_format, level="info")
    return asyncio.run(_run(settings))


async def _run(settings: CertsSettings) -> int:
    if settings.directory is not None:
        await complete(DirectoryPlace(settings.directory), settings.terms, Openssl())
        return 0
    from rulecast_server.kube.auth import in_cluster_loader, kubeconfig_loader
    from rulecast_server.kube.client import ApiClient

    loader = kubeconfig_loader(settings.kubeconfig) if settings.kubeconfig else in_cluster_loader()
    client = await ApiClient.connect(loader)
    try:
        await complete(ClusterPlace(client, settings.names), settings.terms, Openssl())
    finally:
        await client.close()
    return 0


async def complete(place: Place, terms: Terms, pki: Pki) -> int:
    """Write until nothing is missing; returns the number of parts written.

    After each one, all is read again: two that run at once end up with the same. Raises UsageError.
    """
    written = 0
    for _ in range(_ROUNDS):
        step = next_step(await place.read(), terms, pki)
        if step is None:
            _log.info("certificates: %s", f"{written} parts written" if written else "nothing to do")
            return written
        part = next(name for name in ("authority", "bundle", "server") if getattr(step, name) is not None)
        try:
            await place.write(step)
        except ChangedError:
            _log.info("%s: somebody else wrote it", part)
            continue
        written += 1
        _log.info("%s written: %s", part, step.why)
    raise UsageError("others keep changing the certificates; giving up")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a DNS name")
    return text


def _days(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 36500):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return int(text)
