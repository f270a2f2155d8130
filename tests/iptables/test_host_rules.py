"""The rules that no service shapes."""

import msgspec
import pytest

from rulecast.model import Family
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.iptables import names
from rulecast_agent.dataplane.iptables.host_rules import host_chains
from tests.nftables.values import HOST

GUARD = "-d 127.0.0.0/8 ! -i lo -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
LOOPBACK = "! -d 127.0.0.0/8 "


def host(addresses: tuple[str, ...] | None) -> HostConfig:
    config = msgspec.structs.replace(HOST.families[Family.IPV4], nodeport_addresses=addresses)
    return msgspec.structs.replace(HOST, families={Family.IPV4: config})


@pytest.mark.parametrize("localhost", [True, False])
@pytest.mark.parametrize("addresses", [None, ("192.168.0.2",)], ids=["all addresses", "one address"])
def test_neighbors_are_kept_off_the_loopback(addresses: tuple[str, ...] | None, localhost: bool) -> None:
    """route_localnet may be on (CVE-2020-8558)."""
    tables = host_chains(Family.IPV4, host(addresses), localhost_node_ports=localhost, drop_invalid=True)
    assert tables["filter"][names.INPUT][0] == GUARD


@pytest.mark.parametrize(("asked", "answers"), [(True, True), (False, False)])
def test_node_ports_answer_on_the_loopback_when_asked_for(asked: bool, answers: bool) -> None:
    tables = host_chains(Family.IPV4, host(None), localhost_node_ports=asked, drop_invalid=True)
    (rule,) = (rule for rule in tables["nat"][names.SERVICES] if rule.endswith(names.NODE_PORTS))
    assert rule.startswith(LOOPBACK) is not answers


def test_what_conntrack_gave_up_on_is_dropped_unless_it_is_to_be_liberal() -> None:
    """kubernetes/kubernetes#74839."""
    for drop in (True, False):
        tables = host_chains(Family.IPV4, host(None), localhost_node_ports=False, drop_invalid=drop)
        assert any("INVALID" in rule for rule in tables["filter"][names.FORWARD]) is drop
