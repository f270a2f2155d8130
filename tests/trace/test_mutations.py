"""That the comparison can fail: no rule and no element of a whole node can be missing unnoticed."""

from collections.abc import Iterator

from rulecast.model import Endpoint, Family, ServiceKey, ServicePort
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector
from tests.trace.compare import differences, rules
from tests.trace.ruleset import Ruleset
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


def mutants() -> Iterator[tuple[str, Ruleset]]:
    """The rules with one thing missing, and what that is."""
    whole = rules(WORLD)
    for name, chain in whole.chains.items():
        for index, rule in enumerate(chain.rules):
            mutant = rules(WORLD)
            del mutant.chains[name].rules[index]
            yield f"{name}: {' '.join(rule)}", mutant
    for name, content in whole.maps.items():
        for key in content:
            mutant = rules(WORLD)
            del mutant.maps[name][key]
            yield f"{name}: {key}", mutant
    for name, members in whole.sets.items():
        for key in members:
            mutant = rules(WORLD)
            mutant.sets[name].remove(key)
            yield f"{name}: {key}", mutant


def harmless(gone: str) -> bool:
    """Affinity needs more than one packet; the rest is there twice."""
    refused_as_a_cluster_ip = gone.startswith("no-endpoint-services: ('172.30.")
    martian = gone.startswith("filter-prerouting-pre-dnat: ct state new ip saddr")
    return "@affinity-" in gone or refused_as_a_cluster_ip or martian


def test_whatever_is_missing_is_noticed() -> None:
    assert differences(WORLD, rules(WORLD)) == []
    gone = [what for what, mutant in mutants() if not differences(WORLD, mutant)]
    assert [what for what in gone if not harmless(what)] == []
