"""What goes in and what comes out."""

import enum
from fractions import Fraction
from typing import NamedTuple


class Packet(NamedTuple):
    """The first packet of a flow."""

    source: str
    destination: str
    port: int
    protocol: str = "tcp"
    interface: str = "eth0"
    """Where it came in; "" when this node sends it."""


class Fate(enum.Enum):
    """How a packet's way through the node ends."""

    PASSED = "passed"
    RESET = "reset"
    """A TCP RST."""
    REJECTED = "rejected"
    """An ICMP error."""
    DROPPED = "dropped"


class Outcome(NamedTuple):
    """Fate, and for what passed also where to and whether with the node's own source address."""

    fate: Fate
    destination: str = ""
    port: int = 0
    masqueraded: bool = False


RESET, REJECTED, DROPPED = Outcome(Fate.RESET), Outcome(Fate.REJECTED), Outcome(Fate.DROPPED)
Shares = dict[Outcome, Fraction]
"""How much of the traffic has each outcome; sums to 1."""


def passed(destination: str, port: int, *, masqueraded: bool = False) -> Outcome:
    """It goes on to there."""
    return Outcome(Fate.PASSED, destination, port, masqueraded)
