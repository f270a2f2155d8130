"""Certificates by the `openssl` program: 3.0 or newer, as images of Debian have it."""

import re
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rulecast.errors import UsageError

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+-----END CERTIFICATE-----\n?")
_DAY = 86400
_EC = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
_CA_EXTENSIONS = """[req]
distinguished_name = none
[none]
[x]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_SERVER_EXTENSIONS = """basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {}
"""


class Pair(NamedTuple):
    """A certificate and its key, PEM. The key is a secret."""

    cert: str
    key: str

    def __repr__(self) -> str:
        return "Pair(...)"


def certificates(bundle: str) -> list[str]:
    """The certificates in a PEM text, each once, in order."""
    return list(dict.fromkeys(each.rstrip("\n") + "\n" for each in _PEM.findall(bundle)))


class Openssl:
    """Makes and judges certificates. Blocking; keys are on disk only in a private temporary directory."""

    def __init__(self, program: str = "openssl") -> None:
        self._program = program

    def new_authority(self, *, days: int) -> Pair:
        """A self-signed authority. Raises UsageError without a usable openssl."""
        with _directory() as directory:
            key = self._run(["genpkey", *_EC])
            config = _file(directory, "conf", _CA_EXTENSIONS)
            # A name of its own: with two authorities in a bundle, verifiers must not take one for the other.
            subject = f"/CN=rulecast-ca-{secrets.token_hex(4)}"
            arguments = ["req", "-x509", "-new", "-config", config, "-extensions", "x", "-subj", subject]
            arguments += ["-key", _file(directory, "key", key), "-days", str(days)]
            return Pair(self._run(arguments), key)

    def issue(self, authority: Pair, names: Sequence[str], *, days: int) -> Pair:
        """A server's certificate for DNS names. Raises UsageError without a usable openssl."""
        with _directory() as directory:
            key = self._run(["genpkey", *_EC])
            key_file = _file(directory, "key", key)
            config = _file(directory, "conf", "[req]\ndistinguished_name = none\n[none]\n")
            request = self._run(
                ["req", "-new", "-config", config, "-subj", "/CN=rulecast-server", "-key", key_file]
            )
            extensions = _SERVER_EXTENSIONS.format(", ".join(f"DNS:{name}" for name in names))
            arguments = ["x509", "-req", "-in", _file(directory, "csr", request), "-days", str(days)]
            arguments += ["-CA", _file(directory, "ca", authority.cert), "-set_serial", _serial()]
            arguments += ["-CAkey", _file(directory, "ca-key", authority.key)]
            arguments += ["-extfile", _file(directory, "ext", extensions)]
            return Pair(self._run(arguments), key)

    def lasts(self, cert: str, *, days: float) -> bool:
        """Whether a certificate is one, and good for so long from now."""
        return self._holds(["x509", "-noout", "-checkend", str(int(days * _DAY))], cert)

    def names(self, cert: str, names: Sequence[str]) -> bool:
        """Whether a certificate is for all of these names."""
        try:
            shown = self._run(["x509", "-noout", "-ext", "subjectAltName"], cert)
        except UsageError:
            return False
        return {f"DNS:{name}" for name in names} <= {part.strip() for part in re.split(r"[,\n]", shown)}

    def fits(self, pair: Pair) -> bool:
        """Whether the key is that of the certificate."""
        try:
            public = self._run(["pkey", "-pubout"], pair.key)
            return public == self._run(["x509", "-noout", "-pubkey"], pair.cert)
        except UsageError:
            return False

    def verifies(self, cert: str, bundle: str) -> bool:
        """Whether one of the authorities in a bundle has signed a certificate, and both are valid now."""
        if not certificates(bundle):
            return False
        with _directory() as directory:
            arguments = ["verify", "-no-CApath", "-no-CAstore", "-purpose", "sslserver"]
            return self._holds([*arguments, "-CAfile", _file(directory, "bundle", bundle)], cert)

    def _holds(self, arguments: Sequence[str], text: str) -> bool:
        try:
            self._run(arguments, text)
        except UsageError:
            return False
        return True

    def _run(self, arguments: Sequence[str], text: str = "") -> str:
        try:
            done = subprocess.run(
                [self._program, *arguments],
                input=text,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{self._program}: {getattr(error, 'strerror', None) or error}") from None
        if done.returncode:
            # openssl's messages name files and errors, never content.
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise UsageError(f"{self._program} {arguments[0]}: {lines[-1][:200]}")
        return done.stdout


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rulecast-certs-")


def _file(directory: str, name: str, content: str) -> str:
    path = Path(directory) / name
    path.touch(mode=0o600)
    path.write_text(content)
    return str(path)


def _serial() -> str:
    # RFC 5280 4.1.2.2: positive, at most 20 octets.
    return f"0x{secrets.randbits(152) | 1:x}"
