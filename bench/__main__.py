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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.vm.machine import Unavailable

from bench import budgets, fanout, kernel, line, machine, modes, wire
from rulecast.log import configure

_RESULTS = Path(__file__).parent / "results"
_INSIDE = "RULECAST_BENCH_NAMESPACE"
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
    parser.add_argument(
        "--modes",
        type=_modes,
        default=tuple(modes.MODES),
        metavar="MODE,…",
        help=f"of {', '.join(modes.MODES)}",
    )
    parser.add_argument("--agents", type=_numbers, default=(200, 1000), metavar="N,…")
    parser.add_argument("--changes", type=int, default=100, help="single changes to time at each size")
    parser.add_argument("--seconds", type=_amount, default=20.0, help="of changes to many agents")
    parser.add_argument("--rate", type=_amount, default=100.0, help="changes a second to many agents")
    parser.add_argument("--services", type=_number, default=10_000, help="of the server with many agents")
    parser.add_argument("--save", action="store_true", help="write bench/results/PART.json")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
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
        if flags.json:
            machine.tell(columns)
            continue
        _print(name, columns)
        print("\n".join(budgets.lines(name, columns)), flush=True)
        if flags.save:
            _write(name, columns, load)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_number, text.split(",")))


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"not a number from 1: {text}")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"not a number above 0: {text}")
    return value


def _modes(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [mode for mode in chosen if mode not in modes.MODES]:
        raise argparse.ArgumentTypeError(f"no such mode: {', '.join(unknown)}")
    return chosen


def _wire(flags: argparse.Namespace, _work: Path) -> dict[str, Row]:
    return {f"{size} x 10": wire.measure(size, endpoints=10) for size in flags.sizes}


def _kernel(flags: argparse.Namespace, _work: Path) -> dict[str, Row]:
    def measure(mode: str, sizes: Sequence[int]) -> dict[str, Row]:
        return {f"{mode} {size}": kernel.measure(mode, size, endpoints=3) for size in sizes}

    return _of_modes("kernel", flags, measure, [mode for mode in flags.modes if mode in kernel.MODES])


def _line(flags: argparse.Namespace, work: Path) -> dict[str, Row]:
    def measure(mode: str, sizes: Sequence[int]) -> dict[str, Row]:
        return {
            f"{mode} {size}": line.measure(mode, size, endpoints=3, changes=flags.changes, work=work)
            for size in sizes
        }

    columns = _of_modes("line", flags, measure, flags.modes)
    for head, row in columns.items():
        mode, _, size = head.partition(" ")
        smallest = columns.get(f"{mode} {flags.sizes[0]}", {})
        for name in ("connect p50 us", "connect p99 us", "change p50"):
            if name in row and name in smallest and int(size) != flags.sizes[0]:
                row[f"{name}, ratio to {flags.sizes[0]}"] = row[name] / smallest[name]
        theirs = columns.get(f"kube-proxy-{head}", {})
        for name in ("agent spawn to answering", "change p50", "agent CPU a change", "connect p50 us"):
            if name in row and name in theirs:
                row[f"{name}, kube-proxy's to ours"] = theirs[name] / row[name]
    return columns


def _of_modes(
    part: str,
    flags: argparse.Namespace,
    measure: Callable[[str, Sequence[int]], dict[str, Row]],
    chosen: Sequence[str],
) -> dict[str, Row]:
    """The columns of each mode that can be measured here; why another cannot is said."""
    found: dict[str, Row] = {}
    for mode in chosen:
        sizes = [size for size in flags.sizes if size <= modes.MODES[mode].limit]
        if not modes.MODES[mode].ours and modes.kube_proxy() is None:
            print(f"{part}: no {mode}: not built (make conformance builds it)", flush=True)
        elif mode == "ipvs" and not machine.has_ipvs():
            try:
                for size in sizes:
                    if size > machine.limit():
                        print(
                            f"{part}: no {mode} {size}: vm.max_map_count is too low for it here", flush=True
                        )
                        continue
                    found |= machine.measure(part, mode, size, changes=flags.changes)
            except Unavailable as error:
                print(f"{part}: no {mode}: {error}", flush=True)
        else:
            found |= measure(mode, sizes)
    return found


def _fanout(flags: argparse.Namespace, work: Path) -> dict[str, Row]:
    found: dict[str, Row] = {
        f"{count} agents": fanout.measure(
            count, services=flags.services, endpoints=10, rate=flags.rate, seconds=flags.seconds, work=work
        )
        for count in flags.agents
    }
    return found


def _print(name: str, columns: Mapping[str, Row]) -> None:
    """A table for each mode: all side by side would be too wide to read."""
    groups: dict[str, dict[str, Row]] = {}
    for head, column in columns.items():
        mode = head.partition(" ")[0]
        groups.setdefault(mode if mode in modes.MODES else "", {})[head] = column
    for group in groups.values():
        rows = list(dict.fromkeys(row for column in group.values() for row in column))
        width = max(map(len, rows)) if rows else 0
        print(f"\n{name:<{width}}{''.join(f'{head:>34}' for head in group)}")
        for row in rows:
            cells = (f"{column[row]:>34,.2f}" if row in column else f"{'':>34}" for column in group.values())
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
        **(fanout.summary(list(columns.values())[-1]) if name == "fanout" else {}),
        "results": {head: {row: round(value, 3) for row, value in c.items()} for head, c in columns.items()},
    }
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
