"""What IPVS holds on n1, and emptying it."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

from rulecast.lab import Node
from rulecast.model import Endpoint
from rulecast_agent.kernel.ipvs import Ipvs, Scheduling, Table, VirtualServer
from tests.netns.rig import Rig

_T = TypeVar("_T")
_EMPTY = """
ip link del rulecast-ipvs0 2>/dev/null
for family in -4 -6; do ip $family rule del priority 300 2>/dev/null; done
true
"""


def on(node: Node, work: Callable[[Ipvs], _T]) -> _T:
    """Do it with the IPVS of a node."""

    def there() -> _T:
        with contextlib.closing(Ipvs()) as ipvs:
            return work(ipvs)

    return node.namespace.call(there)


def services(rig: Rig) -> dict[VirtualServer, Scheduling]:
    """Every virtual server."""
    return on(rig.n1, lambda ipvs: ipvs.services())


def table(rig: Rig) -> Table:
    """Every virtual server of an address, with its endpoints."""
    found = on(rig.n1, lambda ipvs: ipvs.table({}))
    return {server: destinations for server, destinations in found.items() if not server.mark}


def weights(rig: Rig, server: VirtualServer) -> dict[Endpoint, int]:
    """Of a virtual server's endpoints."""
    return {one: state.weight for one, state in table(rig).get(server, {}).items()}


def empty(node: Node) -> None:
    """Whoever made it."""
    on(node, lambda ipvs: ipvs.commit([ipvs.delete(server) for server in ipvs.services()]))
    node.namespace.run("sh", "-c", _EMPTY)
