"""The rules that no service shapes."""

import msgspec
import pytest

from rulecast.model import Family
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.iptables import names
from rulecast_agent.dataplane.iptables.host_rules import host_chains
from tests.nftables.values import HOST

GUARD = "! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
LOOPBACK = "! -d 127.0.0.0/8 "


def host(addresses: tuple[str, ...] | None) -> HostConfig:
    config = msgspec.structs.replace(HOST.families[Family.IPV4], nodeport_addresses=addresses)
    return msgspec.structs.replace(HOST, families={Family.IPV4: config})


@pytest.mark.parametrize("addresses", [None, ("192.168.0.2",)], ids=["all addresses", "one address"])
def test_with_localhost_node_ports_neighbors_are_kept_out_wherever_they_answer(
    addresses: tuple[str, ...] | None,
) -> None:
    """route_localnet is on then (CVE-2020-8558)."""
    chains = host_chains(Family.IPV4, host(addresses), localhost_node_ports=True, drop_invalid=True)["filter"]
    assert chains[names.INPUT][0] == chains[names.OUTPUT][0] == GUARD


@pytest.mark.parametrize(("asked", "answers"), [(True, True), (False, False)])
def test_node_ports_answer_on_the_loopback_when_asked_for(asked: bool, answers: bool) -> None:
    tables = host_chains(Family.IPV4, host(None), localhost_node_ports=asked, drop_invalid=True)
    (rule,) = (rule for rule in tables["nat"][names.SERVICES] if rule.endswith(names.NODE_PORTS))
    assert rule.startswith(LOOPBACK) is not answers
    assert (GUARD in tables["filter"][names.INPUT]) is asked


def test_what_conntrack_gave_up_on_is_dropped_unless_it_is_to_be_liberal() -> None:
    """kubernetes/kubernetes#74839."""
    for drop in (True, False):
        tables = host_chains(Family.IPV4, host(None), localhost_node_ports=False, drop_invalid=drop)
        assert any("INVALID" in rule for rule in tables["filter"][names.FORWARD]) is drop
