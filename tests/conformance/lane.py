"""One pair of labs that plays one scenario after the other."""

import functools
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.conformance import health
from tests.conformance.cases import cases
from tests.conformance.compare import Difference
from tests.conformance.explain import explained
from tests.conformance.generate import Scenario, State, scenario
from tests.conformance.judge import Judge
from tests.conformance.known import contested, known
from tests.conformance.places import NODES
from tests.conformance.staying import Staying
from tests.conformance.twins import twins
from tests.conformance.wanted import Wanted, node_object


class Setup(NamedTuple):
    """What is played."""

    binary: str
    mode: str
    """Ours."""
    judge: str
    """kube-proxy's mode."""
    services: int
    steps: int
    evidence: Path
    """Where the rulesets of both sides go when they differ."""


@dataclass
class Report:
    """What came of a scenario; `lines` is empty when all is well."""

    seed: int
    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def play_all(setup: Setup, seeds: Iterator[int]) -> Iterator[Report]:
    """Play each seed. Processes that ended or do not settle are reported, and others started."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name, twins(Path(name)) as made:
            judge = Judge(made)
            # kube-proxy 1.37 may miss the zone that its node has at the start: its node informer runs before
            # the proxier's handler is registered. What changes later always arrives.
            unzoned = [node_object(node, "") for node in NODES]
            made.put(unzoned)
            made.start(setup.mode, setup.judge, setup.binary)
            before = None
            settled = False
            while True:
                report = Report(seed)
                try:
                    if not settled:
                        judge.settle(unzoned)
                        settled = True
                    _play(judge, setup, report, before)
                except Exception:
                    report.lines.append(traceback.format_exc())
                    report.lines.append(f"rulesets: {judge.save(_evidence(setup, seed))}")
                    yield report
                    break
                yield report
                following = next(seeds, None)
                if following is None:
                    return
                before, seed = seed, following


def _evidence(setup: Setup, seed: int) -> Path:
    judge = "" if setup.judge == setup.mode else f"-judged-in-{setup.judge}"
    return setup.evidence / f"{setup.mode}{judge}-seed-{seed}"


def _play(judge: Judge, setup: Setup, report: Report, before: int | None) -> None:
    whole = scenario(report.seed, services=setup.services, steps=setup.steps)
    step, found = _first_difference(judge, whole, whole, setup, report.counts)
    report.counts["scenarios"] += 1
    if not found:
        return
    saved = judge.save(_evidence(setup, report.seed))
    # Most often the services in question are enough, and easier to read.
    few = whole.only(*(each.case.service for each in found))
    again, still = _first_difference(judge, few, whole, setup, Counter())
    if still:
        report.lines += [f"step {again}, with these services alone:", *explained(few, again, still)]
    else:
        after = "" if before is None else f" (played after seed {before})"
        report.lines += [f"step {step}{after}, but not with these services alone:"]
        report.lines += explained(whole, step, found)
    report.lines.append(f"rulesets: {saved}")


def _first_difference(
    judge: Judge, played: Scenario, asked_of: Scenario, setup: Setup, counts: Counter[str]
) -> tuple[int, list[Difference]]:
    """The first step with differences that nothing explains, and these.

    The questions are those of another scenario, of which this one may be a part.
    """
    numbers = {each.number for state in played.states for each in state.services}
    judge.settle(played.empty())
    with Staying(judge.twins) as staying:
        for step in range(1, len(played.states) + 1):
            states = played.states[:step]
            if states[-1].hurried:
                judge.twins.put(states[-1].objects())
                continue
            judge.settle(states[-1].objects())
            services = {each.number: each for each in states[-1].services}
            asked = [each for each in cases(played.seed, asked_of.states[:step]) if each.service in numbers]
            explains = functools.partial(_explanation, states, setup)
            found, answered = judge.differences(asked, services, counts, explains)
            found += staying.differences(counts, explains)
            found += health.differences(judge.twins, health.questions(states[-2:]), explains)
            counts["steps"] += 1
            counts["questions"] += len(asked)
            names = [explains(each) for each in found]
            counts.update(f"known: {name}" for name in names if name)
            if left := [each for each, name in zip(found, names, strict=True) if not name]:
                return step, left
            staying.open(answered)
    return 0, []


def _explanation(states: Sequence[State], setup: Setup, found: Difference) -> str | None:
    """The name of what explains a difference after the last of these states; None: nothing does."""
    since = next((index for index in range(len(states) - 2, -1, -1) if not states[index].hurried), 0)
    number = found.case.service
    before, *later = (_service(state, number) for state in states[since:])
    # What was there for a moment may have been seen.
    names = (
        known(found, service, before, setup.judge, ours=setup.mode) for service in reversed(later or [before])
    )
    return next(filter(None, names), None) or contested(found, [each.services for each in states[since:]])


def _service(state: State, number: int) -> Wanted | None:
    return next((each for each in state.services if each.number == number), None)
