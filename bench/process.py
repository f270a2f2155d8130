"""Processes under measurement."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

_TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """A Python module, or with `program` any program, run as a process and ended with the block."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        talk: bool = False,
        program: bool = False,
        environment: Mapping[str, str] | None = None,
        core: int | None = None,
    ) -> None:
        """`core`: the one processor that it may use."""
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        self.started = time.monotonic()
        self.became_ready = 0.0
        """Seconds from the start until `ready` saw it ready."""
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [*pinned, *(argv if program else [sys.executable, "-m", *argv])],
                env=environment,
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talk else output,
                stderr=output,
                text=True,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        self._popen.terminate()
        try:
            self._popen.wait(10)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()

    def say(self, text: str) -> None:
        """Write a line to its stdin."""
        pipe: IO[str] | None = self._popen.stdin
        assert pipe is not None
        pipe.write(text + "\n")
        pipe.flush()

    def hear(self) -> str:
        """Read a line of its stdout."""
        pipe = self._popen.stdout
        assert pipe is not None
        return pipe.readline().strip()

    def alive(self) -> bool:
        """It has not ended."""
        return self._popen.poll() is None

    def cpu(self) -> float:
        """Seconds of CPU so far, with those of commands that it ran and that ended."""
        fields = Path(f"/proc/{self._popen.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS

    def memory(self) -> tuple[float, float]:
        """Resident MB now, and at the most so far."""
        text = Path(f"/proc/{self._popen.pid}/status").read_text()
        found = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("VmRSS", "VmHWM")))
        now, most = (int(found[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
        return now, most

    def ready(self, url: str, *, within: float = 180.0) -> None:
        """Wait until `url` answers 200. Raises TimeoutError."""
        while time.monotonic() - self.started < within and self.alive():
            try:
                with urllib.request.urlopen(url, timeout=5):
                    self.became_ready = time.monotonic() - self.started
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.005)
        raise TimeoutError(f"{url} was not ready")


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
