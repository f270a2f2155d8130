"""Whatever happens in whatever order: the sum of the steps is what the final objects mean."""

import functools
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rulecast.model import FLEET, Kind, ResourceId, node_scope, zone_scope
from rulecast_server.kube.objects import (
    ApiObject,
    EndpointSlice,
    LoadBalancerIngress,
    Node,
    ObjectEvent,
    Service,
    ServiceCIDR,
    ServicePortSpec,
    SlicePort,
)
from tests.projection.builders import Cluster, added, endpoint, gone, node, service, service_cidr, slice_
from tests.projection.oracle import ask

NAMES = ("a", "a", "b", "c")
NAMESPACES = ("x", "x", "x", "y")
NODES = ("n1", "n2", "n3")
ZONES = ("za", "zb")
SERVICES = ("a", "a", "b", "c")
NAMESPACES = ("x", "x", "x", "y")
FLAGS = (None, True, False)

SERVICE_PORTS = (
    ServicePortSpec(port=80, name="http", protocol="TCP", node_port=30080),
    ServicePortSpec(port=80, name="http"),
    ServicePortSpec(port=80, name="", protocol="TCP"),
    ServicePortSpec(port=53, name="dns", protocol="UDP", node_port=30053),
    ServicePortSpec(port=53, name="dns", protocol="UDP"),
    ServicePortSpec(port=53, name="dns", protocol="TCP", node_port=30053),
)
CLUSTER_IPS = (
    ("10.96.0.1",),
    ("10.96.0.1",),
    ("10.96.0.2",),
    ("10.96.0.002", "fd00::2"),
    ("FD00::3", "10.96.0.3"),
    ("fd00::2",),
    ("None",),
    ("10.96.0.300",),
)
INGRESS = (
    "203.0.113.1",
    "203.0.113.3",
    "2001:DB8::1",
    LoadBalancerIngress(ip="203.0.113.4", ip_mode="Proxy"),
)
SLICE_PORTS = (
    [SlicePort(name="http", port=8080, protocol="TCP")],
    [SlicePort(name="http", port=8080), SlicePort(name="dns", port=5353, protocol="UDP")],
    [SlicePort(name="http", port=9090, protocol="TCP"), SlicePort(name="http", port=8080, protocol="TCP")],
    [SlicePort(name="dns", port=5353, protocol="UDP"), SlicePort(name="dns", port=5353, protocol="TCP")],
    [SlicePort(name="", port=8080, protocol="TCP"), SlicePort(name=None, port=1), SlicePort(name="http")],
    None,
)


def some_service(random: Random) -> Service:
    few = random.randrange
    return service(
        random.choice(SERVICES),
        namespace=random.choice(NAMESPACES),
        cluster_ips=random.choice(CLUSTER_IPS),
        ports=random.sample(SERVICE_PORTS, few(1, 4)),
        type=random.choice(["ClusterIP", "NodePort", "NodePort", "LoadBalancer", "ExternalName"]),
        external_ips=random.sample(["203.0.113.1", "203.0.113.2", "10.96.0.1", "2001:db8::1", "no"], few(3)),
        ingress=random.sample(INGRESS, few(3)),
        etp=random.choice(["Local", "Cluster", None]),
        itp=random.choice(["Local", "Cluster", None, None]),
        created=random.choice(["2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z", None]),
        labels=random.choice([*[None] * 6, {"service.kubernetes.io/service-proxy-name": "other"}]),
    )


def some_slice(random: Random) -> EndpointSlice:
    family = random.choice(["IPv4"] * 5 + ["IPv6"] * 2 + ["FQDN"])
    ips = ["10.1.0.1", "10.1.0.2", "10.1.0.03", "10.1.0.3", "10.1.0.4", "10.1.0.300"]
    if family == "IPv6":
        ips = ["fd00:1::1", "FD00:1::2", "fd00:1::02", "10.1.0.1"]
    # Hints count only when complete, so a slice mostly has them everywhere or nowhere.
    zoned = random.choice([0.0, 1.0, 1.0, 0.8])
    pinned = random.choice([0.0, 0.0, 1.0, 0.8])
    readiness = random.choice([FLAGS, (False,)])
    endpoints = [
        endpoint(
            random.choice(ips),
            random.choice((None, *NODES)),
            ready=random.choice(readiness),
            serving=random.choice(FLAGS),
            terminating=random.choice(FLAGS),
            zones=random.sample((*ZONES, "zc"), random.randint(1, 2)) if random.random() < zoned else (),
            nodes=random.sample((*NODES, "n4"), random.randint(1, 2)) if random.random() < pinned else (),
        )
        for _ in range(random.randrange(5))
    ]
    return slice_(
        random.choice(["s1", "s2", "s3"]),
        *endpoints,
        of=random.choice((*SERVICES, "a", "a", None)),
        family=family,
        ports=random.choice(SLICE_PORTS),
        namespace=random.choice(NAMESPACES),
    )


def some_node(random: Random) -> Node:
    return node(random.choice(NODES), random.choice((None, "", *ZONES, *ZONES)))


def some_cidr(random: Random) -> ServiceCIDR:
    return service_cidr(
        random.choice(["kubernetes", "more"]), random.choice(["10.96.0.0/16", "fd00::/108", "bad"])
    )


MAKERS: tuple[Callable[[Random], ApiObject], ...] = (
    *[some_service] * 4,
    *[some_slice] * 6,
    *[some_node] * 2,
    some_cidr,
)


@functools.cache
def universe(seed: int) -> list[ApiObject]:
    """Versions of a few objects. Histories choose among them, so that Hypothesis can shrink what fails."""
    random = Random(seed)
    return [random.choice(MAKERS)(random) for _ in range(60)]


History = list[tuple[ApiObject, bool, bool]]
"""An object, whether it is there or gone, and whether a step ends with it."""


def histories_in(objects: list[ApiObject]) -> st.SearchStrategy[History]:
    stays = st.sampled_from([True, True, True, False])
    event = st.tuples(st.sampled_from(objects), stays, st.booleans())
    return st.lists(event, min_size=14, max_size=60)


histories = st.integers(0, 199).map(universe).flatmap(histories_in)


def identity(item: ApiObject) -> tuple[str, str, str]:
    return (type(item).__name__, item.metadata.namespace, item.metadata.name)


def play(
    history: History, look: Callable[[Cluster, list[ApiObject]], None] | None = None
) -> tuple[Cluster, list[ApiObject]]:
    """Feed a history and look after each step. Returns what stands at the end."""
    cluster = Cluster()
    standing: dict[tuple[str, str, str], ApiObject] = {}
    events: list[ObjectEvent] = []
    for index, (item, stays, ends) in enumerate(history, start=1):
        if stays:
            events.append(added(item))
            standing[identity(item)] = item
        else:
            events.append(gone(item))
            standing.pop(identity(item), None)
        if ends or index == len(history):
            cluster.feed(events)
            events = []
            if look is not None:
                look(cluster, list(standing.values()))
    return cluster, list(standing.values())


def check_against_oracle(cluster: Cluster, standing: list[ApiObject]) -> None:
    for name in (*NODES, "n4"):
        answers = ask(standing, name)
        assert set(cluster.ports) == set(answers)
        for key, (frontend, backends) in answers.items():
            port = cluster.port(key)
            assert (
                port.cluster_ip,
                port.port,
                port.node_port,
                list(port.external_ips),
                list(port.load_balancer_ips),
                port.has_endpoints,
            ) == frontend
            assert cluster.backends(key, name) == backends, (key, name)


profile = settings(
    derandomize=True,
    database=None,
    deadline=None,
)


@settings(profile, max_examples=500)
@given(histories)
def test_the_sum_of_the_steps_is_what_a_fresh_start_gives(history: History) -> None:
    cluster, standing = play(history)
    fresh = Cluster(*reversed(standing))
    assert cluster.state == fresh.state
    assert sorted(cluster.projector.problems) == sorted(fresh.projector.problems)


@settings(profile, max_examples=1000)
@given(histories)
def test_each_node_sees_after_each_step_what_kube_proxy_would_there(
    history: History,
) -> None:
    play(history, check_against_oracle)


@settings(profile, max_examples=60)
@given(histories)
def test_the_same_objects_again_change_nothing(history: History) -> None:
    cluster, standing = play(history)
    again = cluster.step(*standing)
    assert again.changes == {}
    assert again.problems == ()


@settings(profile, max_examples=60)
@given(histories)
def test_nothing_remains_when_every_object_is_gone(history: History) -> None:
    cluster, standing = play(history)
    cluster.step(remove=standing)
    assert {scope: list(held) for scope, held in cluster.state.items()} == {
        FLEET: [ResourceId(Kind.CLUSTER, "")]
    }
    assert list(cluster.projector.problems) == []


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
def test_only_scopes_of_existing_things_are_used(first: int) -> None:
    everything = [
        node("n1", "za"),
        node("n2", "zb"),
        service(),
        slice_("web-1", endpoint("10.1.0.1", "n1", zones=["za"], nodes=["n1"])),
        slice_("web-2", endpoint("10.1.0.2", "n2", zones=["zb"], nodes=["n9"])),
    ]
    cluster = Cluster()
    for item in everything[first:] + everything[:first]:
        cluster.step(item)
    assert set(cluster.state) == {
        FLEET,
        zone_scope(""),
        zone_scope("za"),
        zone_scope("zb"),
        node_scope("n1"),
        node_scope("n2"),
    }
