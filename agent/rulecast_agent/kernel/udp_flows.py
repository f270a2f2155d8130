"""Which tracked UDP flows of services are stale. Pure; see `conntrack.py` for when and how they are removed.

A flow belongs to a frontend when its original destination is one: a cluster IP, external address or
load-balancer address with the service port, or a node port at an address that serves node ports. No other
flow is ever looked at (kubernetes/kubernetes#130170). It is stale

- when the frontend is gone, always: a later pod with the old backend's address must not receive it
  (kubernetes/kubernetes#141371);
- when its backend (the source of its replies) may not serve the frontend any more, or it has none, because it
  began before there was an endpoint, and now there is one (kubernetes/kubernetes#48370);
- of a service without any endpoint, when it was translated to one that is gone: it would reach the address's
  next owner (kubernetes/kubernetes#139628; older kube-proxies leave these). Untranslated ones are left, for
  there is nothing better for them.

Flows whose backend still serves stay, whatever topology and Local policies say, also across a restart.
"""

from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address
from typing import NamedTuple

from rulecast.model import Endpoint, Family, ServiceKey
from rulecast.view import ServiceView

Backends = frozenset[bytes] | None
"""Packed address and port of each backend that may serve; None: the frontend is gone."""


class Frontend(NamedTuple):
    """A destination of one family: packed address and port; for a node port the port alone."""

    family: Family
    destination: bytes


Targets = Mapping[Frontend, Backends]


def is_stale(*, destination: bytes, backend: bytes, backends: Backends) -> bool:
    """Decide one flow to a frontend, from its packed original destination and source of replies."""
    if backends is None:
        return True
    if not backends:
        return backend != destination
    return backend not in backends


class UdpServices:
    """What the kernel's rules do with UDP, and which frontends have to be looked at since they changed."""

    def __init__(self) -> None:
        self._entries: dict[ServiceKey, _Entry] = {}
        self._owners: dict[Frontend, ServiceKey] = {}
        self._dirty: set[Frontend] = set()

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> bool:
        """Take services that are in the kernel now (None: gone); True when there is something to look at."""
        for key, view in changes.items():
            if "/UDP/ipv" in key:
                self._settle(key, None if view is None else _entry(view))
        return bool(self._dirty)

    def take(self) -> Targets:
        """The frontends to look at, with who may serve them; they count as clean until put back."""
        dirty, self._dirty = self._dirty, set()
        targets: dict[Frontend, Backends] = {}
        for frontend in dirty:
            owner = self._owners.get(frontend)
            targets[frontend] = None if owner is None else self._entries[owner].backends
        return targets

    def put_back(self, frontends: Iterable[Frontend]) -> None:
        """Look at these again: the flows could not be removed."""
        self._dirty.update(frontends)

    def _settle(self, key: ServiceKey, new: "_Entry | None") -> None:
        old = self._entries.get(key, _NOTHING)
        if new is None:
            new = _NOTHING
            self._entries.pop(key, None)
        else:
            self._entries[key] = new
        for frontend in old.frontends - new.frontends:
            if self._owners.get(frontend) == key:
                del self._owners[frontend]
        for frontend in new.frontends:
            self._owners[frontend] = key
        self._dirty |= old.frontends ^ new.frontends
        # More endpoints beside working ones leave no flow stale. The first usable one does: before it, flows
        # may have been tracked untranslated (kubernetes/kubernetes#106163).
        if old.backends - new.backends or (new.usable and not old.usable):
            self._dirty |= new.frontends


class _Entry(NamedTuple):
    frontends: frozenset[Frontend]
    backends: frozenset[bytes]
    usable: bool


_NOTHING = _Entry(frozenset(), frozenset(), False)


def _entry(view: ServiceView) -> _Entry:
    service = view.service
    family = service.name.family
    port = service.port.to_bytes(2)
    addresses = {service.cluster_ip, *service.external_ips, *service.load_balancer_ips}
    frontends = {Frontend(family, ip_address(ip).packed + port) for ip in addresses}
    if service.node_port:
        frontends.add(Frontend(family, service.node_port.to_bytes(2)))
    return _Entry(
        frozenset(frontends),
        _pack(view.serving) | _pack(view.cluster) | _pack(view.local),
        bool(view.cluster or view.local),
    )


def _pack(endpoints: Collection[Endpoint]) -> frozenset[bytes]:
    return frozenset(ip_address(ip).packed + port.to_bytes(2) for ip, port in endpoints)
