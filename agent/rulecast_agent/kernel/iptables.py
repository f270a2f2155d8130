"""Running iptables-restore and iptables-save of one backend and family."""

import ctypes
import enum
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rulecast.model import Family

_LOCK_SECONDS = 5
"""How long one run waits for the xtables lock; a run that did not get it is tried again."""
_HINTS = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
"""Chains of the mangle table by which kubelet shows its backend (KEP-3178)."""
_GET_INFO = 64
"""IPT_SO_GET_INFO and IP6T_SO_GET_INFO."""
_INFO = struct.Struct("=32sI5I5III")


class IptablesMissing(Exception):
    """iptables cannot be used at all; `str()` is one clear line."""


class IptablesRefused(Exception):
    """A transaction was refused and nothing of it holds; `str()` is what iptables said."""


class Backend(enum.StrEnum):
    """The two kernel interfaces under the command's name."""

    NFT = "nft"
    LEGACY = "legacy"


class Saved(NamedTuple):
    """A table as iptables-save tells it: rules by chain, without the leading `-A CHAIN`."""

    chains: dict[str, list[str]]


class Iptables:
    """The programs of one backend and family."""

    def __init__(self, *, backend: Backend, family: Family, timeout: float = 300.0) -> None:
        self.backend, self.family = backend, family
        self.commits = 0
        """Transactions so far, as far as no run was refused on its way."""
        self._stem = "iptables" if family is Family.IPV4 else "ip6tables"
        self._timeout = timeout

    def restore(self, sections: Iterable[str]) -> None:
        """Commit `*TABLE … COMMIT` sections in one run. One section is one transaction; other chains stay.

        Raises IptablesRefused when one is refused (those before it hold), IptablesMissing when it cannot run.
        """
        parts = list(sections)
        # The nft backend needs no lock and takes the flag for the sake of scripts.
        self._run("restore", "--noflush", "--wait", str(_LOCK_SECONDS), text="".join(parts))
        self.commits += len(parts)

    def save(self, table: str) -> Saved:
        """Read a table; with the legacy backend it is there from then on. Raises IptablesMissing."""
        try:
            text = self._run("save", "-t", table)
        except IptablesRefused as error:
            raise IptablesMissing(f"{self._command('save')}: {error}") from None
        chains: dict[str, list[str]] = {}
        for line in text.splitlines():
            if line.startswith(":"):
                chains[line[1:].split(" ", 1)[0]] = []
            elif line.startswith("-A "):
                _, name, rule = line.split(" ", 2)
                chains[name].append(rule)
        return Saved(chains)

    def peek(self, table: str) -> Saved:
        """Read a table; one that is not there stays away and is empty. Raises IptablesMissing.

        A legacy table that is asked for comes to be, with its hooks in every packet's way.
        """
        if self.backend is Backend.LEGACY:
            stem = "ip" if self.family is Family.IPV4 else "ip6"
            try:
                there = Path(f"/proc/thread-self/net/{stem}_tables_names").read_text().split()
            except OSError:
                # The kernel's part is not even loaded.
                there = []
            if table not in there:
                return Saved({})
        return self.save(table)

    def rules_of(self, table: str, chains: Iterable[str]) -> dict[str, list[str]]:
        """The rules of some chains; those that are not there are left out. Raises IptablesMissing."""
        if self.backend is Backend.LEGACY:
            # Whatever is asked, the whole table is read.
            held = self.save(table).chains
            return {chain: held[chain] for chain in chains if chain in held}
        found = {}
        for chain in chains:
            try:
                text = self._run("", "-t", table, "-S", chain)
            except IptablesRefused:
                continue
            found[chain] = [line.split(" ", 2)[2] for line in text.splitlines() if line.startswith("-A ")]
        return found

    def sizes(self, table: str) -> tuple[int, int]:
        """Legacy only: entries and bytes of a table, from the kernel without copying it. Raises OSError."""
        level = socket.IPPROTO_IP if self.family is Family.IPV4 else socket.IPPROTO_IPV6
        kind = socket.AF_INET if self.family is Family.IPV4 else socket.AF_INET6
        with socket.socket(kind, socket.SOCK_RAW, socket.IPPROTO_RAW) as handle:
            # The kernel reads the table's name from the buffer that it fills, which getsockopt() of Python
            # cannot give; see _get_info.
            return _get_info(handle.fileno(), level, table)

    def _command(self, action: str) -> str:
        return f"{self._stem}-{self.backend}" + (f"-{action}" if action else "")

    def _run(self, action: str, *arguments: str, text: str | None = None) -> str:
        command = self._command(action)
        try:
            done = subprocess.run(
                [command, *arguments],
                input=text,
                stdin=subprocess.DEVNULL if text is None else None,
                capture_output=True,
                text=True,
                timeout=self._timeout,
                check=False,
            )
        except OSError as error:
            raise IptablesMissing(f"cannot run {command}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise IptablesMissing(f"{command} did not finish in {self._timeout:g} s") from None
        if done.returncode == 0:
            return done.stdout
        words = _first_error(done.stderr)
        if done.returncode in (3, 4) or "ermission denied" in words or "do you need to insmod" in words:
            raise IptablesMissing(f"{command}: {words}")
        raise IptablesRefused(words)


def available(backend: Backend) -> bool:
    """The backend's programs are installed."""
    return shutil.which(f"iptables-{backend}-restore") is not None


def detect(*, ours: str) -> Backend:
    """The backend that this host uses: kubelet's, else the one with more rules, else nft.

    As the iptables-wrappers of Kubernetes' images do; rules with `ours` in them are not counted. Raises
    IptablesMissing when neither is installed.
    """
    there = [backend for backend in Backend if available(backend)]
    if not there:
        raise IptablesMissing("neither iptables-nft nor iptables-legacy is installed")
    if len(there) == 1:
        return there[0]
    counts = {}
    for backend in there:
        count = 0
        for family in Family:
            for table in ("mangle", "nat", "filter"):
                try:
                    chains = Iptables(backend=backend, family=family).peek(table).chains
                except IptablesMissing:
                    continue
                if any(hint in chains for hint in _HINTS):
                    return backend
                count += sum(
                    not (chain.startswith(ours) or ours in rule)
                    for chain, rules in chains.items()
                    for rule in rules
                )
        counts[backend] = count
    return Backend.LEGACY if counts[Backend.LEGACY] > counts[Backend.NFT] else Backend.NFT


def _first_error(text: str) -> str:
    """The first line that is not a warning, bounded."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return (lines[0] if lines else "it failed without a word")[:300]


def _get_info(descriptor: int, level: int, table: str) -> tuple[int, int]:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_INFO.pack(table.encode(), *[0] * 13), _INFO.size)
    size = ctypes.c_uint32(_INFO.size)
    if libc.getsockopt(descriptor, level, _GET_INFO, buffer, ctypes.byref(size)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"reading the sizes of the table {table}")
    *_, entries, length = _INFO.unpack(buffer.raw)
    return entries, length
