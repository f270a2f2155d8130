"""Which addresses are this node's own, by routes of our interface. See `docs/ipvs.md`."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from rulecast.model import Family
from rulecast_agent.dataplane.ipvs import rules
from rulecast_agent.dataplane.ipvs.packets import Writes
from rulecast_agent.dataplane.ipvs.planner import ABSENT, Element, LocalAddress
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.kernel.links import LOCAL_TABLE, Dummy
from rulecast_agent.kernel.nft_netlink import Value
from rulecast_agent.kernel.routing_rules import MarkRule, RoutingRules

MARKED_TABLE = 3157
"""Of routes for marked packets: not of the numbers that CNI plugins and VPNs are known to take."""
_PRIORITY = 300
"""Before the rules by source of CNI plugins, after the table local."""


class Routing(NamedTuple):
    """What both families share."""

    dummy: Dummy
    rules: RoutingRules
    mark: int
    """The bit of packets that are to be delivered here, whosever address they are sent to."""


def local_addresses(dummy: Dummy, family: Family) -> set[LocalAddress]:
    """What is local by routes of our interface."""
    return {
        LocalAddress(address, table == MARKED_TABLE)
        for table in (LOCAL_TABLE, MARKED_TABLE)
        for address in dummy.addresses(family, table=table)
    }


class Addresses:
    """One family's. An address that no service has any more stays while connections to it are open."""

    def __init__(self, *, family: Family, routing: Routing) -> None:
        self._family = family
        self._dummy, self._rules, mark = routing
        self._rule = MarkRule(_PRIORITY, mark, MARKED_TABLE)
        self.held: set[LocalAddress] = set()
        """Those that the kernel has."""
        self._leaving: set[LocalAddress] = set()

    def read(self) -> None:
        """Believe what the kernel has."""
        self.held = local_addresses(self._dummy, self._family)
        self._leaving &= self.held

    def differences(self, wanted: Collection[LocalAddress]) -> dict[LocalAddress, bool]:
        """What to add to and take from what is there, beside what leaves already."""
        missing = {one for one in wanted if one not in self.held or one in self._leaving}
        stale = self.held - set(wanted) - self._leaving
        return dict.fromkeys(missing, True) | dict.fromkeys(stale, False)

    def elements(self, wanted: Iterable[LocalAddress]) -> dict[Element, Value]:
        """What the table is meant to know, when `wanted` are here beside what leaves."""
        here = {_element(rules.EXTERNAL_IPS if one.marked else rules.VIRTUAL_IPS, one) for one in wanted}
        here |= {
            _element(rules.EXTERNAL_IPS if one.marked else rules.LEAVING_IPS, one) for one in self._leaving
        }
        return dict.fromkeys(here)

    def begin(self, changes: Mapping[LocalAddress, bool]) -> Writes:
        """Some come, some are to leave: how the table's elements differ by it."""
        writes: Writes = {}
        for one, there in changes.items():
            left = one in self._leaving
            if there is (one in self.held and not left):
                continue
            (self._leaving.discard if there else self._leaving.add)(one)
            if one.marked:
                if there and not left:
                    writes[_element(rules.EXTERNAL_IPS, one)] = (ABSENT, None)
                continue
            if left or not there:
                writes[_element(rules.LEAVING_IPS, one)] = (None, ABSENT) if there else (ABSENT, None)
            writes[_element(rules.VIRTUAL_IPS, one)] = (ABSENT, None) if there else (None, ABSENT)
        return writes

    def add(self, changes: Mapping[LocalAddress, bool]) -> None:
        """Make local what comes."""
        self._change([one for one, there in changes.items() if there and one not in self.held], add=True)

    def retire(self, used: Collection[str]) -> Writes:
        """Take away what leaves and is not in `used`; elements that go with it."""
        gone = [one for one in self._leaving if one.address not in used]
        self._change(gone, add=False)
        self._leaving.difference_update(gone)
        names = ((rules.EXTERNAL_IPS if one.marked else rules.LEAVING_IPS, one) for one in gone)
        return {_element(*each): (None, ABSENT) for each in names}

    def ensure_rule(self) -> bool:
        """The rule by which marked packets find their routes; whether anything was written."""
        return self._rules.ensure(self._family, self._rule)

    def _change(self, some: Collection[LocalAddress], *, add: bool) -> None:
        for table in (LOCAL_TABLE, MARKED_TABLE):
            mine = [one for one in some if one.marked is (table == MARKED_TABLE)]
            if not mine:
                continue
            texts = sorted(one.address for one in mine)
            failed = self._dummy.change(
                self._family, add=texts if add else (), remove=() if add else texts, table=table
            )
            if add:
                self.held.update(one for one in mine if one.address not in failed)
            else:
                self.held.difference_update(mine)


def _element(name: str, one: LocalAddress) -> Element:
    return name, names.pack_address(one.address)
