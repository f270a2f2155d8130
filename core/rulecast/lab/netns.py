"""Network namespaces: made, entered by one thread, and reclaimed when the process that made them is gone."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

_RUN = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_NAME = re.compile(r"rulecast-(\d+)-(\d+)-.+")
_T = TypeVar("_T")


class LabError(Exception):
    """A lab cannot be built or used; `str()` says what failed, with the tool's own words."""


def unavailable() -> str | None:
    """Why this machine cannot hold a lab, as one line; None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"{owner_prefix()}probe"
    try:
        ip_batch([f"netns add {name}"])
        ip_batch([f"netns del {name}"])
    except LabError as error:
        return f"the kernel or its policy has no network namespaces for us: {error}"
    return None


def owner_prefix() -> str:
    """What the names of this process's namespaces begin with.

    The start time is part of it, so that a reused process id is not taken for the owner.
    """
    return f"rulecast-{os.getpid()}-{_start_time(os.getpid())}-"


def reclaim() -> list[str]:
    """End and delete what labs whose process is gone left behind; return the namespaces' names."""
    if not _RUN.is_dir():
        return []
    stale = []
    for path in _RUN.iterdir():
        owner = _NAME.fullmatch(path.name)
        if owner and _start_time(int(owner[1])) != owner[2]:
            stale.append(path.name)
    for name in stale:
        _end_processes(name)
    delete(stale)
    return stale


def _end_processes(name: str) -> None:
    """Kill what a dead lab's process left running in a namespace; a namespace lives on with its processes."""
    result = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in result.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def owned(prefix: str) -> list[str]:
    """The namespaces whose names begin so."""
    return [path.name for path in _RUN.iterdir() if path.name.startswith(prefix)] if _RUN.is_dir() else []


def delete(names: Iterable[str]) -> None:
    """Delete namespaces; those that are gone already are ignored. Raises LabError when one cannot be."""
    present = [name for name in names if (_RUN / name).exists()]
    while present:
        try:
            ip_batch([f"netns del {name}" for name in present])
        except LabError:
            # Another process may reclaim the same ones at the same time.
            left = [name for name in present if (_RUN / name).exists()]
            if left == present:
                raise
            present = left
        else:
            return


def ip_batch(commands: Sequence[str], *, namespace: str | None = None) -> None:
    """Run several `ip` commands in one process, inside a namespace or not. Raises LabError."""
    where = ["-n", namespace] if namespace else []
    result = subprocess.run(
        ["ip", *where, "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise LabError(f"ip {' '.join(where)}: {_why(result.stderr, commands)}")


class Namespace:
    """One named network namespace, as `ip netns` knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = os.open(_RUN / name, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of the handle; the namespace itself stays until it is deleted."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put the calling thread, and no other, into the namespace for the length of the block.

        A socket made inside stays in the namespace for its whole life, whichever thread uses it.
        """
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._switch(self._file)
            try:
                yield
            finally:
                self._switch(home)
        finally:
            os.close(home)

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function inside the namespace."""
        with self.entered():
            return function()

    def sysctl(self, **values: str | int) -> None:
        """Write settings under /proc/sys/net of the namespace; `__` in a name stands for a slash."""
        with self.entered():
            for name, value in values.items():
                (Path("/proc/sys/net") / name.replace("__", "/")).write_text(f"{value}\n")

    def socket(
        self, family: socket.AddressFamily, kind: socket.SocketKind, protocol: int = 0
    ) -> socket.socket:
        """A socket of the namespace."""
        with self.entered():
            return socket.socket(family, kind, protocol)

    def ip(self, *commands: str) -> None:
        """Run `ip` commands inside. Raises LabError."""
        ip_batch(commands, namespace=self.name)

    def run(self, *argv: str, text: str | None = None) -> str:
        """Run a command inside and return what it wrote. Raises LabError when it fails."""
        result = subprocess.run(
            ["ip", "netns", "exec", self.name, *argv], input=text, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise LabError(f"{argv[0]} in {self.name}: {result.stderr.strip() or result.returncode}")
        return result.stdout

    def popen(
        self, argv: Sequence[str], *, stdout: IO[bytes] | int, stderr: IO[bytes] | int
    ) -> subprocess.Popen[bytes]:
        """Start a long-running process inside, in a process group of its own (Ctrl-C is ours to handle)."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *argv],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def _switch(self, file: int) -> None:
        if self._libc.setns(file, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise LabError(f"setns {self.name}: {os.strerror(code)}")


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the start of a process; empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _why(stderr: str, commands: Sequence[str]) -> str:
    """The tool's complaint, with the command in place of `Command failed -:LINE`."""
    lines = stderr.strip().splitlines()
    failed = re.search(r"Command failed -:(\d+)", stderr)
    if failed and lines:
        return f"{commands[int(failed[1]) - 1]}: {lines[0]}"
    return "; ".join(lines) or "failed"
