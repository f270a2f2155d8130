"""What the agent counts, under the names that kube-proxy's dashboards know."""

import pytest
from prometheus_client import generate_latest

from rulecast.model import Revision
from rulecast.view import Receipt
from rulecast_agent.metrics import AgentMetrics, NoLocalEndpoints
from tests.agent.values import key, update, view

WEB = key("web")
ELSEWHERE = ("10.0.0.1:80",)


@pytest.mark.parametrize(
    ("fields", "cluster", "local", "internal", "external"),
    [
        ({"internal_local": True, "external_local": True}, ELSEWHERE, ("10.0.0.2:80",), 0, 0),
        ({"internal_local": True}, ELSEWHERE, (), 1, 0),
        ({"external_local": True}, ELSEWHERE, (), 0, 1),
        ({"internal_local": True, "external_local": True}, ELSEWHERE, (), 1, 1),
        ({"internal_local": True, "external_local": True}, (), (), 0, 0),
        ({}, ELSEWHERE, (), 0, 0),
    ],
    ids=["a local endpoint", "internal", "external", "both", "no endpoint anywhere", "no Local policy"],
)
def test_services_that_a_local_policy_drops_here(
    fields: dict[str, bool], cluster: tuple[str, ...], local: tuple[str, ...], internal: int, external: int
) -> None:
    counts = NoLocalEndpoints()
    counts.settled({WEB: view(WEB, *cluster, local=local, node_port=30000, **fields)})
    assert (len(counts.internal), len(counts.external)) == (internal, external)
    counts.settled({WEB: None})
    assert (len(counts.internal), len(counts.external)) == (0, 0)


def test_a_write_is_counted_once_and_by_its_kind() -> None:
    metrics = AgentMetrics()
    receipt = Receipt(revision=Revision(7), seconds=0.5, operations=3, errors={key("bad"): "no"})
    metrics.applied(update(7, full=True), receipt, now=100.0)
    metrics.applied(update(8, triggers={WEB: 99.0, key("bad"): 1.0}), receipt, now=100.0)
    value = metrics.registry.get_sample_value
    assert value("kubeproxy_sync_proxy_rules_duration_seconds_count") == 2
    assert value("kubeproxy_sync_full_proxy_rules_duration_seconds_count") == 1
    assert value("kubeproxy_sync_partial_proxy_rules_duration_seconds_count") == 1
    assert value("kubeproxy_sync_proxy_rules_last_timestamp_seconds") == 100
    assert value("kubeproxy_network_programming_duration_seconds_sum") == 1.0
    assert value("rulecast_agent_services_in_error") == 1
    assert value("rulecast_agent_operations_total") == 6


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("nftables", "kubeproxy_sync_proxy_rules_nftables_sync_failures_total"),
        ("iptables", "kubeproxy_sync_proxy_rules_iptables_restore_failures_total"),
        ("ipvs", "kubeproxy_sync_proxy_rules_iptables_restore_failures_total"),
    ],
)
def test_failures_have_the_modes_name(mode: str, name: str) -> None:
    metrics = AgentMetrics(mode=mode)
    metrics.failed()
    assert metrics.registry.get_sample_value(name) == 1


def test_no_series_has_the_name_of_a_service() -> None:
    metrics = AgentMetrics()
    receipt = Receipt(revision=Revision(1), seconds=0.1, errors={WEB: "refused"})
    metrics.applied(update(1, {WEB: view(WEB)}, full=True, triggers={WEB: 1.0}), receipt, now=2.0)
    metrics.settled({WEB: view(WEB, *ELSEWHERE, internal_local=True)})
    metrics.conntrack(3, 0.1, False)
    assert b"web" not in generate_latest(metrics.registry)
