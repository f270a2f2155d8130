"""The ServiceAccount token that says which node we are, read again when its file is replaced.

kubelet replaces a projected token when 80 % of its life is over, by renaming a directory.
"""

import asyncio
import logging
from pathlib import Path

from rulecast.errors import UsageError

_log = logging.getLogger(__name__)

_MAX_BYTES = 16 << 10
"""Servers take no more metadata."""


class TokenFile:
    """One file. The token is a secret: neither errors nor `repr` hold it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""
        self.problem = ""
        """Why the file is not in use now, in one line; the last good token is, if there was one."""

    def __repr__(self) -> str:
        return f"TokenFile({self._path})"

    async def read(self) -> str:
        """The token of this moment, or else the last good one. Raises UsageError when there never was one."""
        try:
            self._token = await asyncio.to_thread(self._read)
            self.problem = ""
        except UsageError as error:
            if not self._token:
                raise
            if not self.problem:
                _log.warning("%s; going on with the token that was there", error)
            self.problem = str(error)
        return self._token

    def check(self) -> None:
        """Raises UsageError when the file cannot be used."""
        self._read()

    def _read(self) -> str:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}") from None
        if len(content) > _MAX_BYTES:
            raise UsageError(f"{self._path}: larger than {_MAX_BYTES} bytes, which no token is")
        # RFC 6750 2.1 allows no more characters than these; whatever else would be a broken header.
        token = content.strip()
        if not token:
            raise UsageError(f"{self._path}: empty")
        if not all(byte in _CHARACTERS for byte in token):
            raise UsageError(f"{self._path}: not a token (characters that a bearer token cannot have)")
        return token.decode("ascii")


_CHARACTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~+/=")
