"""Everything of one family as scripts for iptables-restore: for people, tests and measurements. Pure."""

from collections.abc import Mapping

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.iptables.host_rules import HOOKS, host_chains
from rulecast_agent.dataplane.iptables.script import section
from rulecast_agent.dataplane.iptables.state import TABLES, State


def render_script(
    views: Mapping[ServiceKey, ServiceView],
    host: HostConfig,
    family: Family,
    *,
    localhost_node_ports: bool = False,
    drop_invalid: bool = True,
) -> str:
    """One transaction for each table, hooks included."""
    state = State(family=family, host=host)
    state.change(views)
    base = host_chains(family, host, localhost_node_ports=localhost_node_ports, drop_invalid=drop_invalid)
    chains = state.tables(base)
    return "".join(section(table, chains[table], hooks=HOOKS[table].items()) for table in TABLES)
