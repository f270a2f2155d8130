"""`rulecast cleanup`: remove everything that an agent put into this kernel."""

from collections.abc import Sequence

from rulecast.errors import UsageError
from rulecast.flags import Parser
from rulecast_agent.dataplane.base import DataplaneError
from rulecast_agent.dataplane.iptables.dataplane import IptablesDataplane
from rulecast_agent.dataplane.ipvs.dataplane import IpvsDataplane
from rulecast_agent.dataplane.nftables.dataplane import NftablesDataplane
from rulecast_agent.kernel import lock


def main(argv: Sequence[str]) -> int:
    """Remove the rules of every mode; 0 also when there were none. Raises UsageError."""
    Parser(prog="rulecast cleanup", allow_abbrev=False).parse_args(argv)
    # An agent that runs would put everything back.
    with lock.acquire():
        try:
            # Each one, also when the one before found something.
            found = [
                dataplane
                for dataplane in (NftablesDataplane(), IptablesDataplane(), IpvsDataplane())
                if dataplane.cleanup()
            ]
        except DataplaneError as error:
            raise UsageError(str(error)) from None
    print("removed what agents had programmed" if found else "nothing of Rulecast's was there")
    return 0
