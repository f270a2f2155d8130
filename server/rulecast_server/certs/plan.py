"""What is missing of authority, bundle and server certificate, and in which order it has to be made.

Agents trust a bundle of authorities. A new authority is in the bundle before anything is signed by it, and
the old one stays there until it runs out: so no agent ever meets a server that it cannot verify.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rulecast_server.certs.pki import Pair, certificates


class Pki(Protocol):
    """See `Openssl`."""

    def new_authority(self, *, days: int) -> Pair: ...
    def issue(self, authority: Pair, names: Sequence[str], *, days: int) -> Pair: ...
    def lasts(self, cert: str, *, days: float) -> bool: ...
    def names(self, cert: str, names: Sequence[str]) -> bool: ...
    def fits(self, pair: Pair) -> bool: ...
    def verifies(self, cert: str, bundle: str) -> bool: ...


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """For whom, and for how long. Days."""

    names: tuple[str, ...]
    days: int = 90
    renew: int = 30
    """Left when a new certificate is made."""
    authority_days: int = 3650
    authority_renew: int = 365
    """Left when a new authority is made: more than a certificate lives, so that one never outlives its
    authority."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What there is. Parts that cannot be read are as if they were not there."""

    authority: Pair | None = None
    bundle: str = ""
    server: Pair | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One part to be replaced: exactly one is set."""

    authority: Pair | None = None
    bundle: str | None = None
    server: Pair | None = None
    why: str = ""


def next_step(held: Held, terms: Terms, pki: Pki) -> Step | None:
    """What to write next; None when all is well. To be asked again with what is held after that."""
    authority = held.authority
    if authority is not None and not (pki.fits(authority) and pki.lasts(authority.cert, days=0)):
        authority = None
    why = _server_due(held, terms, pki)
    known = certificates(held.bundle)
    if authority is not None and why and authority.cert in known:
        # Also when the authority is about to be replaced: the agents know this one.
        return Step(server=pki.issue(authority, terms.names, days=terms.days), why=why)
    if authority is None or (
        not pki.lasts(authority.cert, days=terms.authority_renew) and authority.cert in known
    ):
        reason = "no authority yet" if held.authority is None else "the authority runs out or is damaged"
        return Step(authority=pki.new_authority(days=terms.authority_days), why=reason)
    wanted = "".join(
        [authority.cert, *(each for each in known if each != authority.cert and pki.lasts(each, days=0))]
    )
    if held.bundle != wanted:
        return Step(bundle=wanted, why="the authorities changed")
    return None


def _server_due(held: Held, terms: Terms, pki: Pki) -> str:
    """Why a new server certificate is needed; empty when the one that is held will do."""
    server = held.server
    if server is None:
        return "no server certificate yet"
    if not pki.fits(server):
        return "the server's key is not that of its certificate"
    if not pki.names(server.cert, terms.names):
        return "the server certificate lacks a name"
    if not pki.lasts(server.cert, days=terms.renew):
        return f"the server certificate runs out in less than {terms.renew} days"
    if not pki.verifies(server.cert, held.bundle):
        return "no known authority has signed the server certificate"
    return ""
