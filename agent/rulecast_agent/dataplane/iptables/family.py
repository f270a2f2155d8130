"""One family of the iptables mode: what is meant, and writing it."""

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.halving import halves
from rulecast_agent.dataplane.iptables import names
from rulecast_agent.dataplane.iptables.dispatch import Rules
from rulecast_agent.dataplane.iptables.host_rules import HOOKS, host_chains
from rulecast_agent.dataplane.iptables.script import deletions, section, sections
from rulecast_agent.dataplane.iptables.state import NAT, TABLES, Chains, State, Step
from rulecast_agent.kernel.iptables import Backend, Iptables, IptablesRefused

_log = logging.getLogger(__name__)

_LIMIT = {Backend.NFT: 400, Backend.LEGACY: 1_000_000}
"""Rules in a transaction. iptables-nft's time grows with the square; legacy copies the table each time."""
_SMALL = 2000
"""Rules up to which a change is one transaction a table."""


class Findings(msgspec.Struct):
    """What a write or a read-back came to."""

    errors: dict[ServiceKey, str] = {}
    operations: int = 0
    lines: list[str] = []
    """Differences that a read-back found, in words."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line adds."""

    localhost_node_ports: bool = False
    tcp_be_liberal: Callable[[], bool] = lambda: False
    """Whether conntrack lets pass what it cannot follow (the sysctl; read at each use)."""
    started: Callable[[], None] = lambda: None
    """Called once the first rules are in the kernel."""


class IptablesFamily:
    """Programs the services of one family."""

    def __init__(self, *, iptables: Iptables, family: Family, host: HostConfig, options: Options) -> None:
        self._iptables, self._family, self._options = iptables, family, options
        self._limit = _LIMIT[iptables.backend]
        self._host = host
        self._state = State(family=family, host=host)
        self._base = self._host_chains(host)

    @property
    def views(self) -> Mapping[ServiceKey, ServiceView]:
        """What is meant."""
        return self._state.views

    def start(self, views: Mapping[ServiceKey, ServiceView]) -> Findings:
        """Bring the kernel from whatever it holds to `views`. Nothing is hooked in before it is all there."""
        held = self._read()
        mine = {name: tuple(rules) for name, rules in held[NAT].items()}
        findings = Findings({}, 0, [])
        wanted = {
            key: {name: rules for name, rules in chains.items() if mine.get(name) != rules}
            for key, chains in self._state.change(views).own.items()
        }
        self._write_own(wanted, findings)
        if findings.errors:
            self._state.change(dict.fromkeys(findings.errors))
            # Of what was refused, a part may be there.
            held = self._read()
        else:
            for chains in wanted.values():
                held[NAT] |= {name: list(rules) for name, rules in chains.items()}
        try:
            findings.operations += len(self._repair(held, deletes=True))
        except IptablesRefused as error:
            # Where all services meet, something is refused: whose it is shows when they come by halves.
            _log.warning("the rules of some service are refused, so all are written anew: %s", error)
            findings.errors.clear()
            self._state = State(family=self._family, host=self._host)
            self._repair(self._read(), deletes=True)
            self._change(views, findings)
        return findings

    def change(self, changes: Mapping[ServiceKey, ServiceView | None]) -> Findings:
        """Write what differs. Raises IptablesRefused when what belongs to no service is refused."""
        findings = Findings({}, 0, [])
        self._change(changes, findings)
        return findings

    def rehost(self, host: HostConfig) -> Findings:
        """Follow another host configuration: every service is compiled anew, what differs is written."""
        self._host = host
        views = dict(self._state.views)
        base = self._host_chains(host)
        state = State(family=self._family, host=host)
        state.change(views)
        held = {
            table: {name: list(rules) for name, rules in self._meant()[table].items()} for table in TABLES
        }
        self._state, self._base = state, base
        return Findings({}, len(self._repair(held, deletes=True, hooks=False)), [])

    def follows_sysctl(self) -> bool:
        """What the host says of invalid packets is what the rules say."""
        return self._base == self._host_chains(self._host)

    def converge(self) -> Findings:
        """Read back, and write what is not as meant."""
        return Findings({}, 0, self._repair(self._read(), deletes=True))

    def hooked(self) -> bool:
        """Every hook, and the chains at which every packet passes, are as meant: a cheap look."""
        for table, hooks in HOOKS.items():
            meant = {**self._base[table], **self._state.roots(table)}
            there = self._iptables.rules_of(table, (*hooks, *meant))
            if any(rule not in there.get(chain, ()) for chain, rule in hooks.items()):
                return False
            if any(tuple(there.get(name, _ABSENT)) != rules for name, rules in meant.items()):
                return False
        return True

    @staticmethod
    def cleanup(iptables: Iptables) -> bool:
        """Take out the hooks, then the chains; True when there was something."""
        found = False
        limit = _LIMIT[iptables.backend]
        for table in TABLES:
            chains = iptables.peek(table).chains
            ours = [name for name in chains if name.startswith(names.PREFIX)]
            lines = [
                f"-D {chain} {rule}\n"
                for chain, rules in chains.items()
                for rule in rules
                if chain not in ours and f"-j {names.PREFIX}" in rule
            ]
            if ours or lines:
                found = True
                unhook = f"*{table}\n{''.join(lines)}COMMIT\n"
                emptied = sections(table, dict.fromkeys(ours, ()), limit=limit)
                iptables.restore([unhook, *emptied, *deletions(table, ours, limit=limit)])
        return found

    def _change(self, changes: Mapping[ServiceKey, ServiceView | None], findings: Findings) -> None:
        before = {key: self._state.views.get(key) for key in changes}
        step = self._state.change(changes)
        count = _count(step)
        if not count:
            return
        try:
            if count > _SMALL:
                self._write_large(step, before, findings)
            else:
                self._iptables.restore(self._transactions(step))
            findings.operations += count
        except IptablesRefused as error:
            back = self._state.change(before)
            for key in changes:
                findings.errors.pop(key, None)
            if count > _SMALL:
                self.converge()
            elif (found := self._undo(back)) and not findings.lines:
                # The kernel did not hold what we believed, so it may be nobody's fault: once more.
                findings.lines += found
                self._change(changes, findings)
                return
            if len(changes) == 1:
                findings.errors[next(iter(changes))] = str(error)
                return
            for half in halves(changes):
                self._change(half, findings)

    def _undo(self, back: Step) -> list[str]:
        """Write what was there before a refused change, a part of which may hold; what else was found."""
        try:
            self._iptables.restore(self._transactions(back))
        except IptablesRefused:
            return self.converge().lines
        return []

    def _transactions(self, step: Step) -> list[str]:
        nat = {name: rules for chains in step.own.values() for name, rules in chains.items()}
        found = []
        for table in TABLES:
            chains = {**(nat if table == NAT else {}), **step.dispatch[table]}
            if chains or step.deletes[table]:
                found.append(section(table, chains, deletes=step.deletes[table]))
        return found

    def _write_large(
        self, step: Step, before: Mapping[ServiceKey, ServiceView | None], findings: Findings
    ) -> None:
        self._write_own(step.own, findings)
        if findings.errors:
            # What is refused keeps what it had; the chains of the others are there already.
            back = self._state.change({key: before[key] for key in findings.errors if key in before})
            own = {name: rules for chains in back.own.values() for name, rules in chains.items()}
            self._iptables.restore(sections(NAT, own, limit=self._limit))
            for table in TABLES:
                step.dispatch[table] |= back.dispatch[table]
                step.deletes[table] += back.deletes[table]
            meant = self._meant()
            for table in TABLES:
                step.dispatch[table] = {
                    name: meant[table][name] for name in step.dispatch[table] if name in meant[table]
                }
                step.deletes[table] = [
                    name for name in dict.fromkeys(step.deletes[table]) if name not in meant[table]
                ]
        parts: list[str] = []
        for table in TABLES:
            parts += sections(table, step.dispatch[table], limit=self._limit)
        for table in TABLES:
            parts += deletions(table, step.deletes[table], limit=self._limit)
        if parts:
            self._iptables.restore(parts)

    def _write_own(self, wanted: Mapping[ServiceKey, Chains], findings: Findings) -> None:
        """Write services' own chains, to which nothing new goes yet; halve until the refused are found."""
        chains = {name: rules for each in wanted.values() for name, rules in each.items()}
        if not chains:
            return
        try:
            self._iptables.restore(sections(NAT, chains, limit=self._limit))
            findings.operations += len(chains)
        except IptablesRefused as error:
            filled = {key: each for key, each in wanted.items() if each}
            if len(filled) == 1:
                findings.errors[next(iter(filled))] = str(error)
                return
            for half in halves(filled):
                self._write_own(half, findings)

    def _repair(
        self, held: Mapping[str, Mapping[str, Sequence[str]]], *, deletes: bool, hooks: bool = True
    ) -> list[str]:
        """Bring the kernel from `held` to what is meant; what differed, in words."""
        parts: list[str] = []
        late: list[str] = []
        lines: list[str] = []
        meant = self._meant()
        for table in TABLES:
            there = held[table]
            wrong = {
                name: rules
                for name, rules in meant[table].items()
                if tuple(there.get(name, _ABSENT)) != rules
            }
            lines += [f"{table} {name}" for name in wrong]
            if wrong:
                absent = [name for name in wrong if name not in there]
                if len(absent) < len(wrong) or table in self._unordered(held):
                    # Chains may go to others that are written later.
                    parts += sections(table, dict.fromkeys(absent, ()), limit=self._limit)
                parts += sections(table, wrong, limit=self._limit)
            stale = [name for name in there if name.startswith(names.PREFIX) and name not in meant[table]]
            if deletes and stale:
                lines += [f"{table} {name}" for name in stale]
                # Emptied first: they may go to each other.
                late += sections(table, dict.fromkeys(stale, ()), limit=self._limit)
                late += deletions(table, stale, limit=self._limit)
            missing = [
                (chain, rule) for chain, rule in HOOKS[table].items() if rule not in there.get(chain, ())
            ]
            if hooks and missing:
                lines += [f"{table} {chain} {rule}" for chain, rule in missing]
                late.insert(0, section(table, {}, hooks=missing))
        if parts or late:
            self._iptables.restore([*parts, *late])
        return lines

    @staticmethod
    def _unordered(held: Mapping[str, Mapping[str, Sequence[str]]]) -> Sequence[str]:
        """Tables of which something of ours is there already."""
        return [table for table, chains in held.items() if any(n.startswith(names.PREFIX) for n in chains)]

    def _meant(self) -> dict[str, Chains]:
        return self._state.tables(self._base)

    def _host_chains(self, host: HostConfig) -> dict[str, dict[str, Rules]]:
        return host_chains(
            self._family,
            host,
            localhost_node_ports=self._options.localhost_node_ports,
            drop_invalid=not self._options.tcp_be_liberal(),
        )

    def _read(self) -> dict[str, dict[str, list[str]]]:
        return {table: self._iptables.save(table).chains for table in TABLES}


_ABSENT = ("\0",)


def _count(step: Step) -> int:
    """Rules and chains to write or delete."""
    own = sum(len(rules) + 1 for chains in step.own.values() for rules in chains.values())
    dispatch = sum(len(rules) + 1 for chains in step.dispatch.values() for rules in chains.values())
    return own + dispatch + sum(map(len, step.deletes.values()))
