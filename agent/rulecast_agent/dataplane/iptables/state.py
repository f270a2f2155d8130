"""One family: every service as compiled, who has which address, and the dispatch trees. Pure."""

from collections import Counter
from collections.abc import Mapping
from functools import partial

import msgspec

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.claims import Claims
from rulecast_agent.dataplane.iptables import names
from rulecast_agent.dataplane.iptables.dispatch import Dispatch, Rules
from rulecast_agent.dataplane.iptables.host_rules import MASQUERADE
from rulecast_agent.dataplane.iptables.matches import (
    SERVICE_BITS,
    address_match,
    frontend_match,
    hairpin_match,
    port_match,
)
from rulecast_agent.dataplane.iptables.services import Compiled, Kept, Place, ServiceCompiler, Space, keep

Chains = dict[str, Rules]
NAT, FILTER = "nat", "filter"
TABLES = (FILTER, NAT)
"""In the order in which a change is written: packets are refused before they are no longer translated."""


class Step(msgspec.Struct):
    """What a change means for the kernel. Written first, deleted last."""

    own: dict[ServiceKey, Chains] = {}
    """Chains of services that are new or other than before, in nat."""
    dispatch: dict[str, Chains] = {}
    """By table; chains that are gone to come first."""
    deletes: dict[str, list[str]] = {}
    """By table; chains that go to others come first."""


class State:
    """What the kernel is meant to hold for the services of one family."""

    def __init__(self, *, family: Family, host: HostConfig) -> None:
        self.family = family
        self.views: dict[ServiceKey, ServiceView] = {}
        self._compiler = ServiceCompiler(family=family, host=host)
        self._compiled: dict[ServiceKey, Kept] = {}
        self._claims: Claims[Place] = Claims()
        width = names.WIDTH[family]
        frontend = partial(frontend_match, family)
        service_width = width + SERVICE_BITS
        self._translated = {
            Space.FRONTEND: Dispatch(root=names.FRONTENDS, code="F", width=service_width, match=frontend),
            Space.NODE_PORT: Dispatch(root=names.NODE_PORTS, code="N", width=SERVICE_BITS, match=port_match),
        }
        ports = Dispatch(root=names.PORTS, code="P", width=SERVICE_BITS, match=port_match)
        self._undelivered = {
            Space.FRONTEND: Dispatch(root=names.UNDELIVERED, code="U", width=service_width, match=frontend),
            Space.NODE_PORT: ports,
            Space.HEALTH_CHECK: ports,
        }
        self._hairpin = _Shared(
            Dispatch(root=names.HAIRPIN, code="H", width=width, match=partial(hairpin_match, family)),
            MASQUERADE,
        )
        self._cluster_ips = _Shared(
            Dispatch(root=names.CLUSTER_IPS, code="C", width=width, match=partial(address_match, family)),
            f"-j {names.REFUSE}",
        )
        for _, tree in self._trees():
            tree.change({})

    def change(self, changes: Mapping[ServiceKey, ServiceView | None]) -> Step:
        """Mean something else from now on (None: gone), and tell what to write."""
        step = Step({}, {NAT: {}, FILTER: {}}, {NAT: [], FILTER: []})
        places: dict[Place, None] = {}
        left: list[str] = []
        for key, view in changes.items():
            kept = self._compiled.pop(key, None)
            before = kept.unpack() if kept is not None else _NOTHING
            after = self._compiler.compile(view) if view is not None else _NOTHING
            if view is not None:
                self.views[key], self._compiled[key] = view, keep(after)
            else:
                self.views.pop(key, None)
            for _other in self._claims.change(key, before=before.places, after=after.places):
                pass
            places |= dict.fromkeys((*before.places, *after.places))
            self._hairpin.change(before.hairpin, after.hairpin)
            self._cluster_ips.change(before.cluster_ips, after.cluster_ips)
            written = {
                name: rules for name, rules in after.chains.items() if before.chains.get(name) != rules
            }
            if written:
                step.own[key] = written
            left += reversed([name for name in before.chains if name not in after.chains])
        self._dispatch(step, places)
        step.deletes[NAT] += left
        return step

    def tables(self, base: Mapping[str, Chains]) -> dict[str, Chains]:
        """Every chain by table, with those of `base`; those that are gone to come first."""
        found: dict[str, Chains] = {NAT: {}, FILTER: {names.REFUSE: base[FILTER][names.REFUSE]}}
        for compiled in self._compiled.values():
            found[NAT] |= dict(compiled.chains)
        for table, tree in self._trees():
            found[table] |= tree.chains
        return {table: {**chains, **base[table]} for table, chains in found.items()}

    def roots(self, table: str) -> Chains:
        """The chains of a table at which the trees begin."""
        return dict(tree.root for each, tree in self._trees() if each == table)

    def _dispatch(self, step: Step, places: Mapping[Place, None]) -> None:
        changes: dict[int, tuple[str, Dispatch, dict[int, Rules]]] = {}

        def act(table: str, tree: Dispatch, key: int, action: Rules) -> None:
            if tree.action(key) != action:
                changes.setdefault(id(tree), (table, tree, {}))[2][key] = action

        for place in places:
            owner = self._claims.owner(place)
            frontends = self._compiled[owner].frontends if owner is not None else ()
            translated, undelivered = next((each[2:] for each in frontends if each[0] == place), ((), ()))
            if place.space in self._translated:
                act(NAT, self._translated[place.space], place.key, translated)
            act(FILTER, self._undelivered[place.space], place.key, undelivered)
        for table, shared in ((NAT, self._hairpin), (FILTER, self._cluster_ips)):
            for key, action in shared.actions().items():
                act(table, shared.tree, key, action)
        for table, tree, keys in changes.values():
            delta = tree.change(keys)
            step.dispatch[table] |= delta.writes
            step.deletes[table] += delta.deletes

    def _trees(self) -> list[tuple[str, Dispatch]]:
        return [
            *((NAT, tree) for tree in self._translated.values()),
            (NAT, self._hairpin.tree),
            (FILTER, self._cluster_ips.tree),
            (FILTER, self._undelivered[Space.FRONTEND]),
            (FILTER, self._undelivered[Space.NODE_PORT]),
        ]


class _Shared:
    """A tree of addresses that several services may need, with the same action for each."""

    def __init__(self, tree: Dispatch, action: str) -> None:
        self.tree = tree
        self._action = action
        self._users: Counter[int] = Counter()
        self._touched: dict[int, None] = {}

    def change(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """One service needs others than before."""
        if before != after:
            self._users.subtract(before)
            self._users.update(after)
            self._touched |= dict.fromkeys((*before, *after))

    def actions(self) -> dict[int, Rules]:
        """What is to be done with the addresses that were touched since the last call."""
        found: dict[int, Rules] = {}
        for key in self._touched:
            found[key] = (self._action,) if self._users[key] > 0 else ()
            if self._users[key] <= 0:
                del self._users[key]
        self._touched = {}
        return found


_NOTHING = Compiled()
