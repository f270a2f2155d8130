"""TLS of the server: certificate, key and the agents' CA, read again when the files change."""

import logging
import ssl
from pathlib import Path
from typing import NamedTuple

import grpc

from rulecast.errors import UsageError

_log = logging.getLogger(__name__)


class TlsFiles(NamedTuple):
    """PEM files. Whoever connects must show a certificate that `client_ca` signed, where there is one."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class ReloadingCredentials:
    """Server credentials that follow their files.

    gRPC asks before each handshake; files are only read when one of them is another than before. A set that
    does not fit together, as half-way through a rotation, is not used: the last good one stays.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises UsageError when the files cannot be used."""
        self._files = files
        self._seen = self._stamp()
        self.reloads = 0
        self.error = ""
        """Why the files of this moment are not in use; empty when they are."""
        try:
            initial = self._read()
        except (OSError, ssl.SSLError, ValueError) as error:
            raise UsageError(f"TLS files {self._names()}: {_reason(error)}") from None
        self.credentials = grpc.dynamic_ssl_server_credentials(
            initial,
            self._fetch,  # type: ignore[arg-type]  # None is allowed, which the stubs do not know
            require_client_authentication=files.client_ca is not None,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC on a thread of its own for each new connection. None: no change."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            configuration = self._read()
        except (OSError, ssl.SSLError, ValueError) as error:
            self.error = f"TLS files {self._names()}: {_reason(error)}"
            _log.error("%s; going on with the last good ones", self.error)
            return None
        self.error = ""
        self.reloads += 1
        _log.info("TLS files read again")
        return configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        # gRPC would take anything here and fail at handshakes; OpenSSL tells now.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.cert, self._files.key)
        client_ca = self._files.client_ca
        if client_ca is not None:
            context.load_verify_locations(client_ca)
        return grpc.ssl_server_certificate_configuration(
            [(self._files.key.read_bytes(), self._files.cert.read_bytes())],
            client_ca.read_bytes() if client_ca is not None else None,
        )

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp_of(path) for path in self._files if path is not None)

    def _names(self) -> str:
        return ", ".join(str(path) for path in self._files if path is not None)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a matching certificate and key, or not a CA ({error.reason or error})"
    return getattr(error, "strerror", None) or str(error)
