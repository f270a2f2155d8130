"""One of many: the shares, and what a change rewrites."""

from collections import Counter
from fractions import Fraction

import pytest

from rulecast.model import Endpoint
from rulecast_agent.dataplane.iptables.dispatch import Rules
from rulecast_agent.dataplane.iptables.names import service_chain
from rulecast_agent.dataplane.iptables.picks import DIRECT, pick
from tests.nftables.values import key

KERNEL_PARTS = 1 << 31
"""xt_statistic compares 31 random bits."""


def endpoints(count: int, first: int = 0) -> list[Endpoint]:
    return [Endpoint(f"10.128.{number >> 8}.{number & 255}", 8080) for number in range(first, first + count)]


def shares(rules: Rules, chains: dict[str, Rules], whole: Fraction = Fraction(1)) -> Counter[str]:
    """The chance of each target."""
    found: Counter[str] = Counter()
    for rule in rules:
        words = rule.split()
        chance = Fraction(1)
        if "--probability" in words:
            parts = round(float(words[words.index("--probability") + 1]) * KERNEL_PARTS)
            chance = Fraction(parts, KERNEL_PARTS)
        target = words[words.index("-j") + 1]
        if target in chains:
            found += shares(chains[target], chains, whole * chance)
        else:
            found[words[-1]] += whole * chance  # type: ignore[assignment]
        whole *= 1 - chance
    assert whole == 0
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 7, DIRECT, DIRECT + 1, 100, 1000, 5000])
def test_each_endpoint_has_its_share_to_the_kernels_precision(count: int) -> None:
    found = shares(*pick(key(), "A", endpoints(count)))
    assert len(found) == count
    assert max(abs(share - Fraction(1, count)) for share in found.values()) < Fraction(count, KERNEL_PARTS)


@pytest.mark.parametrize(("count", "most"), [(20, 20), (100, 60), (1000, 120), (5000, 300)])
def test_a_change_of_one_endpoint_rewrites_few_rules(count: int, most: int) -> None:
    before_rules, before = pick(key(), "A", endpoints(count))
    after_rules, after = pick(key(), "A", endpoints(count, first=1))
    changed = [rules for name, rules in after.items() if before.get(name) != rules]
    assert sum(map(len, changed)) + (len(after_rules) if after_rules != before_rules else 0) <= most


def test_endpoints_keep_their_buckets_while_others_come_and_go() -> None:
    _, before = pick(key(), "A", endpoints(1000))
    _, after = pick(key(), "A", endpoints(1000, first=10))
    assert before.keys() == after.keys()
    assert sum(before[name] != after[name] for name in before) <= 20


def test_names_are_as_short_as_the_kernel_wants_them() -> None:
    long = key("n" * 63)
    _, chains = pick(long, "A", endpoints(20_000))
    assert max(map(len, [*chains, service_chain("SVC", long)])) <= 28
