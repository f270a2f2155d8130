"""`python -m tests.conformance --kube-proxy BINARY`: run random scenarios against the real kube-proxy."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.cases import cases
from tests.conformance.compare import Difference
from tests.conformance.explain import explained
from tests.conformance.generate import SERVICES, STEPS, Scenario, scenario
from tests.conformance.judge import Judge
from tests.conformance.twins import MODES, twins


def play(judge: Judge, played: Scenario, count: Counter[str]) -> tuple[int, list[Difference]]:
    """The first step with differences, and these."""
    judge.settle(played.empty())
    for step in range(1, len(played.states) + 1):
        states = played.states[:step]
        judge.settle(states[-1].objects())
        asked = cases(played.seed, states)
        count["steps"] += 1
        count["questions"] += len(asked)
        found = judge.differences(asked, {each.number: each for each in states[-1].services})
        if found:
            return step, found
    return 0, []


def main(argv: Sequence[str] | None = None) -> int:
    flags = _flags(argv)
    started = time.monotonic()
    count: Counter[str] = Counter()
    failed = []
    with tempfile.TemporaryDirectory() as name, twins(Path(name)) as made:
        judge = Judge(made)
        made.put(scenario(0).empty())
        made.start(flags.mode, flags.kube_proxy)
        for seed in range(flags.seed, flags.seed + flags.count):
            played = scenario(seed, services=flags.services, steps=flags.steps)
            step, found = play(judge, played, count)
            count["scenarios"] += 1
            if found:
                failed.append(seed)
                print(f"seed {seed}, step {step}:", flush=True)
                for line in explained(played, step, found):
                    print(f"  {line}", flush=True)
    print(f"{dict(count)} in {time.monotonic() - started:.0f} s; failed: {failed}")
    return 1 if failed else 0


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("--kube-proxy", required=True, metavar="BINARY")
    parser.add_argument("--mode", choices=list(MODES), default="nftables")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--count", type=int, default=300, help="scenarios")
    parser.add_argument("--services", type=int, default=SERVICES)
    parser.add_argument("--steps", type=int, default=STEPS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
