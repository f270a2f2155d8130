"""Session affinity: what only the services that ask for it cost.

Each has chains of its own and each of its endpoints a chain and a dynamic set of clients, as in kube-proxy's
nftables mode. One flat map of clients would need a dynamic map update, which can neither store a target that
was just picked from another map nor, with IPv6's 20-byte keys, be linearised by nft 1.0.6; and it could not
drop one endpoint's clients at once.

The timeout stands in the update rule, not in the set: it can change without losing anyone's place.
"""

from collections.abc import Iterator, Sequence

from rulecast.model import Endpoint, Family
from rulecast_agent.dataplane.claims import Role
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.dataplane.nftables.layout import Layout, LayoutCompiler, affinity_chain
from rulecast_agent.dataplane.nftables.rules import Chain, RuleWriter


def affinity_set(family: Family) -> str:
    """The declaration of an endpoint's client set."""
    return f"set NAME {{ typeof {names.WORD[family]} saddr; flags dynamic,timeout; }}"


def _pick_chain(which: str, layout: Layout) -> str:
    return f"affinity-pick-{which}-{names.service_suffix(layout.view.service.key)}"


def affinity_objects(
    layout: Layout, *, compiler: LayoutCompiler, writer: RuleWriter
) -> tuple[dict[str, Chain], list[str]]:
    """The chains and set names of a service with session affinity; targets before those that go to them."""
    service = layout.view.service
    if not service.affinity_seconds or not service.has_endpoints:
        return {}, []
    kinds: dict[str, tuple[str, ...]] = {}
    for frontend in layout.frontends:
        verdict = compiler.verdict(layout, frontend)
        if verdict == "drop":
            continue
        if frontend.role is Role.CLUSTER_IP:
            which = "local" if service.internal_local else "cluster"
            kinds["cluster-ip"] = (*writer.masquerade("cluster-ip"), f"goto {_pick_chain(which, layout)}")
        elif service.external_local:
            kinds["local"] = writer.local_policy(_go("cluster", layout), _go("local", layout))
        else:
            kinds["external"] = (*writer.masquerade("external"), f"goto {_pick_chain('cluster', layout)}")
    used = {
        which: endpoints
        for which, endpoints in (("cluster", layout.cluster), ("local", layout.local))
        if endpoints and any(_pick_chain(which, layout) in rule for rules in kinds.values() for rule in rules)
    }
    chains: dict[str, Chain] = {}
    sets: list[str] = []
    for endpoint in dict.fromkeys(e for endpoints in used.values() for e in endpoints):
        suffix = names.endpoint_suffix(service.key, endpoint)
        sets.append(f"affinity-{suffix}")
        chains[f"endpoint-{suffix}"] = Chain(
            tuple(_endpoint_rules(layout, endpoint, compiler.family, suffix))
        )
    for which, endpoints in used.items():
        chains[_pick_chain(which, layout)] = Chain(tuple(_pick_rules(layout, endpoints, compiler.family)))
    for kind, rules in kinds.items():
        chains[affinity_chain(kind, layout)] = Chain(rules)
    return chains, sets


def _go(which: str, layout: Layout) -> str:
    endpoints = layout.cluster if which == "cluster" else layout.local
    return f"goto {_pick_chain(which, layout)}" if endpoints else "drop"


def _endpoint_rules(layout: Layout, endpoint: Endpoint, family: Family, suffix: str) -> Iterator[str]:
    service, ip = layout.view.service, names.WORD[family]
    address = f"[{endpoint.ip}]" if family is Family.IPV6 else endpoint.ip
    # Two rules: a full set ends its rule, and the packet must go on to the endpoint all the same.
    yield f"update @affinity-{suffix} {{ {ip} saddr timeout {service.affinity_seconds}s }}"
    yield f"meta l4proto {service.name.protocol.lower()} dnat {ip} to {address}:{endpoint.port}"


def _pick_rules(layout: Layout, endpoints: Sequence[Endpoint], family: Family) -> Iterator[str]:
    suffixes = [names.endpoint_suffix(layout.view.service.key, e) for e in endpoints]
    for suffix in suffixes:
        yield f"{names.WORD[family]} saddr @affinity-{suffix} goto endpoint-{suffix}"
    choices = ", ".join(f"{slot} : goto endpoint-{suffix}" for slot, suffix in enumerate(suffixes))
    yield f"numgen random mod {len(suffixes)} vmap {{ {choices} }}"
