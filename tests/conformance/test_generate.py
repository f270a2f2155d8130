"""The generator of scenarios: the same for the same seed, and what an apiserver would accept."""

import itertools
from collections import Counter

import pytest

from tests.conformance.cases import PER_STEP, cases
from tests.conformance.generate import MOST_PORTS, STEPS, scenario
from tests.conformance.odd import NO_ADDRESSES, write
from tests.netns.objects import Object

SEEDS = range(60)


def _objects(seed: int) -> list[list[Object]]:
    return [state.objects() for state in scenario(seed).states]


def _services(seed: int) -> list[Object]:
    return [each for objects in _objects(seed) for each in objects if each["kind"] == "Service"]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_always_makes_the_same_scenario_and_the_same_questions(seed: int) -> None:
    assert scenario(seed) == scenario(seed)
    assert cases(seed, scenario(seed).states) == cases(seed, scenario(seed).states)


def test_seeds_make_different_scenarios() -> None:
    assert len({repr(scenario(seed)) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_differs_from_the_one_before(seed: int) -> None:
    states = scenario(seed).states
    assert len([each for each in states if not each.hurried]) == STEPS
    assert not states[-1].hurried
    assert all(before != after for before, after in itertools.pairwise(states))


@pytest.mark.parametrize("seed", SEEDS)
def test_names_and_node_ports_are_unique(seed: int) -> None:
    for objects in _objects(seed):
        names = Counter((each["kind"], each["metadata"]["name"]) for each in objects)
        node_ports = Counter(
            (port["nodePort"], port["protocol"])
            for each in objects
            if each["kind"] == "Service"
            for port in each["spec"]["ports"]
            if "nodePort" in port
        )
        assert set((names | node_ports).values()) <= {1}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_address_type_of_a_slice_never_changes(seed: int) -> None:
    types: dict[str, set[str]] = {}
    for objects in _objects(seed):
        for each in objects:
            if each["kind"] == "EndpointSlice":
                types.setdefault(each["metadata"]["name"], set()).add(each["addressType"])
    assert all(len(each) == 1 for each in types.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_fields_stand_only_where_the_api_allows_them(seed: int) -> None:
    for service in _services(seed):
        spec = service["spec"]
        outside = spec["type"] in ("NodePort", "LoadBalancer") or "externalIPs" in spec
        assert ("externalTrafficPolicy" in spec) <= outside
        assert ("loadBalancerSourceRanges" in spec) <= (spec["type"] == "LoadBalancer")
        local = spec["type"] == "LoadBalancer" and spec["externalTrafficPolicy"] == "Local"
        assert ("healthCheckNodePort" in spec) == local
        names = [port["name"] for port in spec["ports"]]
        assert len(set(names)) == len(names)
        assert len({(port["port"], port["protocol"]) for port in spec["ports"]}) == len(names)


def test_every_kind_of_service_and_condition_comes() -> None:
    services = [each for seed in SEEDS for each in _services(seed)]
    types = {each["spec"]["type"] for each in services}
    assert types == {"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"}
    for field in ("externalIPs", "loadBalancerSourceRanges", "sessionAffinity"):
        assert any(field in each["spec"] for each in services)
    for policy in ("internalTrafficPolicy", "externalTrafficPolicy"):
        assert {each["spec"].get(policy) for each in services} >= {"Cluster", "Local"}


def test_addresses_are_shared_between_services_at_the_same_and_at_other_ports() -> None:
    same = other = 0
    for seed in SEEDS:
        for objects in _objects(seed):
            ports: dict[str, list[set[tuple[int, str]]]] = {}
            for service in objects:
                for address in service.get("spec", {}).get("externalIPs", ()):
                    said = {(port["port"], port["protocol"]) for port in service["spec"]["ports"]}
                    ports.setdefault(address, []).append(said)
            for claims in ports.values():
                for one, another in itertools.combinations(claims, 2):
                    same += bool(one & another)
                    other += bool(one ^ another)
    assert same
    assert other


def test_what_a_cluster_may_hold_comes() -> None:
    services = [each for seed in SEEDS for each in _services(seed)]
    slices = [
        each
        for seed in SEEDS
        for objects in _objects(seed)
        for each in objects
        if each["kind"] == "EndpointSlice"
    ]
    specs = [each["spec"] for each in services]
    assert any(port["protocol"] == "SCTP" for spec in specs for port in spec["ports"])
    assert any(len(spec["ports"]) == MOST_PORTS for spec in specs)
    assert any(spec.get("allocateLoadBalancerNodePorts") is False for spec in specs)
    assert {spec.get("trafficDistribution") for spec in specs} > {None, "PreferClose"}
    assert any("service.kubernetes.io/headless" in each["metadata"]["labels"] for each in slices)
    written = {address for spec in specs for address in spec.get("externalIPs", ())}
    assert written & set(NO_ADDRESSES)
    assert any(address.startswith("::ffff:") for address in written)
    assert any(len({port["port"] for port in each["ports"]}) > 1 for each in slices)


@pytest.mark.parametrize("change", ["type", "cluster IP", "families"])
def test_services_change_what_makes_them_others(change: str) -> None:
    def said(service: Object) -> object:
        spec = service["spec"]
        if change == "type":
            return spec["type"], spec.get("clusterIP") == "None"
        return spec.get("clusterIP" if change == "cluster IP" else "ipFamilies")

    seen: dict[tuple[int, str], list[object]] = {}
    for seed in SEEDS:
        for service in _services(seed):
            seen.setdefault((seed, service["metadata"]["name"]), []).append(said(service))
    assert any(before != after for each in seen.values() for before, after in itertools.pairwise(each))


@pytest.mark.parametrize(
    ("how", "address", "written"),
    [
        ("zeros", "203.0.113.7", "203.000.113.007"),
        ("mapped", "203.0.113.7", "::ffff:203.0.113.7"),
        ("long", "2001:db8::7", "2001:0DB8:0000:0000:0000:0000:0000:0007"),
        ("long", "203.0.113.7", "203.0.113.7"),
        ("zeros", "2001:db8::7", "2001:db8::7"),
        ("", "203.0.113.7", "203.0.113.7"),
    ],
)
def test_odd_writings(how: str, address: str, written: str) -> None:
    assert write(address, how) == written


@pytest.mark.parametrize("seed", SEEDS)
def test_questions_are_bounded_and_none_comes_twice(seed: int) -> None:
    asked = cases(seed, scenario(seed).states)
    assert 0 < len(asked) <= PER_STEP
    assert len(set(asked)) == len(asked)


def test_what_is_gone_is_asked_for_in_the_next_step() -> None:
    def gone(seed: int) -> set[int]:
        first, second = scenario(seed).states[:2]
        return {each.number for each in first.services} - {each.number for each in second.services}

    seed = next(seed for seed in SEEDS if gone(seed))
    assert gone(seed) & {each.service for each in cases(seed, scenario(seed).states[:2])}


def test_some_steps_are_taken_by_way_of_states_that_nobody_waits_for() -> None:
    assert {state.hurried for seed in SEEDS for state in scenario(seed).states} == {True, False}


def test_a_scenario_can_be_reduced_to_some_services() -> None:
    whole = scenario(1)
    number = whole.states[0].services[0].number
    assert all({each.number for each in state.services} <= {number} for state in whole.only(number).states)
