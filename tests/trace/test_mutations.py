"""That the comparison can fail: no rule and no element of a whole node can be missing unnoticed."""

from collections.abc import Iterator

import pytest

from rulecast.model import Endpoint, Family, ServiceKey, ServicePort
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector
from tests.trace.compare import TRACERS, AnyTracer, differences, iptables_rules, nftables_rules
from tests.trace.iptables import IptablesTracer
from tests.trace.ruleset import Ruleset
from tests.trace.tracer import Tracer
from tests.trace.worlds import NETS, World

NET = NETS[Family.IPV4]
OURS, THEIRS, OTHER = (Endpoint(f"10.{pod}", 8080) for pod in ("1.0.1", "2.0.1", "2.0.2"))
VIPS = tuple(f"{NET.vip}{number}" for number in range(10))


def service(
    number: int,
    *members: Endpoint,
    local: tuple[Endpoint, ...] | None = None,
    protocol: str = "TCP",
    **fields: object,
) -> ServiceView:
    port = ServicePort(
        key=ServiceKey(f"ns/s{number}:http/{protocol}/ipv4"),
        cluster_ip=f"{NET.service}{number}",
        port=80,
        has_endpoints=bool(members),
        **fields,  # type: ignore[arg-type]
    )
    ours = tuple(one for one in members if one == OURS)
    return ServiceView(service=port, cluster=members, local=ours if local is None else local)


VIEWS = (
    service(1, OURS, THEIRS, OTHER, node_port=30001, external_ips=(VIPS[1],)),
    service(
        2,
        THEIRS,
        OTHER,
        # Terminating, and all that this node has.
        local=(OURS,),
        node_port=30002,
        load_balancer_ips=(VIPS[2],),
        external_local=True,
        restrict_sources=True,
        source_ranges=(NET.allowed, "10.1.0.0/24", NET.node_range),
    ),
    service(3, node_port=30003, external_ips=(VIPS[3], VIPS[4])),
    service(4, THEIRS, internal_local=True, node_port=30004, external_local=True),
    service(5, OURS, THEIRS, node_port=30005, affinity_seconds=600, external_local=True),
    service(6, OURS, THEIRS, protocol="UDP"),
    service(7, OURS, protocol="SCTP", node_port=30007),
    service(8, protocol="UDP", external_ips=(VIPS[8],)),
    service(9, THEIRS, load_balancer_ips=(VIPS[9],), restrict_sources=True, source_ranges=(NET.allowed,)),
)
CONFIG = FamilyConfig(
    detector=LocalDetector(source_cidr=NET.ours),
    node_ips=NET.nodes[:1],
    nodeport_addresses=NET.nodes[:1],
    service_cidrs=(NET.services,),
)
WORLD = World(
    Family.IPV4,
    HostConfig(families={Family.IPV4: CONFIG}),
    {each.service.key: each for each in VIEWS},
    frozenset((*NET.nodes, VIPS[4])),
)


def nftables_mutants() -> Iterator[tuple[str, AnyTracer]]:
    """The rules with one thing missing, and what that is."""
    whole = nftables_rules(WORLD)

    def traced(name: str, what: object, mutant: Ruleset) -> tuple[str, AnyTracer]:
        return f"{name}: {what}", Tracer(mutant, local=WORLD.local)

    for name, chain in whole.chains.items():
        for index, rule in enumerate(chain.rules):
            mutant = nftables_rules(WORLD)
            del mutant.chains[name].rules[index]
            yield traced(name, " ".join(rule), mutant)
    for name, content in whole.maps.items():
        for key in content:
            mutant = nftables_rules(WORLD)
            del mutant.maps[name][key]
            yield traced(name, key, mutant)
    for name, members in whole.sets.items():
        for key in members:
            mutant = nftables_rules(WORLD)
            mutant.sets[name].remove(key)
            yield traced(name, key, mutant)


def iptables_mutants() -> Iterator[tuple[str, AnyTracer]]:
    """The same."""
    for table, chains in iptables_rules(WORLD).items():
        for name, rules in chains.items():
            for index, rule in enumerate(rules):
                mutant = iptables_rules(WORLD)
                del mutant[table][name][index]
                yield f"{table} {name}: {' '.join(rule)}", IptablesTracer(mutant, local=WORLD.local)


def harmless(gone: str) -> bool:
    """Affinity and the end of a flow need more than its first packet; the rest is there twice."""
    refused_as_a_cluster_ip = gone.startswith(
        ("no-endpoint-services: ('172.30.", "filter RULECAST-UNDELIVERED: -d 172.30.")
    )
    martian = gone.startswith("filter-prerouting-pre-dnat: ct state new ip saddr")
    later = any(words in gone for words in ("@affinity-", "--update", "INVALID", "RELATED,ESTABLISHED"))
    # Where the policy of FORWARD is ACCEPT, and for a mark that nobody sees.
    policy = gone.endswith("--mark 0x4000/0x4000 -j ACCEPT") or "--set-xmark 0x4000/0x0" in gone
    # Without route_localnet the kernel drops it by itself.
    neighbors = gone.startswith("filter RULECAST-INPUT: -d 127.0.0.0/8 ! -i lo")
    return refused_as_a_cluster_ip or martian or later or policy or neighbors


@pytest.mark.parametrize("mode", TRACERS)
def test_whatever_is_missing_is_noticed(mode: str) -> None:
    assert differences(WORLD, TRACERS[mode](WORLD)) == []
    mutants = nftables_mutants() if mode == "nftables" else iptables_mutants()
    gone = [what for what, mutant in mutants if not differences(WORLD, mutant)]
    assert [what for what in gone if not harmless(what)] == []
