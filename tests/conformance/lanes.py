"""Several pairs of labs at once, each in a process of its own."""

import multiprocessing
import queue
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tests.conformance.lane import Report, Setup, play_all

if TYPE_CHECKING:
    Seeds = multiprocessing.Queue[int]
    Reports = multiprocessing.Queue[Report]


def reports(setup: Setup, seeds: Sequence[int], lanes: int) -> Iterator[Report]:
    """What comes of each seed, as it comes; each seed has one report."""
    context = multiprocessing.get_context("spawn")
    todo: Seeds = context.Queue()
    done: Reports = context.Queue()
    for seed in seeds:
        todo.put(seed)
    workers = [context.Process(target=_work, args=(setup, todo, done), daemon=True) for _ in range(lanes)]
    for worker in workers:
        worker.start()
    left = set(seeds)
    while left:
        try:
            report = done.get(timeout=1)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                yield from (Report(seed, ["never played: every lane ended"]) for seed in sorted(left))
                break
            continue
        left.discard(report.seed)
        yield report
    for worker in workers:
        worker.join()


def _work(setup: Setup, todo: "Seeds", done: "Reports") -> None:
    # An end from outside closes the labs, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def seeds() -> Iterator[int]:
        try:
            while True:
                yield todo.get(timeout=1)
        except queue.Empty:
            return

    for report in play_all(setup, seeds()):
        done.put(report)
