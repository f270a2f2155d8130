"""The tracer against the oracle."""

from rulecast_agent.dataplane.nftables.render import render_ruleset
from tests.trace.oracle import Oracle
from tests.trace.ruleset import Ruleset, parse
from tests.trace.tracer import Tracer
from tests.trace.worlds import World, packets


def rules(world: World) -> Ruleset:
    """What the agent compiles."""
    return parse(render_ruleset(world.views, world.host, world.family))


def differences(world: World, ruleset: Ruleset) -> list[str]:
    """A line for each packet whose fate or shares are not as they should be."""
    tracer = Tracer(ruleset, local=world.local)
    oracle = Oracle(world.views, world.host, world.family, local=world.local)
    found = []
    for packet in packets(world):
        got, wanted = tracer.shares(packet), oracle.shares(packet)
        if got != wanted:
            found.append(f"{packet}: {got}, not {wanted}")
    return found
