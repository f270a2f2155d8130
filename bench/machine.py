"""Measuring in the virtual machine what this kernel lacks: the same bench, inside."""

import json
from pathlib import Path

from tests.vm import machine

_BEGIN = "bench results: "
_MAPS = 1_000_000
"""User Mode Linux maps each page of its processes by itself: what 50,000 services take."""


def has_ipvs() -> bool:
    """This kernel has IPVS itself."""
    return Path("/proc/net/ip_vs").exists()


def limit() -> int:
    """How many services this host lets a virtual machine have, by its vm.max_map_count."""
    allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    return 50_000 if allowed >= _MAPS else 10_000


def measure(part: str, mode: str, size: int, *, changes: int) -> dict[str, dict[str, float]]:
    """One column, in a kernel that has just booted. Raises machine.Unavailable."""
    arguments = f"{part} --modes {mode} --sizes {size} --changes {changes} --json"
    result = machine.run(f".venv/bin/python -m bench {arguments}", timeout=900)
    lines = [line for line in result.output.splitlines() if line.startswith(_BEGIN)]
    if result.code or not lines:
        raise RuntimeError(
            f"the bench in the virtual machine ended with {result.code}:\n{result.output[-3000:]}"
        )
    columns: dict[str, dict[str, float]] = json.loads(lines[0].removeprefix(_BEGIN))
    return columns


def tell(columns: dict[str, dict[str, float]]) -> None:
    """The other end of `measure`."""
    print(_BEGIN + json.dumps(columns), flush=True)
