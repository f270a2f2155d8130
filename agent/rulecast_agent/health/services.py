"""Which health-check node ports there are, and how many local endpoints stand behind each. Pure.

The count is of distinct addresses that are ready on this node, over all ports of the Service: terminating
endpoints still get traffic but no longer count, so that a load balancer drains the node. Families are apart,
as in kube-proxy: who asks over IPv4 hears of the IPv4 endpoints.
"""

from collections.abc import Mapping
from typing import NamedTuple

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView


class Checked(NamedTuple):
    """A Service in one family."""

    namespace: str
    name: str
    family: Family


class HealthChecks:
    """The health-checked Services of this node."""

    def __init__(self) -> None:
        self._ports: dict[Checked, dict[ServiceKey, tuple[int, frozenset[str]]]] = {}
        self._owners: dict[ServiceKey, Checked] = {}

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> bool:
        """Take changed services (None: gone); True when the set of listeners may have changed."""
        changed = False
        for key, view in changes.items():
            owner = self._owners.get(key)
            old = self._ports[owner][key] if owner is not None else None
            new = _check(view)
            if old == new:
                continue
            changed = changed or old is None or new is None or old[0] != new[0]
            if owner is not None:
                self._drop(owner, key)
            if new is not None and view is not None:
                name = view.service.name
                owner = self._owners[key] = Checked(name.namespace, name.name, name.family)
                self._ports.setdefault(owner, {})[key] = new
        return changed

    def listeners(self) -> tuple[dict[tuple[Family, int], Checked], list[str]]:
        """Who is to be answered for on each port, and a line for each Service whose port is taken by another.

        The first by name has the port.
        """
        wanted: dict[tuple[Family, int], Checked] = {}
        clashes: list[str] = []
        for checked in sorted(self._ports):
            port = next(iter(self._ports[checked].values()))[0]
            other = wanted.setdefault((checked.family, port), checked)
            if other != checked:
                clashes.append(
                    f"{checked.namespace}/{checked.name}: health-check node port {port} belongs to "
                    f"{other.namespace}/{other.name}"
                )
        return wanted, clashes

    def count(self, checked: Checked) -> int:
        """Distinct addresses of ready local endpoints."""
        return len(frozenset().union(*(ips for _, ips in self._ports.get(checked, {}).values())))

    def _drop(self, owner: Checked, key: ServiceKey) -> None:
        del self._owners[key]
        ports = self._ports[owner]
        del ports[key]
        if not ports:
            del self._ports[owner]


def _check(view: ServiceView | None) -> tuple[int, frozenset[str]] | None:
    if view is None or not view.service.health_check_node_port:
        return None
    # With none ready, `local` holds the terminating ones that are fallen back to.
    ips = frozenset(endpoint.ip for endpoint in view.local) if view.local_ready else frozenset()
    return view.service.health_check_node_port, ips
