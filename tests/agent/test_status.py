"""When the agent calls itself healthy (kube-proxy's ProxyHealthServer)."""

import pytest

from rulecast.model import Family, NodeInfo
from rulecast_agent.status import ProxyHealth
from tests.agent.fakes import ManualClock
from tests.agent.values import NODE

pytestmark = pytest.mark.asyncio
LIMIT = 60.0


class Watched:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.health = ProxyHealth(
            node_name="n1", limit=LIMIT, clock=self.clock.now, wall=lambda: 5000 + self.clock.time
        )


async def test_healthy_when_nothing_was_ever_queued() -> None:
    w = Watched()
    w.clock.advance(1000)
    check = w.health.check()
    assert check.healthy
    assert check.node_eligible
    assert check.last_updated == check.now


async def test_healthy_when_an_update_is_applied_within_the_limit() -> None:
    w = Watched()
    w.health.queued()
    w.clock.advance(LIMIT)
    assert w.health.check().healthy
    w.health.applied()
    w.clock.advance(1000)
    assert w.health.check().healthy


async def test_unhealthy_when_an_update_waits_longer_and_healthy_once_it_is_applied() -> None:
    w = Watched()
    w.health.applied()
    applied = w.health.check().now
    w.clock.advance(5)
    w.health.queued()
    w.clock.advance(LIMIT + 1)
    check = w.health.check()
    assert not check.healthy
    assert check.last_updated == applied
    assert "61 s" in check.reasons[0]
    w.health.applied()
    assert w.health.check().healthy


async def test_the_oldest_waiting_update_counts_not_the_newest() -> None:
    w = Watched()
    w.health.queued()
    w.clock.advance(LIMIT)
    w.health.queued()
    w.clock.advance(1)
    assert not w.health.check().healthy


async def test_one_family_that_lags_is_enough() -> None:
    w = Watched()
    w.health.queued()
    w.health.applied([Family.IPV4])
    w.clock.advance(LIMIT + 1)
    check = w.health.check()
    assert not check.healthy
    assert "ipv6" in check.reasons[0]
    assert "ipv4" not in check.reasons[0]


@pytest.mark.parametrize(
    ("node", "eligible"),
    [(NODE, True), (NodeInfo(name="n1", eligible=False), False), (None, False)],
    ids=["fine", "tainted or being deleted", "unknown"],
)
async def test_the_node_decides_eligibility_and_not_health(node: NodeInfo | None, eligible: bool) -> None:
    w = Watched()
    w.health.node(node)
    check = w.health.check()
    assert check.node_eligible is eligible
    assert check.healthy
    assert bool(check.reasons) is not eligible


async def test_a_taint_that_goes_makes_the_node_eligible_again() -> None:
    w = Watched()
    w.health.node(NodeInfo(name="n1", eligible=False))
    w.health.node(NODE)
    assert w.health.check().node_eligible
