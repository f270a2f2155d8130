"""One family's table in the kernel: load or adopt, change, read back and mend."""

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.halving import halves
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.dataplane.nftables.adopt import Elements, take_slots
from rulecast_agent.dataplane.nftables.affinity import affinity_set
from rulecast_agent.dataplane.nftables.findings import Findings
from rulecast_agent.dataplane.nftables.layout import arranged
from rulecast_agent.dataplane.nftables.planner import Plan, State, host_addresses
from rulecast_agent.dataplane.nftables.render import create_table, element_text, script, write_chains
from rulecast_agent.dataplane.nftables.rules import Chain, declare, set_shapes
from rulecast_agent.kernel.nft import Execer, NftMissing, NftRefused
from rulecast_agent.kernel.nft_netlink import (
    ChainInfo,
    ElementMessage,
    NftSocket,
    Refused,
    SetInfo,
    Value,
)

_log = logging.getLogger(__name__)
LOAD_CHUNK = 2500
"""Services a transaction while nothing is hooked: bounds memory, costs no time (measured)."""
UNUSED_SECONDS = 10.0
"""How long a chain that nothing uses stays: counts of endpoints come back. It must be gone from the maps in
an earlier transaction in any case, or kernels before 6.2 refuse to delete it."""


class FamilyTable:
    """Brings one family's table from state to state. Exceptions of the kernel layer pass through."""

    def __init__(
        self,
        *,
        family: Family,
        host: HostConfig,
        socket: NftSocket,
        nft: Execer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.family = family
        self.state = State(family=family, host=host)
        self._nfproto = names.NFPROTO[family]
        self._socket = socket
        self._nft = nft
        self._clock = clock
        self._unused: dict[str, float] = {}
        self.commits = 0
        """Transactions that the kernel took; each raises the ruleset's generation by one."""

    def start(self, views: Mapping[ServiceKey, ServiceView]) -> Findings:
        """Load `views` into an empty kernel, or adopt the table that is there."""
        self.state = State(family=self.family, host=self.state.host)
        self._unused = {}
        if not self._socket.has_table(self._nfproto, names.TABLE):
            return self._load(views)
        self.state.merge(self.state.plan(dict(views)))
        return self.converge(adopt=True)

    def change(self, changes: Mapping[ServiceKey, ServiceView | None]) -> Findings:
        """Apply changed services. What is refused is found by halving and keeps what it had."""
        findings = Findings()
        self._change(dict(changes), findings)
        if findings.errors:
            # A half-written change of a refused service, such as its affinity chains, is undone by this.
            self._mend(findings)
        return findings

    def _mend(self, findings: Findings) -> int:
        """Converge; what had to be dropped for it is added to `findings`."""
        found = self.converge()
        for key, view in found.dropped.items():
            findings.errors.setdefault(key, found.errors[key])
            findings.dropped.setdefault(key, view)
        return found.count

    def _change(self, changes: dict[ServiceKey, ServiceView | None], findings: Findings) -> None:
        plan = self.state.plan(changes)
        try:
            self._write(plan)
        except (NftRefused, Refused) as refused:
            codes = {code for _, code in refused.failures} if isinstance(refused, Refused) else set()
            # The kernel may not have what we believe: mend that once, then see whether it still refuses.
            if codes & {errno.ENOENT, errno.EEXIST} and not findings.mended:
                findings.mended = True
                if self._mend(findings):
                    self._change(changes, findings)
                    return
            if isinstance(refused, NftRefused) and not findings.usable:
                self._check_nft()
                findings.usable = True
            bad = self._refused_chains(plan) if isinstance(refused, NftRefused) else {}
            if bad:
                for key, layout in plan.layouts.items():
                    hit = bad.keys() & self.state.objects(layout)[0].keys() if layout else ()
                    for name in hit:
                        findings.errors[key] = bad[name]
                rest = {key: view for key, view in changes.items() if key not in findings.errors}
                if rest and len(rest) < len(changes):
                    self._change(rest, findings)
                    return
            if len(changes) == 1:
                findings.errors[next(iter(changes))] = str(refused)
                return
            for half in halves(changes):
                self._change(half, findings)
            return
        findings.operations += plan.operations
        for key, layout in plan.layouts.items():
            if layout and max(len(layout.view.cluster), len(layout.view.local)) > names.LOCAL_OFFSET:
                _log.warning("%s: endpoints beyond the first %d get no traffic", key, names.LOCAL_OFFSET)
        self._note_unused(self.state.merge(plan))

    def _check_nft(self) -> None:
        """Tell a bad service from an nft that takes nothing. Raises NftMissing."""
        try:
            self._nft.run("\n".join(create_table(self.family)) + "\n", check=True)
        except NftRefused as refused:
            raise NftMissing(f"nft takes nothing: {refused}") from refused

    def _refused_chains(self, plan: Plan) -> dict[str, str]:
        """Shared chains that are refused by themselves: halving would try every service that needs them."""
        bad = {}
        for name, chain in plan.chains.items():
            if self.state.writer.pick_chain(name) is not None:
                try:
                    lines = [*create_table(self.family), *write_chains(self.family, {name: chain})]
                    self._nft.run("\n".join(lines) + "\n", check=True)
                except NftRefused as refused:
                    bad[name] = str(refused)
        return bad

    def rehost(self, host: HostConfig) -> Findings:
        """Compile for another host configuration and write what differs."""
        self.state.use_host(host)
        layouts = self.state.layouts
        views = {key: layout.view for key, layout in layouts.items()}
        fresh = State(family=self.family, host=host)
        fresh.merge(fresh.plan(views))
        fresh.layouts = {
            key: arranged(layouts[key], lay.view, lay.frontends) for key, lay in fresh.layouts.items()
        }
        self.state = fresh
        return self.converge()

    def intact(self) -> bool:
        """Whether chains, rules, sets and, where the kernel tells, element counts are ours."""
        if not self._socket.has_table(self._nfproto, names.TABLE):
            return False
        chains, comments, sets = self._structure()
        desired = {**self.state.desired_chains(), **self.state.writer.base_chains()}
        for name, chain in desired.items():
            info = chains.get(name)
            if info is None or info.hook != chain.kernel_hook:
                return False
            if tuple(comments.get(name, ())) != chain.fingerprint:
                return False
        if any(name not in desired and name not in self._unused for name in chains):
            return False
        for name in set_shapes(self.family):
            if name not in sets or sets[name].count not in (-1, self.state.counts[name]):
                return False
        return all(name in sets for name in self.state.affinity_sets)

    def converge(self, *, adopt: bool = False) -> Findings:
        """Read everything back and write the differences. With `adopt` take over the slots that are found."""
        if not self._socket.has_table(self._nfproto, names.TABLE):
            before = self.state
            views = {key: layout.view for key, layout in before.layouts.items()}
            self.state = State(family=self.family, host=before.host)
            self._unused = {}
            try:
                findings = self._load(views)
            except Exception:
                # What is meant must not be lost with what is there.
                self.state = before
                raise
            findings.dropped = {key: views[key] for key in findings.errors}
            findings.add(f"table {names.WORD[self.family]} {names.TABLE} is missing")
            return findings
        findings = Findings()
        chains, comments, sets = self._structure()
        shapes = set_shapes(self.family)
        for name, shape in shapes.items():
            had = sets.get(name)
            if had and (had.key_length, had.data_length) != (shape.key_length, shape.data_length):
                return self._rebuild(f"set {name} has another shape")
        found: Elements = {
            n: self._socket.elements(self._nfproto, names.TABLE, n) for n in shapes if n in sets
        }
        if adopt:
            take_slots(self.state.layouts, found)
        lines = [*create_table(self.family)] if any(n not in sets for n in shapes) else []
        for name in shapes.keys() - sets.keys():
            findings.add(f"set {name} is missing")
        missing = {n: d for n, d in self.state.desired_sets().items() if n not in sets}
        for name in missing:
            findings.add(f"set {name} is missing")
        lines += declare(self.family, missing)
        desired = {**self.state.desired_chains(), **self.state.writer.base_chains()}
        write: dict[str, Chain] = {}
        moved: set[str] = set()
        at = f"{names.WORD[self.family]} {names.TABLE}"
        for name, chain in desired.items():
            info = chains.get(name)
            if info is None:
                findings.add(f"chain {name} is missing")
            elif info.hook != chain.kernel_hook:
                if chain.hook is None:
                    return self._rebuild(f"chain {name} is hooked")
                findings.add(f"chain {name} is hooked elsewhere")
                lines += [f"flush chain {at} {name}", f"delete chain {at} {name}"]
                moved.add(name)
            elif tuple(comments.get(name, ())) != chain.fingerprint:
                findings.add(f"rules of chain {name} differ")
            else:
                continue
            write[name] = chain
        lines += write_chains(self.family, write, present=chains.keys() - moved)
        if lines:
            self._run(lines)
        self.state.written = {name: chain.fingerprint for name, chain in desired.items() if not chain.hook}
        self._converge_elements(found, findings)
        for name in (*chains, *sets):
            if name not in desired and name not in shapes and name not in self.state.affinity_sets:
                if name not in self._unused:
                    findings.add(f"{name} is not wanted")
                self._unused.setdefault(name, self._clock())
        findings.operations += len(lines)
        return findings

    def sweep(self, *, everything: bool = False) -> int:
        """Delete chains and sets that nothing has used for a while, in a transaction of their own."""
        now = self._clock()
        due = [n for n, since in self._unused.items() if everything or now - since >= UNUSED_SECONDS]
        due = [n for n in due if n not in self.state.uses and n not in self.state.affinity_sets]
        if not due:
            return 0
        chains, _, sets = self._structure()
        at = f"{names.WORD[self.family]} {names.TABLE}"
        lines = [f"flush chain {at} {n}" for n in due if n in chains]
        lines += [f"delete chain {at} {n}" for n in due if n in chains]
        lines += [f"delete set {at} {n}" for n in due if n in sets]
        for name in due:
            self._unused.pop(name)
            self.state.written.pop(name, None)
        if lines:
            self._run(lines)
        return len(lines)

    def _load(self, views: Mapping[ServiceKey, ServiceView]) -> Findings:
        """First load: nothing is hooked until all is there, so it need not be one transaction."""
        findings = Findings()
        state = self.state
        fixed = state.writer.fixed_chains()
        self._run([*create_table(self.family), *write_chains(self.family, fixed)])
        state.written = {name: chain.fingerprint for name, chain in fixed.items()}
        keys = list(views)
        for start in range(0, len(keys), LOAD_CHUNK):
            self._change({key: views[key] for key in keys[start : start + LOAD_CHUNK]}, findings)
        addresses = [(key, None) for key in host_addresses(self.family, state.host)]
        if addresses:
            self._commit([ElementMessage(True, names.NODEPORT_IPS, addresses)])
        state.counts[names.NODEPORT_IPS] = len(addresses)
        self._run(list(write_chains(self.family, state.writer.base_chains())))
        findings.operations += 1
        return findings

    def _rebuild(self, why: str) -> Findings:
        """Another program's or version's shapes are in the way: the table anew, in one transaction."""
        findings = Findings()
        findings.add(why)
        self._run([f"delete table {names.WORD[self.family]} {names.TABLE}", *script(self.state)])
        self._unused = {}
        self.state.written = {name: chain.fingerprint for name, chain in self.state.desired_chains().items()}
        self.state.counts.clear()
        for name, elements in self.state.desired_elements().items():
            self.state.counts[name] = len(elements)
        findings.operations = sum(self.state.counts.values())
        return findings

    def _converge_elements(self, found: Elements, findings: Findings) -> None:
        desired = self.state.desired_elements()
        deletes: list[tuple[str, bytes, Value]] = []
        adds: list[tuple[str, bytes, Value]] = []
        for name in set_shapes(self.family):
            have, want = found.get(name, {}), desired.get(name, {})
            self.state.counts[name] = len(want)
            if have == want:
                continue
            for key, value in have.items():
                if key not in want or want[key] != value:
                    deletes.append((name, key, value))
                    findings.add(f"foreign element in {name}: {element_text(name, self.family, key, value)}")
            for key, value in want.items():
                if key not in have:
                    findings.add(f"missing element in {name}: {element_text(name, self.family, key, value)}")
                if key not in have or have[key] != value:
                    adds.append((name, key, value))
        if not deletes and not adds:
            return
        findings.operations += len(deletes) + len(adds)
        try:
            self._commit([*_messages(False, deletes), *_messages(True, adds)])
        except Refused:
            self._converge_by_service(deletes, adds, findings)

    def _converge_by_service(
        self,
        deletes: list[tuple[str, bytes, Value]],
        adds: list[tuple[str, bytes, Value]],
        findings: Findings,
    ) -> None:
        """Some element is refused: find its service by halving, and leave that one out."""
        owner = {
            (set_name, key): service
            for service, layout in self.state.layouts.items()
            for set_name, key, _ in self.state.compiler.elements(layout)
        }
        groups: dict[
            ServiceKey | None, tuple[list[tuple[str, bytes, Value]], list[tuple[str, bytes, Value]]]
        ] = {}
        for side, operations in ((0, deletes), (1, adds)):
            for operation in operations:
                groups.setdefault(owner.get(operation[:2]), ([], []))[side].append(operation)

        def attempt(keys: list[ServiceKey | None]) -> None:
            gone = [op for key in keys for op in groups[key][0]]
            come = [op for key in keys for op in groups[key][1]]
            try:
                self._commit([*_messages(False, gone), *_messages(True, come)])
            except Refused as refused:
                if len(keys) > 1:
                    attempt(keys[: len(keys) // 2])
                    attempt(keys[len(keys) // 2 :])
                elif keys[0] is None:
                    raise
                else:
                    findings.errors[keys[0]] = str(refused)

        attempt(list(groups))
        if findings.errors:
            findings.dropped = {key: self.state.layouts[key].view for key in findings.errors}
            self._note_unused(self.state.merge(self.state.plan(dict.fromkeys(findings.errors))))

    def _write(self, plan: Plan) -> None:
        new_sets = [n for n, d in plan.affinity_sets.items() if d > 0 and n not in self.state.affinity_sets]
        if plan.chains or new_sets:
            lines = declare(self.family, dict.fromkeys(new_sets, affinity_set(self.family)))
            present = self.state.written.keys() | self._unused.keys()
            lines += write_chains(self.family, plan.chains, present=present)
            self._run(lines)
            for name, chain in plan.chains.items():
                self.state.written[name] = chain.fingerprint
                self._unused.pop(name, None)
            for name in new_sets:
                self._unused.pop(name, None)
        messages = [*_messages(False, plan.deletes), *_messages(True, plan.adds)]
        if messages:
            self._commit(messages)

    def _note_unused(self, unused: Iterable[str]) -> None:
        now = self._clock()
        for name in unused:
            self._unused[name] = now

    def _structure(self) -> tuple[dict[str, ChainInfo], dict[str, list[str]], dict[str, SetInfo]]:
        return (
            self._socket.chains(self._nfproto, names.TABLE),
            self._socket.rule_comments(self._nfproto, names.TABLE),
            self._socket.sets(self._nfproto, names.TABLE),
        )

    def _run(self, lines: list[str]) -> None:
        self._nft.run("\n".join(lines) + "\n")
        self.commits += 1

    def _commit(self, messages: list[ElementMessage]) -> None:
        self._socket.commit_elements(self._nfproto, names.TABLE, messages)
        self.commits += 1


def _messages(add: bool, operations: list[tuple[str, bytes, Value]]) -> list[ElementMessage]:
    by_set: dict[str, list[tuple[bytes, Value]]] = {}
    for name, key, value in operations:
        by_set.setdefault(name, []).append((key, value))
    return [ElementMessage(add, name, elements) for name, elements in by_set.items()]
