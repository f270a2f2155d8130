"""What the agent says of its own health, as values (kube-proxy's ProxyHealthServer without the HTTP)."""

import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from rulecast.model import Family, NodeInfo

_BOTH = tuple(Family)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. Times are unix seconds."""

    healthy: bool
    """No update has waited longer than the limit."""
    last_updated: float
    """Now while healthy, else the time of the last success."""
    now: float
    node_eligible: bool
    reasons: tuple[str, ...] = ()
    """What is wrong, a line each."""


class ProxyHealth:
    """Tells whether the kernel follows what was asked for.

    Unhealthy once an update of any family has waited for more than `limit` seconds (kube-proxy: twice the
    sync period). Healthy before there ever was one. A silent server does not make a node unhealthy: its rules
    stay and go on serving, and if they did, one lost server would take every node out of every load balancer.
    Silence is told by metrics and in the body of /healthz instead.
    """

    def __init__(
        self,
        *,
        node_name: str,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._node_name = node_name
        self._limit = limit
        self._clock = clock
        self._wall = wall
        self._oldest: dict[Family, float] = {}
        """When the oldest update that is not applied was queued."""
        self._last_applied: float | None = None
        self._started = wall()
        self._node: NodeInfo | None = None
        self._node_told = False
        self._problems: dict[str, str] = {}
        self.ready = False
        """The first whole state is in the kernel."""

    def queued(self, families: Collection[Family] = _BOTH) -> None:
        """An update came and is not applied."""
        now = self._clock()
        for family in families:
            self._oldest.setdefault(family, now)

    def applied(self, families: Collection[Family] = _BOTH) -> None:
        """All that was queued for these families is in the kernel."""
        for family in families:
            self._oldest.pop(family, None)
        self._last_applied = self._wall()

    def node(self, node: NodeInfo | None) -> None:
        """Our Node as the server has it; None when it has none of our name."""
        self._node = node
        self._node_told = True

    def problem(self, kind: str, line: str) -> None:
        """Set what is wrong of one kind; "" clears it. Told in /healthz, without changing its status."""
        if line:
            self._problems[kind] = line
        else:
            self._problems.pop(kind, None)

    def check(self) -> Health:
        """The answer of this moment."""
        now, wall = self._clock(), self._wall()
        reasons = []
        late = [family for family, since in self._oldest.items() if now - since > self._limit]
        if late:
            waited = now - min(self._oldest.values())
            names = ", ".join(f"ipv{int(family)}" for family in sorted(late))
            reasons.append(f"an update has waited {waited:.0f} s for the kernel ({names})")
        # Nothing was told yet at start; kube-proxy is healthy then.
        eligible = not self._node_told or (self._node is not None and self._node.eligible)
        if self._node_told and self._node is None:
            reasons.append(f"the server knows no Node named {self._node_name!r}")
        elif not eligible:
            reasons.append("the Node is being deleted")
        reasons += self._problems.values()
        last = self._last_applied if self._last_applied is not None else self._started
        return Health(
            healthy=not late,
            last_updated=last if late else wall,
            now=wall,
            node_eligible=eligible,
            reasons=tuple(reasons),
        )

    @property
    def problems(self) -> Mapping[str, str]:
        """What is wrong now, by kind."""
        return self._problems
