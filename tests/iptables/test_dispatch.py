"""Trees of chains: what a packet finds in them, and what a change of keys writes."""

import random
import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rulecast.model import Protocol
from rulecast_agent.dataplane.iptables.dispatch import LEAF, Delta, Dispatch, Rules
from rulecast_agent.dataplane.iptables.matches import SERVICE_BITS, port_match, service_key

WIDTH = 20
ROOT = "ROOT"
Chains = dict[str, Rules]
keys = st.one_of(st.integers(0, 2**WIDTH - 1), st.integers(70_000, 70_100))
changes = st.dictionaries(keys, st.sampled_from([(), ("-j A",), ("-j B",), ("-j A", "-j B")]), max_size=60)


def tree(width: int = WIDTH) -> Dispatch:
    made = Dispatch(root=ROOT, code="T", width=width, match=lambda prefix, length: f"{prefix}/{length}")
    made.change({})
    return made


def found(chains: Mapping[str, Rules], key: int, width: int = WIDTH) -> tuple[Rules, int]:
    """What is done with a key, and how many rules were looked at on the way."""
    actions: list[str] = []
    looked = 0
    stack = list(reversed(chains[ROOT]))
    while stack:
        looked += 1
        match, _, action = stack.pop().partition(" ")
        prefix, length = map(int, match.split("/"))
        if key >> (width - length) != prefix:
            continue
        name = action.removeprefix("-j ")
        if name in chains:
            stack += reversed(chains[name])
        else:
            actions.append(action)
    return tuple(actions), looked


def write(chains: Chains, delta: Delta) -> None:
    """As the kernel takes it: one chain after the other, and no rule may go to one that is not there."""
    for name, rules in delta.writes.items():
        targets = {rule.rpartition("-j ")[2] for rule in rules} - {"A", "B"}
        assert targets <= chains.keys()
        chains[name] = rules
    for name in delta.deletes:
        used = {rule.rpartition("-j ")[2] for rules in chains.values() for rule in rules}
        assert name not in used
        del chains[name]


@settings(max_examples=200, deadline=None)
@given(st.lists(changes, max_size=6))
def test_every_key_has_its_action_after_any_changes(steps: list[dict[int, Rules]]) -> None:
    made = tree()
    kernel: Chains = dict(made.chains)
    meant: dict[int, Rules] = {}
    for step in steps:
        write(kernel, made.change(step))
        meant = {key: action for key, action in {**meant, **step}.items() if action}
        for key in {*meant, *step}:
            assert found(kernel, key)[0] == meant.get(key, ())
        assert kernel == dict(made.chains)


@settings(max_examples=100, deadline=None)
@given(st.lists(changes, max_size=4))
def test_the_chains_depend_on_the_keys_and_not_on_how_they_came(steps: list[dict[int, Rules]]) -> None:
    made, fresh = tree(), tree()
    meant: dict[int, Rules] = {}
    for step in steps:
        made.change(step)
        meant |= step
    fresh.change(meant)
    assert made.chains == fresh.chains


@settings(max_examples=50, deadline=None)
@given(st.lists(changes, max_size=4))
def test_chains_are_listed_after_those_that_they_go_to(steps: list[dict[int, Rules]]) -> None:
    made = tree()
    for step in steps:
        made.change(step)
    write({}, Delta(dict(made.chains), []))


def test_ten_thousand_keys_cost_a_packet_a_level_more_than_a_hundred() -> None:
    looked = {}
    for count in (100, 10_000):
        made = tree(52)
        base = 0x0A600000 << 20
        made.change({base + (number << 20) + 80: ("-j A",) for number in range(count)})
        chains = made.chains
        looked[count] = max(found(chains, base + (number << 20) + 80, 52)[1] for number in range(0, count, 7))
        assert max(map(len, chains.values())) <= LEAF
    assert looked[100] <= 2 * LEAF
    assert looked[10_000] <= 4 * LEAF


def test_a_change_writes_the_chains_on_the_way_to_its_key_alone() -> None:
    made = tree(52)
    draw = random.Random(1)
    made.change({draw.getrandbits(52): ("-j A",) for _ in range(10_000)})
    for key in (draw.getrandbits(52) for _ in range(50)):
        added = made.change({key: ("-j A",)})
        assert 1 <= len(added.writes) <= 2 + LEAF
        assert made.change({key: ("-j A",)}) == Delta({}, [])
        gone = made.change({key: ()})
        assert len(gone.writes) <= 2


@pytest.mark.parametrize("count", [3, 20, 400])
def test_protocols_and_ports_are_told_apart_by_whole_matches(count: int) -> None:
    protocols = list(Protocol)
    made = Dispatch(root=ROOT, code="N", width=SERVICE_BITS, match=port_match)
    meant = {
        service_key(protocol, 30000 + 7 * number): (f"-j {protocol}",)
        for protocol in protocols
        for number in range(count)
    }
    made.change(meant)
    rules = [rule for rules in made.chains.values() for rule in rules]
    assert all(re.match(r"-p (tcp|udp|sctp)( -m \1 --dport \d+(:\d+)?)? -j \S+$", rule) for rule in rules)
    leaves = [rule for rule in rules if rule.rpartition("-j ")[2] in protocols]
    assert len(set(leaves)) == len(meant)
    assert all(f"-p {rule.rpartition('-j ')[2].lower()} " in rule for rule in leaves)
