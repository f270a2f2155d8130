"""The whole ruleset as nft text: for a rebuild in one transaction, and for readers and rule tracers."""

import ipaddress
import sys
from collections.abc import Container, Iterable, Iterator, Mapping

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import HostConfig
from rulecast_agent.dataplane.nftables import names
from rulecast_agent.dataplane.nftables.affinity import affinity_set
from rulecast_agent.dataplane.nftables.planner import State
from rulecast_agent.dataplane.nftables.rules import Chain, declare, set_shapes, write_chain
from rulecast_agent.kernel.nft_netlink import Value

_CHUNK = 1000
_NODEPORT = (names.NODEPORTS, names.NO_ENDPOINT_NODEPORTS)
_SELF = (names.FIREWALL_SELF, names.HAIRPIN)


def render_ruleset(views: Mapping[ServiceKey, ServiceView], host: HostConfig, family: Family) -> str:
    """The nft script that makes one family's table from nothing; the other family's services are left out."""
    state = State(family=family, host=host)
    ending = f"/ipv{int(family)}"
    state.merge(state.plan({key: view for key, view in views.items() if key.endswith(ending)}))
    return "\n".join(script(state)) + "\n"


def sample_script(family: Family, host: HostConfig) -> str:
    """Every form of rule and set that can be needed, under another table's name, for a trial only."""
    state = State(family=family, host=host)
    chains = dict(state.writer.fixed_chains())
    for name in ("cluster-ip-tcp-2", "external-udp-2", "local-sctp-2-2", "nodeport-local-tcp-2-2"):
        chain = state.writer.pick_chain(name)
        assert chain is not None
        chains[name] = chain
    clients = "affinity-probe"
    update = f"update @{clients} {{ {names.WORD[family]} saddr timeout 10800s }}"
    chains["endpoint-probe"] = Chain((update,))
    chains["affinity-pick-probe"] = Chain(("numgen random mod 1 vmap { 0 : goto endpoint-probe }",))
    lines = [
        *create_table(family),
        *declare(family, {clients: affinity_set(family)}),
        *write_chains(family, {**chains, **state.writer.base_chains()}),
    ]
    at = f"{names.WORD[family]} {names.TABLE}"
    return "\n".join(lines).replace(f" {at} ", f" {at}-probe ") + "\n"


def create_table(family: Family) -> list[str]:
    """The lines for the table and its constant sets; what exists stays."""
    word = names.WORD[family]
    shapes = {name: shape.declaration for name, shape in set_shapes(family).items()}
    owner = "Owned by rulecast; edits are undone"
    return [f'add table {word} {names.TABLE} {{ comment "{owner}"; }}', *declare(family, shapes)]


def write_chains(family: Family, chains: Mapping[str, Chain], present: Container[str] = ()) -> Iterator[str]:
    """The lines that write chains which may go to each other; `present` ones may hold rules already."""
    for name, chain in chains.items():
        if chain.hook is None:
            yield f"add chain {names.WORD[family]} {names.TABLE} {name}"
    for name, chain in chains.items():
        yield from write_chain(family, name, chain, flush=name in present)


def script(state: State) -> Iterator[str]:
    """Everything of a state: table, sets, chains, elements, and the hooks last."""
    family = state.family
    yield from create_table(family)
    yield from declare(family, state.desired_sets())
    yield from write_chains(family, state.desired_chains())
    for set_name, elements in state.desired_elements().items():
        yield from write_elements(family, set_name, elements.items())
    yield from write_chains(family, state.writer.base_chains())


def write_elements(family: Family, set_name: str, elements: Iterable[tuple[bytes, Value]]) -> Iterator[str]:
    """`add element` lines."""
    texts = [element_text(set_name, family, key, value) for key, value in elements]
    for start in range(0, len(texts), _CHUNK):
        joined = ", ".join(texts[start : start + _CHUNK])
        yield f"add element {names.WORD[family]} {names.TABLE} {set_name} {{ {joined} }}"


def element_text(set_name: str, family: Family, key: bytes, value: Value) -> str:
    """One element as nft writes it."""
    width = 4 if family is Family.IPV4 else 16
    fields = []
    rest = key
    slots = "endpoints-" in set_name
    nodeport = set_name.startswith("nodeport-endpoints-") or set_name in _NODEPORT
    for _ in range(2 if set_name in _SELF else 0 if nodeport else 1):
        fields.append(str(ipaddress.ip_address(rest[:width])))
        rest = rest[width:]
    if rest and not slots:
        fields.append(names.PROTOCOL_NUMBER.get(rest[0], str(rest[0])))
        rest = rest[4:]
    if rest:
        fields.append(str(int.from_bytes(rest[:2], "big")))
    if slots:
        fields.append(str(int.from_bytes(rest[4:], sys.byteorder)))
    text = " . ".join(fields)
    if value is None:
        return text
    if isinstance(value, str):
        return f"{text} : drop" if value == "drop" else f"{text} : goto {value}"
    port = int.from_bytes(value[width : width + 2], "big")
    return f"{text} : {ipaddress.ip_address(value[:width])} . {port}"
