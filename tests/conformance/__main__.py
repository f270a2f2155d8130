"""`python -m tests.conformance --kube-proxy BINARY`: random scenarios, judged by the real kube-proxy.

Exit codes: 0 both sides always agreed, 1 they did not, 2 the machine cannot do it.
"""

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rulecast.lab import unavailable
from rulecast.model import Protocol
from tests.conformance.generate import SERVICES, STEPS
from tests.conformance.lane import Setup
from tests.conformance.lanes import reports
from tests.conformance.twins import JUDGES, MODES

_NEWS = 50
_LANES = 6
"""Pairs of labs at once: mostly they wait for kube-proxy and for packets that nobody answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Play, report as it comes, and sum up."""
    flags = _flags(argv)
    if reason := unavailable():
        print(f"conformance: {reason}", file=sys.stderr)
        return 2
    judge = flags.judge or JUDGES.get(flags.mode, flags.mode)
    setup = Setup(flags.kube_proxy, flags.mode, judge, flags.services, flags.steps, flags.evidence)
    seeds = [first + index for first in flags.seed for index in range(flags.count)]
    # Lanes and their labs end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    started = time.monotonic()
    counts: Counter[str] = Counter()
    failed: list[int] = []
    for number, report in enumerate(reports(setup, seeds, min(flags.lanes, len(seeds))), 1):
        counts += report.counts
        if number % _NEWS == 0:
            print(f"{number} of {len(seeds)}, {len(failed)} failed", flush=True)
        if report.lines:
            failed.append(report.seed)
            print("\n  ".join([f"seed {report.seed}, {setup.mode}:", *report.lines]), flush=True)
    print(f"conformance, {setup.mode}, {time.monotonic() - started:.0f} s:")
    for name, count in sorted(counts.items()):
        print(f"  {count:7} {name}")
    print(f"  {len(failed):7} failed" + (f": make conformance SEED={failed[0]}" if failed else ""))
    if not failed and _never_seen(counts):
        print("conformance: some kind of answer was never seen, so nothing was proved", file=sys.stderr)
        return 1
    return 1 if failed else 0


def _never_seen(counts: Counter[str]) -> bool:
    return any(
        all(counts[f"saw {verdict}, {protocol}"] == 0 for protocol in Protocol)
        for verdict in ("reached", "refused", "dropped")
    )


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("--kube-proxy", required=True, metavar="BINARY")
    parser.add_argument("--mode", choices=list(MODES), default="nftables")
    parser.add_argument("--judge", choices=list(MODES), help="kube-proxy's mode, if not the usual one")
    parser.add_argument("--seed", type=_numbers, default=[1], metavar="N[,N...]", help="the first one")
    parser.add_argument("--count", type=int, default=300, help="scenarios from each seed on")
    parser.add_argument("--services", type=int, default=SERVICES, help="in a scenario, at most")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lanes", type=int, default=_LANES, help="scenarios at a time")
    parser.add_argument("--evidence", type=Path, default=Path("build/conformance"), metavar="DIR")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
