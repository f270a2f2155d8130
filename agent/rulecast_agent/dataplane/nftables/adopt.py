"""Taking over the endpoint slots that another instance left in the kernel. Pure."""

from collections.abc import Iterable

from rulecast.model import Endpoint, ServiceKey
from rulecast_agent.dataplane.claims import Role
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.dataplane.nftables.layout import Layout, arranged
from rulecast_agent.kernel.nft_netlink import Value

Elements = dict[str, dict[bytes, Value]]
"""Set name to packed key to value, as read back."""


def take_slots(layouts: dict[ServiceKey, Layout], found: Elements) -> None:
    """Keep endpoints in the slots in which the kernel has them."""
    for key, layout in layouts.items():
        cluster: list[Endpoint] = []
        local: list[Endpoint] = []
        service = layout.view.service
        for frontend in layout.frontends:
            elements = found.get(names.slot_map(frontend.key), {})
            internal = frontend.role is Role.CLUSTER_IP and service.internal_local
            if internal:
                local = local or _slots(elements, frontend.key, 0, layout.local)
                continue
            cluster = cluster or _slots(elements, frontend.key, 0, layout.cluster)
            if service.external_local and frontend.role is not Role.CLUSTER_IP:
                local = local or _slots(elements, frontend.key, names.LOCAL_OFFSET, layout.local)
        if cluster or local:
            before = Layout(layout.view, tuple(cluster), tuple(local), layout.frontends)
            layouts[key] = arranged(before, layout.view, layout.frontends)


def _slots(
    elements: dict[bytes, Value], frontend: bytes, first: int, members: Iterable[Endpoint]
) -> list[Endpoint]:
    """The members as they stand in the kernel's slots; others there count as holes."""
    known = {names.pack_endpoint(e): e for e in members}
    found: list[Endpoint] = []
    while True:
        value = elements.get(names.pack_slot(frontend, first + len(found)))
        if not isinstance(value, bytes):
            return found
        found.append(known.get(value, Endpoint("", 0)))
