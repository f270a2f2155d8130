"""Certificates without cryptography, and a calendar."""

import base64
import json
from collections.abc import Sequence

from rulecast_server.certs.pki import Pair, certificates


class PaperPki:
    """A `Pki` whose certificates are JSON that says what they are."""

    def __init__(self) -> None:
        self.today = 0.0
        self.authorities = 0
        self.issued = 0

    def new_authority(self, *, days: int) -> Pair:
        self.authorities += 1
        return self._pair(f"ca-{self.authorities}", "", days, ())

    def issue(self, authority: Pair, names: Sequence[str], *, days: int) -> Pair:
        self.issued += 1
        return self._pair(f"server-{self.issued}", _read(authority.cert)["subject"], days, names)

    def lasts(self, cert: str, *, days: float) -> bool:
        return bool(read := _read(cert)) and read["until"] - self.today > days

    def names(self, cert: str, names: Sequence[str]) -> bool:
        return set(names) <= set(_read(cert).get("names", ()))

    def fits(self, pair: Pair) -> bool:
        return bool(read := _read(pair.cert)) and pair.key == f"key of {read['subject']}"

    def verifies(self, cert: str, bundle: str) -> bool:
        known = {_read(each)["subject"] for each in certificates(bundle) if self.lasts(each, days=0)}
        return self.lasts(cert, days=0) and _read(cert)["issuer"] in known

    def _pair(self, subject: str, issuer: str, days: int, names: Sequence[str]) -> Pair:
        content = {"subject": subject, "issuer": issuer, "until": self.today + days, "names": list(names)}
        body = base64.b64encode(json.dumps(content).encode()).decode()
        cert = f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"
        return Pair(cert, f"key of {subject}")


def _read(cert: str) -> dict:
    try:
        return json.loads(base64.b64decode(cert.splitlines()[1]))
    except (ValueError, IndexError):
        return {}
