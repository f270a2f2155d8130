"""What one family's kernel state is, and the smallest change that brings it to another. Pure.

A change is planned against the state and merged into it only after the kernel has taken it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.claims import Role
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.dataplane.nftables.affinity import affinity_objects, affinity_set
from rulecast_agent.dataplane.nftables.layout import (
    Frontend,
    Layout,
    LayoutCompiler,
    arranged,
    frontends,
)
from rulecast_agent.dataplane.nftables.rules import Chain, RuleWriter
from rulecast_agent.kernel.nft_netlink import Value

Element = tuple[str, bytes]
"""Set name and packed key."""
Claims = tuple[tuple[Role, ServiceKey], ...]
"""Who wants an address and port, sorted: the first one has it."""


class Plan(msgspec.Struct):
    """A change of one family that is not yet in the kernel."""

    layouts: dict[ServiceKey, Layout | None]
    """What the touched services come to; None: gone."""
    claims: dict[bytes, Claims]
    shared: Counter[Element]
    """Change of the number of users of each shared element."""
    uses: Counter[str]
    """Change of the number of users of each chain."""
    affinity_sets: Counter[str]
    chains: dict[str, Chain]
    """Chains of which the kernel lacks these rules; targets come before those that go to them."""
    deletes: list[tuple[str, bytes, Value]]
    adds: list[tuple[str, bytes, Value]]

    @property
    def operations(self) -> int:
        """How many kernel objects change."""
        return len(self.deletes) + len(self.adds) + len(self.chains)


class State:
    """One family as we believe the kernel has it."""

    def __init__(self, *, family: Family, host: HostConfig) -> None:
        self.family = family
        self.layouts: dict[ServiceKey, Layout] = {}
        self.claims: dict[bytes, Claims] = {}
        self.shared: Counter[Element] = Counter()
        self.uses: Counter[str] = Counter()
        self.affinity_sets: Counter[str] = Counter()
        self.written: dict[str, tuple[str, ...]] = {}
        """The fingerprints of the chains in the kernel, used or not."""
        self.counts: Counter[str] = Counter()
        """Elements in each of the constant sets."""
        self.use_host(host)

    def use_host(self, host: HostConfig) -> None:
        """Compile for another host configuration from now on. Layouts are the same under any."""
        self.host = host
        self.compiler = LayoutCompiler(family=self.family, host=host)
        self.writer = RuleWriter(family=self.family, host=host)

    def plan(self, changes: Mapping[ServiceKey, ServiceView | None]) -> Plan:
        """What `changes` (None: gone) needs, touching others only where an address changes hands."""
        plan = Plan({}, {}, Counter(), Counter(), Counter(), {}, [], [])
        wanted: dict[ServiceKey, tuple[Frontend, ...]] = {}
        touched = dict.fromkeys(changes)
        for key, view in changes.items():
            before = self.layouts.get(key)
            if before is not None and view is not None and before.view.service == view.service:
                continue
            wanted[key] = tuple(frontends(view.service)) if view else ()
            for loser in self._claim(plan, key, before, wanted[key]):
                touched[loser] = None
        for key in touched:
            before = self.layouts.get(key)
            view = changes.get(key, before.view if before else None)
            after = None
            if view is not None:
                if key not in wanted and key in changes and before is not None:
                    owned = before.frontends
                    if any(f.key in plan.claims for f in frontends(view.service)):
                        owned = self._owned(plan, key, tuple(frontends(view.service)))
                else:
                    owned = self._owned(plan, key, wanted.get(key) or tuple(frontends(view.service)))
                after = arranged(before, view, owned)
            self._compare(plan, before, after)
            plan.layouts[key] = after
        self._settle(plan)
        return plan

    def merge(self, plan: Plan) -> list[str]:
        """Take over a plan that the kernel has taken; gives the chains and sets no longer used."""
        for key, layout in plan.layouts.items():
            if layout is None:
                self.layouts.pop(key, None)
            else:
                self.layouts[key] = layout
        for frontend, claims in plan.claims.items():
            if claims:
                self.claims[frontend] = claims
            else:
                self.claims.pop(frontend, None)
        unused = []
        for total, change in ((self.uses, plan.uses), (self.affinity_sets, plan.affinity_sets)):
            for name, delta in change.items():
                total[name] += delta
                if total[name] <= 0:
                    del total[name]
                    unused.append(name)
        for element, delta in plan.shared.items():
            self.shared[element] += delta
            if self.shared[element] <= 0:
                del self.shared[element]
        for name, chain in plan.chains.items():
            self.written[name] = chain.fingerprint
        for set_name, _, _ in plan.deletes:
            self.counts[set_name] -= 1
        for set_name, _, _ in plan.adds:
            self.counts[set_name] += 1
        return unused

    def objects(self, layout: Layout) -> tuple[dict[str, Chain | None], list[str]]:
        """The chains (None: what its name says) and affinity sets that a service needs."""
        chains, sets = affinity_objects(layout, compiler=self.compiler, writer=self.writer)
        found: dict[str, Chain | None] = {**chains}
        ranges = self.compiler.firewall_ranges(layout.view.service)
        for set_name, _, value in self.compiler.entries(layout):
            if isinstance(value, str) and value not in ("drop", names.REJECT_CHAIN) and value not in found:
                found[value] = self.writer.firewall(ranges) if set_name == names.FIREWALL_IPS else None
        return found, sets

    def desired_chains(self) -> dict[str, Chain]:
        """Every chain that has no hook, with its rules."""
        found = dict(self.writer.fixed_chains())
        for layout in self.layouts.values():
            if layout.view.service.affinity_seconds or layout.view.service.restrict_sources:
                chains, _ = self.objects(layout)
                found.update((name, chain) for name, chain in chains.items() if chain is not None)
        for name in self.uses:
            if name not in found:
                chain = self.writer.pick_chain(name)
                assert chain is not None, name
                found[name] = chain
        return found

    def desired_sets(self) -> dict[str, str]:
        """The declarations of the affinity sets, by name."""
        return dict.fromkeys(self.affinity_sets, affinity_set(self.family))

    def desired_elements(self) -> dict[str, dict[bytes, Value]]:
        """Every element of the constant sets."""
        found: dict[str, dict[bytes, Value]] = {}
        for layout in self.layouts.values():
            for set_name, key, value in self.compiler.elements(layout):
                found.setdefault(set_name, {})[key] = value
        for set_name, key in self.shared:
            found.setdefault(set_name, {})[key] = None
        found[names.NODEPORT_IPS] = dict.fromkeys(host_addresses(self.family, self.host))
        return found

    def _claim(
        self, plan: Plan, key: ServiceKey, before: Layout | None, wanted: tuple[Frontend, ...]
    ) -> Iterator[ServiceKey]:
        """Change the claims of one service; gives the others whose ownership may change by it."""
        new = {f.key: f.role for f in wanted}
        old = {f.key: f.role for f in frontends(before.view.service)} if before else {}
        for frontend in {**old, **new}:
            if old.get(frontend) == new.get(frontend):
                continue
            claims = plan.claims.get(frontend)
            if claims is None:
                claims = self.claims.get(frontend, ())
            others = tuple(c for c in claims if c[1] != key)
            if frontend in new:
                plan.claims[frontend] = tuple(sorted((*others, (new[frontend], key))))
            else:
                plan.claims[frontend] = others
            yield from (c[1] for c in others)

    def _owned(self, plan: Plan, key: ServiceKey, wanted: tuple[Frontend, ...]) -> tuple[Frontend, ...]:
        owned = []
        for frontend in wanted:
            claims = plan.claims.get(frontend.key)
            if claims is None:
                claims = self.claims.get(frontend.key, ())
            if claims and claims[0][1] == key:
                owned.append(frontend)
        return tuple(owned)

    def _compare(self, plan: Plan, before: Layout | None, after: Layout | None) -> None:
        compiler = self.compiler
        old = {(s, k): v for s, k, v in compiler.entries(before)} if before else {}
        new = {(s, k): v for s, k, v in compiler.entries(after)} if after else {}
        for (set_name, key), value in old.items():
            if (set_name, key) not in new or new[set_name, key] != value:
                plan.deletes.append((set_name, key, value))
        for (set_name, key), value in new.items():
            if (set_name, key) not in old or old[set_name, key] != value:
                plan.adds.append((set_name, key, value))
        old_runs = compiler.runs(before) if before else {}
        new_runs = compiler.runs(after) if after else {}
        for run in {**old_runs, **new_runs}:
            was, becomes = old_runs.get(run, ()), new_runs.get(run, ())
            if was == becomes:
                continue
            for slot in range(max(len(was), len(becomes))):
                a = was[slot] if slot < len(was) else None
                b = becomes[slot] if slot < len(becomes) else None
                if a == b:
                    continue
                packed = names.pack_slot(run.frontend, run.first + slot)
                if a is not None:
                    plan.deletes.append((run.set_name, packed, names.pack_endpoint(a)))
                if b is not None:
                    plan.adds.append((run.set_name, packed, names.pack_endpoint(b)))
        if not (
            before and after and before.local == after.local and before.view.service == after.view.service
        ):
            if before:
                plan.shared.subtract(compiler.shared(before))
            if after:
                plan.shared.update(compiler.shared(after))
        self._compare_objects(plan, before, after)

    def _compare_objects(self, plan: Plan, before: Layout | None, after: Layout | None) -> None:
        if before:
            chains, sets = self.objects(before)
            plan.uses.subtract(chains.keys())
            plan.affinity_sets.subtract(sets)
        if after:
            chains, sets = self.objects(after)
            plan.uses.update(chains.keys())
            plan.affinity_sets.update(sets)
            for name, chain in chains.items():
                if chain is None and (name in self.written or name in plan.chains):
                    continue
                chain = chain or self.writer.pick_chain(name)
                assert chain is not None, name
                if self.written.get(name) != chain.fingerprint:
                    plan.chains[name] = chain

    def _settle(self, plan: Plan) -> None:
        """Turn changes of use counts into elements that come and go."""
        for element, delta in plan.shared.items():
            before = self.shared.get(element, 0)
            if not before and delta > 0:
                plan.adds.append((*element, None))
            elif before and before + delta <= 0:
                plan.deletes.append((*element, None))
        plan.shared = Counter({k: v for k, v in plan.shared.items() if v})
        plan.uses = Counter({k: v for k, v in plan.uses.items() if v})
        plan.affinity_sets = Counter({k: v for k, v in plan.affinity_sets.items() if v})


def host_addresses(family: Family, host: HostConfig) -> Iterable[bytes]:
    """The packed addresses on which node ports answer; never a loopback one (route_localnet stays off)."""
    addresses = host.families[family].nodeport_addresses or ()
    return [names.pack_address(a) for a in addresses if not (a.startswith("127.") or a == "::1")]
