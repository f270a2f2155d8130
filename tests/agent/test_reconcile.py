"""The reconcile loop: what reaches the kernel, when, and what is said about it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from rulecast.model import Family, NodeInfo, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import DataplaneError, Drift
from rulecast_agent.metrics import AgentMetrics
from rulecast_agent.reconcile import Reconciler
from rulecast_agent.settings import AgentSettings, parse
from rulecast_agent.status import ProxyHealth
from tests.agent.fakes import FakeAddresses, FakeDataplane, FakeFeed, ManualClock, quiet, running, until
from tests.agent.values import NODE, key, update, view

pytestmark = pytest.mark.asyncio
WEB, DNS, API = key("web"), key("dns"), key("api")


class Recorder:
    """A follower that remembers."""

    def __init__(self) -> None:
        self.settled_changes: list[dict[ServiceKey, ServiceView | None]] = []
        self.addresses: list[Mapping[Family, tuple[str, ...] | None]] = []

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> None:
        self.settled_changes.append(dict(changes))

    def nodeport_addresses(self, addresses: Mapping[Family, tuple[str, ...] | None]) -> None:
        self.addresses.append(addresses)


class Agent:
    """A reconciler with everything around it faked."""

    def __init__(self, *flags: str) -> None:
        self.settings: AgentSettings = parse(
            ["--server", "s:1", "--insecure", "--node-name", "n1", "--min-sync-period", "1s", *flags], {}
        )
        self.clock = ManualClock()
        self.feed = FakeFeed()
        self.dataplane = FakeDataplane()
        self.addresses = FakeAddresses("127.0.0.1", "192.0.2.11")
        self.health = ProxyHealth(
            node_name="n1", limit=2 * self.settings.sync_period, clock=self.clock.now, wall=self.clock.now
        )
        self.metrics = AgentMetrics()
        self.follower = Recorder()
        self.reconciler = Reconciler(
            settings=self.settings,
            feed=self.feed,
            dataplane=self.dataplane,
            families=tuple(Family),
            addresses=self.addresses,
            health=self.health,
            metrics=self.metrics,
            followers=[self.follower],
            clock=self.clock,
            wall=self.clock.now,
        )

    def metric(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name)

    async def acked(self, count: int) -> None:
        await until(lambda: len(self.feed.acks) >= count)
        assert len(self.feed.acks) == count

    async def pass_time(self, seconds: float) -> None:
        """In small steps, so that everything that falls due on the way runs."""
        for _ in range(int(seconds / 0.25)):
            self.clock.advance(0.25)
            await asyncio.sleep(0.002)
        await quiet()


@asynccontextmanager
async def agent(*flags: str) -> AsyncIterator[Agent]:
    made = Agent(*flags)
    async with running(made.reconciler.run()):
        yield made


@asynccontextmanager
async def synced(*flags: str) -> AsyncIterator[Agent]:
    """An agent whose kernel has `web`; the pause after that write is over."""
    async with agent(*flags) as made:
        await made.feed.give(update(1, {WEB: view(WEB, "10.0.0.1:80")}, full=True))
        await made.acked(1)
        await made.pass_time(2)
        yield made


async def test_the_first_change_after_quiet_goes_out_at_once() -> None:
    async with synced() as a:
        await a.feed.give(update(2, {DNS: view(DNS)}))
        await a.acked(2)
        assert a.dataplane.kernel.keys() == {WEB, DNS}


async def test_a_burst_becomes_few_writes_and_ends_right() -> None:
    async with synced() as a:
        before = len(a.dataplane.applied)
        for number in range(100):
            await a.feed.give(update(2 + number, {WEB: view(WEB, f"10.0.0.{number}:80")}))
            a.clock.advance(0.01)
            await asyncio.sleep(0)
        await a.pass_time(2)
        assert len(a.dataplane.applied) - before <= 3
        assert a.dataplane.kernel[WEB] == view(WEB, "10.0.0.99:80")
        assert a.feed.acks[-1].revision == 101


async def test_nothing_is_written_when_nothing_changes() -> None:
    async with synced() as a:
        await a.pass_time(120)
        assert len(a.dataplane.applied) == 1
        assert a.metric("rulecast_agent_transactions_total") == 1


async def test_what_comes_while_the_kernel_is_busy_is_merged_and_never_overlaps() -> None:
    async with synced() as a:
        a.dataplane.gate.clear()
        await a.feed.give(update(2, {WEB: view(WEB, "10.0.0.2:80")}))
        await until(lambda: a.dataplane.inside == 1)
        await a.feed.give(update(3, {WEB: view(WEB, "10.0.0.3:80")}), update(4, {WEB: None, DNS: view(DNS)}))
        a.dataplane.gate.set()
        await a.acked(2)
        await a.pass_time(1)
        assert [each.revision for each in a.dataplane.applied] == [1, 2, 4]
        assert a.dataplane.kernel.keys() == {DNS}
        assert not a.dataplane.overlapped


async def test_all_calls_come_from_one_thread_that_is_not_the_loops() -> None:
    async with synced() as a:
        await a.feed.give(update(2, {DNS: view(DNS)}))
        await a.pass_time(2)
        assert len(a.dataplane.threads) == 1
        assert threading.get_ident() not in a.dataplane.threads


async def test_nothing_touches_the_kernel_before_a_full_update() -> None:
    async with agent() as a:
        await a.pass_time(5)
        await a.feed.give(update(1, {WEB: view(WEB)}))
        await a.pass_time(5)
        assert a.dataplane.calls == []
        assert not a.health.ready
        await a.feed.give(update(2, {WEB: view(WEB)}, full=True))
        await a.acked(1)
        assert a.health.ready


async def test_an_acknowledged_revision_is_one_that_the_kernel_has() -> None:
    async with synced() as a:
        a.dataplane.gate.clear()
        await a.feed.give(update(2, {DNS: view(DNS)}))
        await quiet()
        assert a.feed.acks[-1].revision == 1
        a.dataplane.gate.set()
        await a.acked(2)
        assert a.feed.acks[-1].revision == 2


async def test_a_failed_write_loses_nothing_and_is_reported_until_it_works() -> None:
    async with synced() as a:
        a.dataplane.errors = [DataplaneError("nft: no memory")]
        await a.feed.give(update(2, {WEB: None}, triggers={WEB: 5.0}))
        await until(lambda: a.feed.reports[-1:] == ["nft: no memory"])
        assert len(a.feed.acks) == 1
        await a.feed.give(update(3, {DNS: view(DNS)}))
        await a.pass_time(2)
        assert a.dataplane.kernel.keys() == {DNS}
        assert a.dataplane.applied[-1].trigger_times == {WEB: 5.0}
        assert a.feed.reports[-1] == ""
        assert a.feed.acks[-1].revision == 3
        assert a.metric("kubeproxy_sync_proxy_rules_nftables_sync_failures_total") == 1


async def test_a_failed_first_write_stays_a_full_one() -> None:
    async with agent() as a:
        a.dataplane.errors = [DataplaneError("no")]
        await a.feed.give(update(1, {WEB: view(WEB)}, full=True))
        await until(lambda: bool(a.feed.reports))
        await a.feed.give(update(2, {DNS: view(DNS), WEB: None}))
        await a.pass_time(2)
        assert [(each.full, each.services.keys()) for each in a.dataplane.applied] == [(True, {DNS})]


async def test_retries_back_off_and_stay_within_the_sync_period() -> None:
    async with synced("--sync-period", "8s") as a:
        a.dataplane.errors = [DataplaneError("no")] * 1000
        await a.feed.give(update(2, {DNS: view(DNS)}))
        await a.pass_time(160)
        tries = 1000 - len(a.dataplane.errors)
        assert 160 / 8 <= tries <= 160 / 4 + 10


async def test_health_fails_after_twice_the_sync_period_and_recovers() -> None:
    async with synced() as a:
        a.dataplane.errors = [DataplaneError("no")] * 1000
        await a.feed.give(update(2, {DNS: view(DNS)}))
        await a.pass_time(59)
        assert a.health.check().healthy
        await a.pass_time(2)
        assert not a.health.check().healthy
        a.dataplane.errors.clear()
        await a.pass_time(30)
        assert a.health.check().healthy


async def test_rules_that_cannot_be_mended_make_the_agent_unhealthy() -> None:
    async with synced() as a:
        a.dataplane.check_errors = [DataplaneError("gone")] * 1000
        await a.pass_time(62)
        assert not a.health.check().healthy
        assert a.feed.reports[-1] == "gone"
        a.dataplane.check_errors.clear()
        await a.pass_time(5)
        assert a.health.check().healthy
        assert a.feed.reports[-1] == ""


async def test_a_good_look_at_the_rules_does_not_hide_a_write_that_fails() -> None:
    async with synced() as a:
        a.dataplane.errors = [DataplaneError("no")] * 1000
        await a.feed.give(update(2, {DNS: view(DNS)}))
        await a.pass_time(70)
        assert a.dataplane.calls.count("check") > 50
        assert not a.health.check().healthy
        assert a.feed.reports[-1] == "no"


async def test_a_refused_service_holds_back_no_other_and_is_tried_again() -> None:
    async with synced() as a:
        a.dataplane.refused = {DNS}
        await a.feed.give(update(2, {DNS: view(DNS), API: view(API)}))
        await a.acked(2)
        assert a.feed.acks[-1].errors == {DNS: "Invalid argument"}
        assert a.dataplane.kernel.keys() == {WEB, API}
        assert a.metric("rulecast_agent_services_in_error") == 1
        a.dataplane.refused = set()
        await a.pass_time(2)
        assert a.dataplane.kernel.keys() == {WEB, API, DNS}
        assert a.feed.acks[-1].errors == {}
        assert a.metric("rulecast_agent_services_in_error") == 0


async def test_followers_hear_of_a_service_when_it_is_in_the_kernel_and_not_before() -> None:
    async with synced() as a:
        a.dataplane.refused = {DNS}
        dns, api = view(DNS), view(API)
        await a.feed.give(update(2, {DNS: dns, API: api}))
        await a.acked(2)
        assert a.follower.settled_changes[-1] == {API: api}
        a.dataplane.refused = set()
        await a.pass_time(2)
        assert a.follower.settled_changes[-1] == {DNS: dns}


async def test_a_full_update_tells_followers_what_is_gone() -> None:
    async with synced() as a:
        await a.feed.give(update(2, {DNS: view(DNS)}, full=True))
        await a.acked(2)
        assert a.follower.settled_changes[-1] == {WEB: None, DNS: view(DNS)}


async def test_drift_is_looked_for_each_second_and_read_back_slowly() -> None:
    async with synced("--verify-period", "60s") as a:
        a.dataplane.drifts = [Drift(differences=("chain services: gone",), count=3)]
        await a.pass_time(100)
        assert a.metric("rulecast_agent_drift_total") == 3
        assert 50 <= a.dataplane.calls.count("check") <= 103
        assert a.dataplane.calls.count("verify") == 1


async def test_new_host_addresses_are_applied_without_any_service_change() -> None:
    async with synced("--nodeport-addresses", "192.0.2.0/24") as a:
        a.addresses.set("127.0.0.1", "192.0.2.11", "192.0.2.12")
        await a.acked(2)
        assert a.dataplane.applied[-1].services == {}
        assert a.dataplane.hosts[-1].families[Family.IPV4].nodeport_addresses == ("192.0.2.11", "192.0.2.12")
        assert a.follower.addresses[-1][Family.IPV4] == ("192.0.2.11", "192.0.2.12")


async def test_addresses_that_shape_no_rule_cause_no_write() -> None:
    async with synced() as a:
        a.addresses.set("127.0.0.1", "192.0.2.11", "203.0.113.7")
        await a.pass_time(2)
        assert len(a.dataplane.applied) == 1


async def test_a_changed_node_address_is_applied() -> None:
    async with synced() as a:
        moved = NodeInfo(name="n1", addresses=("192.0.2.99",))
        await a.feed.give(update(2, node=moved))
        await a.acked(2)
        assert a.dataplane.hosts[-1].families[Family.IPV4].nodeport_addresses == ("192.0.2.99",)


async def test_an_unknown_node_serves_what_needs_no_node_fact_and_no_node_ports() -> None:
    async with agent() as a:
        await a.feed.give(update(1, {WEB: view(WEB)}, full=True, node=None))
        await a.acked(1)
        assert a.dataplane.hosts[-1].families[Family.IPV4].nodeport_addresses == ()
        assert a.dataplane.hosts[-1].families[Family.IPV4].node_ips == ()
        assert not a.health.check().node_eligible
        assert "'n1'" in a.health.check().reasons[0]


async def test_a_node_object_that_goes_leaves_the_rules() -> None:
    async with synced() as a:
        await a.feed.give(update(2, node=None))
        await a.acked(2)
        assert a.dataplane.hosts[-1].families[Family.IPV4].node_ips == ("192.0.2.11", "198.51.100.11")
        assert not a.health.check().node_eligible


async def test_node_cidr_mode_writes_nothing_until_the_pod_cidrs_are_known() -> None:
    async with agent("--detect-local-mode", "NodeCIDR") as a:
        await a.feed.give(update(1, {WEB: view(WEB)}, full=True, node=NodeInfo(name="n1")))
        await a.pass_time(3)
        assert a.dataplane.calls == []
        assert "no pod CIDR" in a.feed.reports[-1]
        assert any("no pod CIDR" in reason for reason in a.health.check().reasons)
        await a.feed.give(update(2, node=NODE))
        await a.acked(1)
        assert a.dataplane.applied[-1].full
        assert a.dataplane.hosts[-1].families[Family.IPV4].detector.source_cidr == "10.244.1.0/24"
        assert a.feed.reports[-1] == ""


async def test_the_programming_latency_counts_from_the_trigger() -> None:
    async with synced() as a:
        await a.feed.give(update(2, {DNS: view(DNS)}, triggers={DNS: a.clock.time - 0.4}))
        await a.acked(2)
        name = "kubeproxy_network_programming_duration_seconds"
        assert a.metric(f"{name}_count") == 1
        assert a.metric(f"{name}_sum") == pytest.approx(0.4)


async def test_a_bug_in_the_dataplane_ends_the_agent_visibly() -> None:
    a = Agent()
    a.dataplane.errors = [ZeroDivisionError("bug")]
    task = asyncio.ensure_future(a.reconciler.run())
    await a.feed.give(update(1, full=True))
    with pytest.raises(ExceptionGroup) as caught:
        await task
    assert caught.group_contains(ZeroDivisionError)


async def test_a_stop_waits_for_the_write_that_is_under_way() -> None:
    a = Agent()
    async with running(a.reconciler.run()) as task:
        a.dataplane.gate.clear()
        await a.feed.give(update(1, {WEB: view(WEB)}, full=True))
        await until(lambda: a.dataplane.inside == 1)
        threading.Timer(0.05, a.dataplane.gate.set).start()
        task.cancel()
        await asyncio.wait([task])
    assert a.dataplane.inside == 0
    assert a.dataplane.kernel.keys() == {WEB}
