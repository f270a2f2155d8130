"""Running nft: rule text goes in on stdin, its words come back."""

import subprocess
from typing import Protocol


class NftMissing(Exception):
    """nft cannot be used at all; `str()` is one clear line."""


class NftRefused(Exception):
    """The transaction was refused as a whole and nothing of it holds; `str()` is what nft said."""


class Execer(Protocol):
    """Commits nft scripts. One script is one kernel transaction."""

    def run(self, script: str, *, check: bool = False) -> None:
        """Commit `script`; with `check` only try it.

        Raises NftRefused when the kernel or the parser refuses it, NftMissing when nft cannot be run.
        """
        ...


class NftCommand:
    """The real nft, found on PATH.

    CPython starts it with vfork, so that the size of this process does not matter.
    """

    def __init__(self, *, command: str = "nft", timeout: float = 120.0) -> None:
        self._command = command
        self._timeout = timeout

    def run(self, script: str, *, check: bool = False) -> None:
        """See `Execer.run`; a run longer than the timeout counts as missing."""
        arguments = [self._command, *(("-c",) if check else ()), "-f", "-"]
        try:
            done = subprocess.run(
                arguments, input=script.encode(), capture_output=True, timeout=self._timeout, check=False
            )
        except OSError as error:
            raise NftMissing(f"cannot run {self._command}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise NftMissing(f"{self._command} did not finish in {self._timeout:g} s") from error
        if done.returncode == 0:
            return
        words = _first_error(done.stderr.decode(errors="replace"))
        if "Operation not permitted" in words:
            raise NftMissing(f"{self._command}: {words}")
        raise NftRefused(words)


def _first_error(text: str) -> str:
    """The first line of nft's complaint, bounded: a refused script may name thousands of lines."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "nft failed without a word")[
        :300
    ]
