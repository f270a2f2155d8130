"""Which server an agent tries next."""

import random
from collections import Counter

from rulecast_agent.feed.candidates import Candidates


def test_a_server_that_fails_is_tried_again_after_all_others() -> None:
    candidates = Candidates(["a", "b", "c"])
    tried = []
    for _ in range(6):
        tried.append(candidates.first)
        candidates.failed()
    assert sorted(tried[:3]) == ["a", "b", "c"]
    assert tried[:3] == tried[3:]


def test_agents_begin_at_different_servers() -> None:
    firsts = Counter(Candidates("abcd", draw=random.Random(seed)).first for seed in range(400))
    assert firsts.keys() == set("abcd")
    assert min(firsts.values()) > 50


def test_the_server_in_use_stays_first_when_others_come_and_go() -> None:
    candidates = Candidates(["a", "b"])
    first = candidates.first
    assert first is not None
    other = "ab".replace(first, "")
    assert candidates.update([other, "x", first, "y"]) == []
    assert candidates.first == first
    assert set(candidates.update(["y", first])) == {other, "x"}
    assert (candidates.first, len(candidates)) == (first, 2)


def test_after_a_rolling_update_of_the_servers_none_has_the_whole_fleet() -> None:
    """Each replica is replaced in turn: those that lose theirs choose among all that are there."""
    fleet = [Candidates(["a", "b"], draw=random.Random(seed)) for seed in range(1000)]
    for servers in (["b", "c"], ["c", "d"]):
        for agent in fleet:
            agent.update(servers)
    shares = Counter(agent.first for agent in fleet)
    assert shares.keys() == {"c", "d"}
    assert min(shares.values()) > 200


def test_with_no_server_there_is_none_to_try_until_one_comes() -> None:
    candidates = Candidates()
    candidates.failed()
    assert candidates.first is None
    assert candidates.update(["a", "a"]) == []
    assert (candidates.first, len(candidates)) == ("a", 1)
    assert candidates.update([]) == ["a"]
    assert candidates.first is None
