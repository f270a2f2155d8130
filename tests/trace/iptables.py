"""Follows one packet through scripts for iptables-restore, over every way its random numbers can fall out.

Only what the agent writes is known; anything else is an error, not a guess.
"""

import ipaddress
import shlex
from collections.abc import Callable, Collection
from fractions import Fraction

from tests.trace.explore import Choose, explore
from tests.trace.packets import DROPPED, REJECTED, RESET, Outcome, Packet, Shares, passed

Rule = tuple[str, ...]
Tables = dict[str, dict[str, list[Rule]]]


def parse(script: str) -> Tables:
    """The rules by table and chain."""
    found: Tables = {}
    chains: dict[str, list[Rule]] = {}
    for line in script.splitlines():
        if line.startswith("*"):
            chains = found.setdefault(line[1:], {})
        elif line.startswith(":"):
            chains[line[1:].split()[0]] = []
        elif line.startswith("-A "):
            _, name, *rule = shlex.split(line)
            chains[name].append(tuple(rule))
        elif line.startswith("-I "):
            _, name, *rule = shlex.split(line)
            chains.setdefault(name, []).insert(0, tuple(rule))
        elif line != "COMMIT":
            raise ValueError(f"not known: {line}")
    return found


class IptablesTracer:
    """A node: its rules, and its own addresses."""

    def __init__(self, tables: Tables, *, local: Collection[str]) -> None:
        self.tables = tables
        self.local = frozenset(local)
        self.recent: dict[str, set[str]] = {}
        self.rules_evaluated = 0
        """By the last packet, at the most."""

    def shares(self, packet: Packet) -> Shares:
        """Every outcome with its share. Lists of clients are left as they were."""
        self.rules_evaluated = 0

        def run(choose: Choose) -> Outcome:
            way = _Way(self, packet, lambda share: choose([share, 1 - share]) == 0, update=False)
            outcome = way.run()
            self.rules_evaluated = max(self.rules_evaluated, way.evaluated)
            return outcome

        return explore(run)

    def send(self, packet: Packet, *, hit: Callable[[Fraction], bool]) -> Outcome:
        """One packet; `hit` decides each chance. Lists are updated."""
        return _Way(self, packet, hit, update=True).run()


class _EndedError(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class _Way:
    """One packet on its way."""

    def __init__(
        self, tracer: IptablesTracer, packet: Packet, hit: Callable[[Fraction], bool], *, update: bool
    ) -> None:
        self._tracer, self._packet, self._hit, self._update = tracer, packet, hit, update
        self._destination, self._port = packet.destination, packet.port
        self._mark = 0
        self._masqueraded = self._translated = False
        self.evaluated = 0

    def run(self) -> Outcome:
        sent_here = not self._packet.interface
        try:
            self._chain("nat", "OUTPUT" if sent_here else "PREROUTING")
            if sent_here:
                self._chain("filter", "OUTPUT")
                self._chain("nat", "POSTROUTING")
            if self._destination in self._tracer.local:
                self._chain("filter", "INPUT")
            elif not sent_here:
                self._chain("filter", "FORWARD")
                self._chain("nat", "POSTROUTING")
        except _EndedError as end:
            return end.outcome
        return passed(self._destination, self._port, masqueraded=self._masqueraded)

    def _chain(self, table: str, name: str) -> bool:
        """Whether the packet is done with this hook."""
        for rule in self._tracer.tables[table].get(name, ()):
            self.evaluated += 1
            at = rule.index("-j")
            if not self._matches(list(rule[:at])):
                continue
            target, options = rule[at + 1], rule[at + 2 :]
            if target == "RETURN":
                return False
            if self._target(table, target, options):
                return True
        return False

    def _target(self, table: str, target: str, options: Rule) -> bool:
        match target, *options:
            case ("ACCEPT",):
                return True
            case ("DROP",):
                assert table == "filter"
                raise _EndedError(DROPPED)
            case ("REJECT", "--reject-with", kind):
                assert table == "filter"
                raise _EndedError(RESET if kind == "tcp-reset" else REJECTED)
            case ("DNAT", "--to-destination", place):
                address, _, port = place.rpartition(":")
                self._destination, self._port, self._translated = address.strip("[]"), int(port), True
                return True
            case ("MASQUERADE", "--random-fully"):
                self._masqueraded = True
                return True
            case ("MARK", "--set-xmark", text):
                value, mask = (int(part, 16) for part in text.split("/"))
                self._mark = (self._mark & ~mask) ^ value
                return False
            case (name,) if name in self._tracer.tables[table]:
                return self._chain(table, name)
        raise ValueError(f"not known: {target} {options}")

    def _matches(self, rest: list[str]) -> bool:
        while rest:
            differs = rest[0] == "!"
            if differs:
                del rest[0]
            if self._one(rest) is differs:
                return False
        return True

    def _one(self, rest: list[str]) -> bool:
        """Take one match; those of a module come after its name and may be negated by themselves."""
        packet = self._packet
        option = rest.pop(0)
        if option == "-m":
            module = rest.pop(0)
            return self._module(module, rest)
        value = rest.pop(0)
        match option:
            case "-s":
                return _within(packet.source, value)
            case "-d":
                return _within(self._destination, value)
            case "-p":
                return packet.protocol == value
            case "-i":
                if value.endswith("+"):
                    return packet.interface.startswith(value[:-1])
                return packet.interface == value
            case "--dport":
                low, _, high = value.partition(":")
                return int(low) <= self._port <= int(high or low)
        raise ValueError(f"not known: {option} {value}")

    def _module(self, module: str, rest: list[str]) -> bool:
        if module in ("tcp", "udp", "sctp"):
            return True
        if module == "recent":
            return self._recent(rest)
        differs = rest[0] == "!"
        if differs:
            del rest[0]
        option, value = rest.pop(0), rest.pop(0)
        match module, option:
            case "comment", "--comment":
                found = True
            case "conntrack", "--ctstate":
                found = bool({"NEW", *(["DNAT"] if self._translated else [])} & set(value.split(",")))
            case "addrtype", "--src-type" | "--dst-type":
                address = self._packet.source if "src" in option else self._destination
                found = address in self._tracer.local or ipaddress.ip_address(address).is_loopback
            case "mark", "--mark":
                wanted, mask = (int(part, 16) for part in value.split("/"))
                found = self._mark & mask == wanted
            case "statistic", "--mode":
                assert rest.pop(0) == "--probability"
                # What the kernel makes of it: parts of 2**31.
                found = self._hit(Fraction(round(float(rest.pop(0)) * (1 << 31)), 1 << 31))
            case _:
                raise ValueError(f"not known: {module} {option}")
        return found is not differs

    def _recent(self, rest: list[str]) -> bool:
        words = {}
        while rest and rest[0].startswith("--") and rest[0] != "--dport":
            word = rest.pop(0)
            words[word] = rest.pop(0) if rest and not rest[0].startswith("-") else ""
        clients = self._tracer.recent.setdefault(words["--name"], set())
        if "--update" in words:
            return self._packet.source in clients
        assert "--set" in words
        if self._update:
            clients.add(self._packet.source)
        return True


def _within(address: str, cidr: str) -> bool:
    network = ipaddress.ip_network(cidr)
    value = ipaddress.ip_address(address)
    return value.version == network.version and value in network
