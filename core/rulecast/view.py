"""What the feed hands to a dataplane: one node's resolved services."""

from collections.abc import Mapping

import msgspec

from rulecast.model import ClusterInfo, Endpoint, NodeInfo, Revision, ServiceKey, ServicePort


class ServiceView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One Service port as this node should program it: all scopes merged."""

    service: ServicePort
    cluster: tuple[Endpoint, ...] = ()
    """The set for cluster policies; sorted."""
    local: tuple[Endpoint, ...] = ()
    """This node's own usable endpoints; sorted. Known for every service, used as its policies say."""
    serving: tuple[Endpoint, ...] = ()
    """UDP only: every endpoint to which an existing flow may go on; sorted."""
    local_ready: int = 0
    """Distinct ready addresses on this node."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step of the feed. The first is always full."""

    revision: Revision
    full: bool
    """`services` is everything there is; what it lacks is to be removed."""
    services: Mapping[ServiceKey, ServiceView | None]
    """Changed services (None: gone), or all of them."""
    node: NodeInfo | None
    """None: the server knows no Node of our name."""
    cluster: ClusterInfo
    trigger_times: Mapping[ServiceKey, float] = {}
    """Unix seconds at which the endpoints controller was triggered, for the programming latency."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an Update in the kernel."""

    revision: Revision
    seconds: float
    errors: Mapping[ServiceKey, str] = {}
    """Services that the kernel refused, with its words; every other one is programmed."""
    operations: int = 0
    """Kernel operations done; 0 when nothing had to change."""
