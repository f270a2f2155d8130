"""`python -m bench [PART…]`: measure, and print a table for each part; with --save as JSON too."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import fanout, kernel, line, wire
from rulecast.log import configure

_RESULTS = Path(__file__).parent / "results"
_INSIDE = "RULECAST_BENCH_NAMESPACE"
_IPTABLES_LIMIT = 10_000
"""Services beyond which a run of iptables is not worth its minutes."""
Row = dict[str, float]


def main() -> int:
    """Run what was asked for in a network namespace of its own."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parts: dict[str, Callable[[argparse.Namespace, Path], dict[str, Row]]] = {
        "wire": _wire,
        "kernel": _kernel,
        "line": _line,
        "fanout": _fanout,
    }
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all by default")
    parser.add_argument("--sizes", type=_numbers, default=(100, 1000, 10_000, 50_000), metavar="N,…")
    parser.add_argument("--modes", type=_modes, default=tuple(kernel.MODES), metavar="MODE,…")
    parser.add_argument("--agents", type=_numbers, default=(200, 1000), metavar="N,…")
    parser.add_argument("--changes", type=int, default=100, help="single changes to time at each size")
    parser.add_argument("--seconds", type=float, default=20.0, help="of changes to many agents")
    parser.add_argument("--save", action="store_true", help="write bench/results/PART.json")
    flags = parser.parse_args()
    if unknown := [name for name in flags.parts if name not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}")
    if os.geteuid() != 0:
        parser.error("needs root: for a network namespace and its rules")
    if _INSIDE not in os.environ:
        unshare = shutil.which("unshare")
        if unshare is None:
            parser.error("needs unshare, of util-linux")
        os.environ[_INSIDE] = "1"
        os.execv(unshare, [unshare, "-n", sys.executable, "-m", "bench", *sys.argv[1:]])
    line.prepare_namespace()
    configure(output="text", level="warning")
    for name in flags.parts or parts:
        with tempfile.TemporaryDirectory() as directory:
            load = os.getloadavg()[0]
            columns = parts[name](flags, Path(directory))
        _print(name, columns)
        if flags.save:
            _write(name, columns, load)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    if unknown := [mode for mode in modes if mode not in kernel.MODES]:
        raise argparse.ArgumentTypeError(f"no such mode: {', '.join(unknown)}")
    return modes


def _wire(flags: argparse.Namespace, _work: Path) -> dict[str, Row]:
    return {f"{size} x 10": wire.measure(size, endpoints=10) for size in flags.sizes}


def _kernel(flags: argparse.Namespace, _work: Path) -> dict[str, Row]:
    return {
        f"{mode} {size}": kernel.measure(mode, size, endpoints=3)
        for mode in flags.modes
        for size in flags.sizes
        if mode == "nftables" or size <= _IPTABLES_LIMIT
    }


def _line(flags: argparse.Namespace, work: Path) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for mode in flags.modes:
        smallest: Row = {}
        for size in flags.sizes:
            if mode != "nftables" and size > _IPTABLES_LIMIT:
                continue
            row = line.measure(mode, size, endpoints=3, changes=flags.changes, work=work)
            smallest = smallest or row
            for name in ("connect p50 us", "change p50"):
                if name in row:
                    row[f"{name}, ratio to {flags.sizes[0]}"] = row[name] / smallest[name]
            found[f"{mode} {size}"] = row
    return found


def _fanout(flags: argparse.Namespace, work: Path) -> dict[str, Row]:
    found: dict[str, Row] = {
        f"{count} agents": fanout.measure(
            count, services=10_000, endpoints=10, seconds=flags.seconds, work=work
        )
        for count in flags.agents
    }
    return found


def _print(name: str, columns: Mapping[str, Row]) -> None:
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    width = max(map(len, rows))
    heads = [f"{head:>22}" for head in columns]
    print(f"\n{name:<{width}}{''.join(heads)}")
    for row in rows:
        cells = (f"{column[row]:>22,.2f}" if row in column else f"{'':>22}" for column in columns.values())
        print(f"{row:<{width}}{''.join(cells)}", flush=True)


def _write(name: str, columns: Mapping[str, Row], load: float) -> None:
    nft = subprocess.run(["nft", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    document = {
        "part": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": os.cpu_count(),
        "load before": load,
        "python": platform.python_version(),
        "kernel": platform.release().partition("-")[0],
        "nft": nft,
        "units": "ms, and MB of memory, unless the name says another (B: bytes)",
        "results": {head: {row: round(value, 3) for row, value in c.items()} for head, c in columns.items()},
    }
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
