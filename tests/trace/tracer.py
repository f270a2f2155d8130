"""Follows one packet through a table, over every value that a random number can have."""

import ipaddress
from collections.abc import Callable, Collection
from fractions import Fraction

from tests.trace.explore import Choose, explore
from tests.trace.packets import DROPPED, REJECTED, RESET, Outcome, Packet, Shares, passed
from tests.trace.ruleset import Chain, Key, Ruleset, key_and_value, split


class _EndedError(Exception):
    """The packet's way is over."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Tracer:
    """A node: its rules, and its own addresses."""

    def __init__(self, ruleset: Ruleset, *, local: Collection[str]) -> None:
        self.ruleset = ruleset
        self.local = frozenset(local)
        self.rules_evaluated = 0
        """By the last packet, at the most."""
        self._hooks: dict[str, list[Chain]] = {}
        for chain in ruleset.chains.values():
            if chain.hook is not None:
                self._hooks.setdefault(chain.hook.name, []).append(chain)
        for chains in self._hooks.values():
            chains.sort(key=lambda chain: chain.hook.priority if chain.hook else 0)

    def shares(self, packet: Packet) -> Shares:
        """Every outcome with its share. Sets that rules update are left as they were."""
        self.rules_evaluated = 0

        def run(choose: Choose) -> Outcome:
            way = _Way(self, packet, lambda limit: choose([Fraction(1, limit)] * limit), update=False)
            outcome = way.run()
            self.rules_evaluated = max(self.rules_evaluated, way.evaluated)
            return outcome

        return explore(run)

    def send(self, packet: Packet, *, choose: Callable[[int], int]) -> Outcome:
        """One packet; `choose` picks below a limit. Sets are updated."""
        way = _Way(self, packet, choose, update=True)
        return way.run()

    def chains(self, hook: str) -> list[Chain]:
        """In the order in which the kernel calls them."""
        return self._hooks.get(hook, [])


class _Way:
    """One packet on its way."""

    def __init__(self, tracer: Tracer, packet: Packet, choose: Callable[[int], int], *, update: bool) -> None:
        self._tracer, self._choose, self._update = tracer, choose, update
        self._table = tracer.ruleset
        self._packet = packet
        self._destination, self._port = packet.destination, packet.port
        self._mark = 0
        self._masqueraded = False
        self._key: Key = ()
        """What the expression before a vmap came to."""
        self.evaluated = 0

    def run(self) -> Outcome:
        sent_here = not self._packet.interface
        try:
            self._hook("output" if sent_here else "prerouting")
            to_here = self._destination in self._tracer.local
            if sent_here:
                self._hook("postrouting")
            if to_here:
                self._hook("input")
            elif not sent_here:
                self._hook("forward")
                self._hook("postrouting")
        except _EndedError as end:
            return end.outcome
        return passed(self._destination, self._port, masqueraded=self._masqueraded)

    def _hook(self, name: str) -> None:
        for chain in self._tracer.chains(name):
            self._chain(chain)

    def _chain(self, chain: Chain) -> bool:
        """Whether a verdict was given (other than one that ends the packet)."""
        for rule in chain.rules:
            self.evaluated += 1
            if self._rule(list(rule)):
                return True
        return False

    def _rule(self, rest: list[str]) -> bool:
        """Take statement after statement off the rule until one does not match."""
        while rest:
            head = rest[0]
            if head in ("drop", "accept", "goto", "jump", "reject", "dnat", "masquerade"):
                return self._verdict(rest)
            if head == "update":
                self._add(rest)
                del rest[: rest.index("}") + 1]
            elif rest[:3] == ["meta", "mark", "set"]:
                self._set_mark(rest)
            elif not self._match(rest):
                return False
            elif rest[:1] == ["vmap"]:
                return self._vmap(rest)
        return False

    def _verdict(self, words: list[str]) -> bool:
        match words:
            case ["accept"]:
                return True
            case ["drop"]:
                raise _EndedError(DROPPED)
            case ["reject"]:
                raise _EndedError(REJECTED)
            case ["reject", "with", "tcp", "reset"]:
                raise _EndedError(RESET)
            case ["goto", name]:
                self._chain(self._table.chains[name])
                return True
            case ["jump", name]:
                return self._chain(self._table.chains[name])
            case ["masquerade", "fully-random"]:
                self._masqueraded = True
                return True
            case ["dnat", "ip" | "ip6", "to", *target]:
                return self._translate(target)
        raise ValueError(f"not known: {words}")

    def _translate(self, target: list[str]) -> bool:
        if "map" in target:
            key = self._take(target)
            value = self._table.maps[target[1].removeprefix("@")].get(key)
            if value is None:
                return False
            self._destination, port = value.split(" . ")
        else:
            (text,) = target
            self._destination, _, port = text.rpartition(":")
            self._destination = self._destination.strip("[]")
        self._port = int(port)
        return True

    def _vmap(self, rest: list[str]) -> bool:
        key = self._key
        if rest[1] == "{":
            verdict = dict(key_and_value(part) for part in split(rest[2 : rest.index("}")])).get(key)
        else:
            verdict = self._table.maps[rest[1].removeprefix("@")].get(key)
        return verdict is not None and self._verdict(verdict.split())

    def _match(self, rest: list[str]) -> bool:
        """Take an expression and what it is compared with; a vmap is left for the caller."""
        if rest[:3] == ["meta", "mark", "&"]:
            bits, (differs, zero) = int(rest[3], 16), rest[4:6]
            assert (differs, zero) == ("!=", "0"), rest
            del rest[:6]
            return bool(self._mark & bits)
        self._key = self._take(rest)
        if rest[:1] == ["vmap"]:
            return True
        differs = rest[:1] == ["!="]
        if differs:
            del rest[0]
        return self._compare(rest) is not differs

    def _compare(self, rest: list[str]) -> bool:
        word = rest.pop(0)
        if word.startswith("@"):
            return self._key in self._table.sets[word[1:]]
        (value,) = self._key
        if word == "{":
            at = rest.index("}")
            members = [part[0] for part in split(rest[:at])]
            del rest[: at + 1]
        else:
            members = [word]
        return any(_equal(value, member) for member in members)

    def _take(self, rest: list[str]) -> Key:
        """Take a field, or several with dots between them, and give its values."""
        values = []
        while True:
            values.append(self._field(rest))
            if rest[:1] != ["."]:
                return tuple(values)
            del rest[0]

    def _field(self, rest: list[str]) -> str:
        length, value = self._read(rest)
        del rest[:length]
        return value

    def _read(self, rest: list[str]) -> tuple[int, str]:
        """How many words a field has, and its value."""
        packet = self._packet
        match rest:
            case ["ip" | "ip6", "saddr", *_]:
                return 2, packet.source
            case ["ip" | "ip6", "daddr", *_]:
                return 2, self._destination
            case ["th", "dport", *_]:
                return 2, str(self._port)
            case ["tcp" | "udp" | "sctp" as protocol, "dport", *_]:
                # What nft adds to such a field: a match on the protocol.
                return 2, str(self._port) if protocol == packet.protocol else "none"
            case ["meta", "l4proto", *_]:
                return 2, packet.protocol
            case ["iifname", *_]:
                return 1, packet.interface
            case ["ct", "state", *_]:
                return 2, "new"
            case ["fib", "saddr" | "daddr" as which, "type", *_]:
                address = packet.source if which == "saddr" else self._destination
                return 3, "local" if _is_local(address, self._tracer.local) else "unicast"
            case ["numgen", "random", "mod", limit, "offset", offset, *_]:
                return 6, str(self._choose(int(limit)) + int(offset))
            case ["numgen", "random", "mod", limit, *_]:
                return 4, str(self._choose(int(limit)))
        raise ValueError(f"not known: {rest}")

    def _set_mark(self, rest: list[str]) -> None:
        match rest[:7]:
            case ["meta", "mark", "set", "meta", "mark", "or", bits]:
                self._mark |= int(bits, 16)
            case ["meta", "mark", "set", "meta", "mark", "&", bits]:
                self._mark &= int(bits, 16)
            case _:
                raise ValueError(f"not known: {rest}")
        del rest[:7]

    def _add(self, rest: list[str]) -> None:
        # update @NAME { ip saddr timeout Ns }
        if self._update:
            self._table.sets[rest[1].removeprefix("@")].add((self._packet.source,))


def _equal(value: str, wanted: str) -> bool:
    if wanted.startswith('"'):
        name = wanted.strip('"')
        return value.startswith(name[:-1]) if name.endswith("*") else value == name
    if value == wanted:
        return True
    if not any(mark in wanted for mark in ".:"):
        return False
    network = ipaddress.ip_network(wanted)
    address = ipaddress.ip_address(value)
    return address.version == network.version and address in network


def _is_local(address: str, local: Collection[str]) -> bool:
    return address in local or ipaddress.ip_address(address).is_loopback
