"""The tracers against the oracle."""

from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

from rulecast_agent.dataplane.iptables.render import render_script
from rulecast_agent.dataplane.nftables.render import render_ruleset
from tests.trace import iptables, ruleset
from tests.trace.iptables import IptablesTracer
from tests.trace.oracle import Oracle
from tests.trace.packets import Packet, Shares
from tests.trace.tracer import Tracer
from tests.trace.worlds import World, packets


class AnyTracer(Protocol):
    """Of either mode."""

    rules_evaluated: int

    def shares(self, packet: Packet) -> Shares:
        """Every outcome with its share."""
        ...


def nftables_rules(world: World) -> ruleset.Ruleset:
    """What the agent compiles."""
    return ruleset.parse(render_ruleset(world.views, world.host, world.family))


def iptables_rules(world: World) -> iptables.Tables:
    """What the agent compiles."""
    return iptables.parse(render_script(world.views, world.host, world.family))


TRACERS: dict[str, Callable[[World], AnyTracer]] = {
    "nftables": lambda world: Tracer(nftables_rules(world), local=world.local),
    "iptables": lambda world: IptablesTracer(iptables_rules(world), local=world.local),
}
CLOSE = Fraction(1, 10**8)
"""iptables knows chances in parts of 2**31."""


def close(got: Shares, wanted: Shares) -> bool:
    """The same outcomes with the same shares."""
    return got.keys() == wanted.keys() and all(abs(got[each] - wanted[each]) < CLOSE for each in got)


def differences(world: World, tracer: AnyTracer) -> list[str]:
    """A line for each packet whose fate or shares are not as they should be."""
    oracle = Oracle(world.views, world.host, world.family, local=world.local)
    found = []
    for packet in packets(world):
        got, wanted = tracer.shares(packet), oracle.shares(packet)
        if not close(got, wanted):
            found.append(f"{packet}: {got}, not {wanted}")
    return found
