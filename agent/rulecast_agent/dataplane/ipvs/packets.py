"""The nft table beside IPVS, in the kernel: rules by text, elements by netlink."""

from collections.abc import Mapping

from rulecast.model import Family
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.ipvs import rules
from rulecast_agent.dataplane.ipvs.planner import ABSENT, Absent, Element
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.kernel.nft import Execer
from rulecast_agent.kernel.nft_netlink import ElementMessage, NftSocket, Value

Writes = dict[Element, tuple[Value | Absent, Value | Absent]]
"""Elements that change: what they are before, and after."""


class PacketTable:
    """One family's table."""

    def __init__(self, *, family: Family, socket: NftSocket, nft: Execer, route_mark: int = 0) -> None:
        """`route_mark` is needed to program it."""
        self._family, self._socket, self._nft, self._route_mark = family, socket, nft, route_mark
        self._protocol = names.NFPROTO[family]
        self._firewalls: set[str] = set()
        self._unused: list[str] = []

    def there(self) -> bool:
        """The table exists."""
        return self._socket.has_table(self._protocol, rules.TABLE)

    def program(self, host: HostConfig, firewalls: Mapping[str, tuple[str, ...]]) -> bool:
        """Bring the rules to what the host needs, in one transaction; whether anything had to change."""
        made = rules.chains(self._family, host, route_mark=self._route_mark)
        wanted = {name: chain.rules for name, chain in made.items()}
        wanted |= {
            name: (rules.firewall_rule(self._family, cidrs), "goto classify")
            for name, cidrs in firewalls.items()
        }
        marks = {name: [names.short_hash(rule)[:8] for rule in each] for name, each in wanted.items()}
        there = self.there()
        held = self._socket.rule_comments(self._protocol, rules.TABLE) if there else {}
        self._firewalls = set(firewalls)
        self._unused = sorted(held.keys() - wanted.keys())
        if there and all(held.get(name, []) == mark for name, mark in marks.items()):
            return False
        self._nft.run(rules.script(self._family, made, firewalls))
        return True

    def delete_unused(self) -> None:
        """Delete chains that the last `program` found and nothing needs; no element may lead to them."""
        if self._unused:
            self._nft.run(rules.deletion_script(self._family, self._unused))
            self._unused = []

    def add_firewalls(self, firewalls: Mapping[str, tuple[str, ...]]) -> None:
        """Make the chains of source ranges that are not there yet."""
        new = {name: firewalls[name] for name in firewalls.keys() - self._firewalls}
        if new:
            self._nft.run(rules.firewall_script(self._family, new))
            self._firewalls |= new.keys()

    def elements(self) -> dict[Element, Value]:
        """Every element of our sets and maps; an older table may lack some."""
        there = self._socket.sets(self._protocol, rules.TABLE)
        return {
            (name, key): value
            for name in rules.sets(self._family).keys() & there.keys()
            for key, value in self._socket.elements(self._protocol, rules.TABLE, name).items()
        }

    def write(self, changes: Writes) -> int:
        """Change elements, in one transaction."""
        deletes: dict[str, list[tuple[bytes, Value]]] = {}
        adds: dict[str, list[tuple[bytes, Value]]] = {}
        for (name, key), (before, after) in changes.items():
            if before == after:
                continue
            if not isinstance(before, Absent):
                deletes.setdefault(name, []).append((key, before))
            if not isinstance(after, Absent):
                adds.setdefault(name, []).append((key, after))
        messages = [ElementMessage(add=False, set_name=name, elements=some) for name, some in deletes.items()]
        messages += [ElementMessage(add=True, set_name=name, elements=some) for name, some in adds.items()]
        return self._socket.commit_elements(self._protocol, rules.TABLE, messages) if messages else 0

    def cleanup(self) -> bool:
        """Delete the table; whether it was there."""
        found = self.there()
        if found:
            self._socket.delete_table(self._protocol, rules.TABLE)
        return found


def differences(held: Mapping[Element, Value], meant: Mapping[Element, Value]) -> Writes:
    """What to write to get from one to the other."""
    found: Writes = {}
    for element in {**held, **meant}:
        before: Value | Absent = held.get(element, ABSENT)
        after: Value | Absent = meant.get(element, ABSENT)
        if before != after:
            found[element] = (before, after)
    return found
