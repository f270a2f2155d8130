"""Measuring in the virtual machine what this kernel lacks: the same bench, inside."""

import json
from pathlib import Path

from tests.vm import machine

_BEGIN = "bench results: "


def has_ipvs() -> bool:
    """This kernel has IPVS itself."""
    return Path("/proc/net/ip_vs").exists()


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
