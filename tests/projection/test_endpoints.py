"""Which endpoints of which slices serve, by their conditions and place."""

import itertools

import pytest

from rulecast.model import FLEET, Kind, node_scope
from rulecast_server.kube.objects import (
    EndpointSlice,
    LoadBalancerIngress,
    Service,
    SliceEndpoint,
    SlicePort,
)
from tests.projection.builders import (
    DNS,
    HTTP,
    Cluster,
    dead,
    draining,
    endpoint,
    node,
    port,
    service,
    slice_,
)

WEB = "default/web:http/TCP/ipv4"
DNS_KEY = "default/web:dns/UDP/ipv4"
N1, N2 = node("n1"), node("n2")
DNS_PORT = SlicePort(name="dns", port=5353, protocol="UDP")


def cluster_of(*endpoints: SliceEndpoint, of: Service | None = None) -> Cluster:
    return Cluster(N1, N2, of or service(), slice_("web-1", *endpoints))


@pytest.mark.parametrize(
    ("ready", "serving", "terminating", "alone", "beside_a_ready_one"),
    [
        (ready, serving, terminating, ready is not False or (serving is not False and terminating is True),
         ready is not False)
        for ready, serving, terminating in itertools.product([None, True, False], repeat=3)
    ],
)  # fmt: skip
@pytest.mark.parametrize(("ip", "family"), [("10.1.0.1", 4), ("fd00:1::1", 6)])
def test_conditions_decide_and_missing_ones_are_ready_serving_and_not_terminating(
    ready: bool | None,
    serving: bool | None,
    terminating: bool | None,
    alone: bool,
    beside_a_ready_one: bool,
    ip: str,
    family: int,
) -> None:
    key = f"default/web:http/TCP/ipv{family}"
    web = service(cluster_ips=("10.96.0.20", "2001:db8:96::20"))
    one = endpoint(ip, "n1", ready=ready, serving=serving, terminating=terminating)
    cluster = Cluster(web, slice_("web-1", one, family=f"IPv{family}"))
    seen = cluster.backends(key, "n1")
    name = f"{ip}:8080"
    assert (name in seen.cluster, name in seen.local) == (alone, alone)
    assert seen.local_ready == (ready is not False)
    assert cluster.port(key).has_endpoints is alone
    other = "10.1.0.9" if family == 4 else "fd00:1::9"
    cluster.step(slice_("web-2", endpoint(other, "n1"), family=f"IPv{family}"))
    seen = cluster.backends(key, "n1")
    assert (name in seen.cluster, name in seen.local) == (beside_a_ready_one, beside_a_ready_one)


def test_an_endpoint_without_any_conditions_is_ready() -> None:
    cluster = cluster_of(SliceEndpoint(addresses=["10.1.0.1"]))
    assert cluster.backends(WEB, "n1").cluster == ["10.1.0.1:8080"]


PROXY = LoadBalancerIngress(ip="1.2.3.4", ip_mode="Proxy")
E1, E2, E3, E4, E5 = (f"10.0.1.{i}" for i in range(1, 6))


@pytest.mark.parametrize(
    ("endpoints", "everywhere", "here", "count", "any"),
    [
        ([endpoint(E1, "n1"), endpoint(E2, "n1"), draining(E3, "n1"), dead(E4, "n1"), endpoint(E5, "n2")],
         [E1, E2, E5], [E1, E2], 2, True),
        ([dead(E1, "n1"), draining(E2, "n1"), draining(E3, "n1"), endpoint(E5, "n2")],
         [E5], [E2, E3], 0, True),
        ([dead(E1, "n1"), draining(E5, "n2")], [E5], [], 0, True),
        ([dead(E1, "n1"), dead(E5, "n2")], [], [], 0, False),
        ([], [], [], 0, False),
        ([endpoint(E1, "n1"), endpoint(E2, "n1"), endpoint(E3, "n1"), dead(E4, "n1")],
         [E1, E2, E3], [E1, E2, E3], 3, True),
        ([endpoint(E1), endpoint(E2, "n2")], [E1, E2], [], 0, True),
    ],
)  # fmt: skip
def test_ready_first_then_what_still_serves_in_the_cluster_and_on_the_node(
    endpoints: list[SliceEndpoint], everywhere: list[str], here: list[str], count: int, any: bool
) -> None:
    cluster = cluster_of(*endpoints)
    seen = cluster.backends(WEB, "n1")
    assert seen.cluster == [f"{ip}:8080" for ip in everywhere]
    assert seen.local == [f"{ip}:8080" for ip in here]
    assert seen.local_ready == count
    assert cluster.port(WEB).has_endpoints is any
    cluster.step(remove=[slice_("web-1")])
    assert cluster.backends(WEB, "n1") == ([], [], 0, None)
    assert cluster.port(WEB).has_endpoints is False


@pytest.mark.parametrize(
    ("of", "uses_cluster"),
    [
        (service(), True),
        (service(itp="Cluster"), True),
        (service(itp="Local"), False),
        (service(itp="Local", etp="Local"), False),
        (service(itp="Local", external_ips=["203.0.113.20"]), True),
        (service(itp="Local", etp="Local", type="NodePort", ports=[port(node_port=30080)]), True),
        (service(itp="Local", type="LoadBalancer", ingress=["203.0.113.10"]), True),
        (
            service(itp="Local", type="LoadBalancer", ingress=[PROXY]),
            False,
        ),
    ],
)  # fmt: skip
def test_the_cluster_set_is_there_only_when_some_destination_uses_it(of: Service, uses_cluster: bool) -> None:
    cluster = cluster_of(endpoint(E1, "n1"), of=of)
    assert cluster.port(WEB).uses_cluster_endpoints is uses_cluster
    assert list(cluster.scopes(Kind.CLUSTER_ENDPOINTS, WEB)) == ([FLEET] if uses_cluster else [])
    assert cluster.backends(WEB, "n1").local == [f"{E1}:8080"]
    assert cluster.port(WEB).has_endpoints is True


def test_a_local_set_is_kept_for_a_node_without_node_object() -> None:
    cluster = cluster_of(endpoint(E1, "unheard-of"))
    assert list(cluster.scopes(Kind.LOCAL_ENDPOINTS, WEB)) == [node_scope("unheard-of")]
    assert cluster.backends(WEB, "unheard-of").local == [f"{E1}:8080"]


ODD = {
    "no service label": (slice_("odd", endpoint(E2), of=None), ["no-service-label"]),
    "empty service label": (slice_("odd", endpoint(E2), of=""), ["no-service-label"]),
    "other service": (slice_("odd", endpoint(E2), of="other"), []),
    "other namespace": (slice_("odd", endpoint(E2), namespace="other"), []),
    "host names": (slice_("odd", endpoint("example.com"), family="FQDN"), []),
    "unknown type": (slice_("odd", endpoint(E2), family="IPX"), []),
    "headless": (slice_("odd", endpoint(E2), labels={"service.kubernetes.io/headless": ""}), []),
    "no ports": (slice_("odd", endpoint(E2), ports=None), []),
    "empty ports": (slice_("odd", endpoint(E2), ports=()), []),
    "port null": (slice_("odd", endpoint(E2), ports=[SlicePort(name="http")]), ["bad-port"]),
    "port zero": (slice_("odd", endpoint(E2), ports=[SlicePort(name="http", port=0)]), ["bad-port"]),
    "port too high": (slice_("odd", endpoint(E2), ports=[SlicePort(name="http", port=65536)]), ["bad-port"]),
    "name null": (slice_("odd", endpoint(E2), ports=[SlicePort(port=8080)]), ["bad-port"]),
    "protocol": (
        slice_("odd", endpoint(E2), ports=[SlicePort(name="http", port=1, protocol="X")]),
        ["bad-protocol"],
    ),
    "other port name": (slice_("odd", endpoint(E2), ports=[SlicePort(name="x", port=1)]), []),
    "other protocol": (
        slice_("odd", endpoint(E2), ports=[SlicePort(name="http", port=1, protocol="UDP")]),
        [],
    ),
    "no address": (slice_("odd", endpoint(None), SliceEndpoint(addresses=[])), ["no-address"]),
    "bad address": (
        slice_("odd", endpoint("10.1.0.300"), endpoint("0.0.0.0")),
        ["bad-address", "bad-address"],
    ),
    "other family": (slice_("odd", endpoint("fd00::1")), ["wrong-family"]),
    "no endpoints": (slice_("odd"), []),
}


@pytest.mark.parametrize("odd_first", [True, False])
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_slice_never_changes_what_the_good_one_gives(kind: str, odd_first: bool) -> None:
    odd, reasons = ODD[kind]
    good = slice_("web-1", endpoint(E1, "n1"))
    cluster = Cluster(service())
    for item in [odd, good] if odd_first else [good, odd]:
        cluster.step(item)
    assert cluster.backends(WEB, "n1").cluster == [f"{E1}:8080"]
    assert cluster.reasons() == reasons
    cluster.step(remove=[odd])
    assert cluster.reasons() == []


def test_an_odd_endpoint_costs_only_itself_and_only_the_first_address_counts() -> None:
    cluster = cluster_of(endpoint("x"), SliceEndpoint(addresses=["10.180.00.001", E2]), endpoint("fd00::1"))
    assert cluster.backends(WEB, "n1").cluster == ["10.180.0.1:8080"]
    assert cluster.reasons() == ["bad-address", "wrong-family"]


def test_ports_match_by_name_and_protocol_and_may_differ_in_number_by_slice() -> None:
    web = service(ports=[HTTP, port(443, "https")])
    both = [SlicePort(name="http", port=80), SlicePort(name="https", port=443)]
    cluster = Cluster(web, slice_("s1", endpoint(E1), endpoint(E2), ports=both))
    https = "default/web:https/TCP/ipv4"
    assert cluster.backends(WEB, "n1").cluster == [f"{E1}:80", f"{E2}:80"]
    assert cluster.backends(https, "n1").cluster == [f"{E1}:443", f"{E2}:443"]
    cluster.step(slice_("s2", endpoint(E1), endpoint(E3), ports=[SlicePort(name="http", port=9090)]))
    assert cluster.backends(WEB, "n1").cluster == [f"{E1}:80", f"{E1}:9090", f"{E2}:80", f"{E3}:9090"]
    cluster.step(slice_("s1", ports=both))
    assert cluster.backends(WEB, "n1").cluster == [f"{E1}:9090", f"{E3}:9090"]
    assert cluster.backends(https, "n1").cluster == []


def test_local_addresses_with_two_ports_count_once_as_ready() -> None:
    two = [SlicePort(name="http", port=80), SlicePort(name="http", port=81)]
    cluster = Cluster(service(), slice_("s1", endpoint(E1, "n1"), ports=two))
    assert cluster.backends(WEB, "n1") == ([f"{E1}:80", f"{E1}:81"], [f"{E1}:80", f"{E1}:81"], 1, None)


UNREADY = endpoint(E1, "n1", ready=False, serving=False)


@pytest.mark.parametrize(
    ("one", "other", "cluster_has", "local_on"),
    [
        (endpoint(E1, "n1"), endpoint(E1, "n2", ready=False, serving=False), True, "n1"),
        (draining(E1, "n1"), dead(E1, "n2"), True, "n1"),
        (endpoint(E1, "n1"), draining(E1, "n2"), True, "n1"),
        # Equal in standing: the slice whose name comes first.
        (endpoint(E1, "n2"), endpoint(E1, "n2"), True, "n2"),
        (endpoint(E1, "n1"), endpoint(E1, "n2"), True, "by-name"),
    ],
)
def test_slices_that_disagree_on_an_endpoint_give_one_answer_in_every_order(
    one: SliceEndpoint, other: SliceEndpoint, cluster_has: bool, local_on: str
) -> None:
    for first, second in [(one, other), (other, one)]:
        a, b = slice_("a", first), slice_("b", second)
        expected = first.node_name if local_on == "by-name" else local_on
        for order in itertools.permutations([a, b, service()]):
            cluster = Cluster()
            for item in order:
                cluster.step(item)
            assert (cluster.backends(WEB, "n1").cluster == [f"{E1}:8080"]) is cluster_has
            assert list(cluster.scopes(Kind.LOCAL_ENDPOINTS, WEB)) == [node_scope(expected or "")]


def test_one_slice_that_names_an_endpoint_twice_gives_one_answer_in_every_order() -> None:
    entries = [endpoint(E1, "n2"), UNREADY, endpoint(E1, "n1"), draining(E1, "n2")]
    states = [cluster_of(*order).state for order in itertools.permutations(entries)]
    assert all(state == states[0] for state in states)


def test_an_endpoint_that_one_service_loses_stays_with_another() -> None:
    cluster = Cluster(
        service(),
        service("api", cluster_ips=("10.96.0.21",)),
        slice_("web-1", draining(E1, "n1")),
        slice_("api-1", endpoint(E1, "n1"), of="api"),
    )
    cluster.step(slice_("web-1"))
    assert cluster.backends(WEB, "n1").cluster == []
    assert cluster.backends("default/api:http/TCP/ipv4", "n1").cluster == [f"{E1}:8080"]


@pytest.mark.parametrize(
    ("of", "endpoints", "serving"),
    [
        # As the fleet's cluster set: nothing to say.
        (service(ports=[DNS]), [endpoint(E1), endpoint(E2)], None),
        (service(ports=[DNS]), [draining(E1)], None),
        (service(ports=[DNS]), [], None),
        (service(ports=[DNS]), [endpoint(E1), draining(E2), dead(E3)], [E1, E2]),
        (service(ports=[DNS]), [endpoint(E1, ready=False)], [E1]),
        (service(ports=[DNS], itp="Local"), [endpoint(E1)], [E1]),
        (service(ports=[DNS], itp="Local"), [dead(E1)], None),
        # Ready but not serving: an empty set must hide the cluster set.
        (service(ports=[DNS]), [endpoint(E1, serving=False)], []),
        (service(ports=[DNS]), [endpoint(E1, zones=["za"]), endpoint(E2, zones=["zb"])], [E1, E2]),
        (service(ports=[DNS]), [endpoint(E1, zones=["za"], serving=False)], []),
        (service(ports=[DNS]), [endpoint(E1, nodes=["n1"])], [E1]),
    ],
)
def test_udp_flows_may_go_on_to_whatever_serves(
    of: Service, endpoints: list[SliceEndpoint], serving: list[str] | None
) -> None:
    cluster = Cluster(N1, of, slice_("web-1", *endpoints, ports=[DNS_PORT]))
    found = cluster.scopes(Kind.SERVING_ENDPOINTS, DNS_KEY)
    expected = None if serving is None else [(ip, 5353) for ip in serving]
    assert (list(found[FLEET].members) if found else None) == expected


def test_tcp_has_no_serving_set() -> None:
    assert cluster_of(endpoint(E1), draining(E2)).scopes(Kind.SERVING_ENDPOINTS, WEB) == {}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_service_made_anew_has_the_new_address_and_the_new_slice(order: tuple[int, ...]) -> None:
    old, new = service(), service(cluster_ips=("10.96.0.77",))
    s1, s2 = slice_("web-1", endpoint(E1)), slice_("web-2", endpoint(E2))
    cluster = Cluster(old, s1)
    steps = [lambda: cluster.step(remove=[old]), lambda: cluster.step(remove=[s1])]
    steps += [lambda: cluster.step(s2), lambda: cluster.step(new)]
    # The API server lets nobody create before the deletion of the same name.
    if order.index(3) < order.index(0):
        steps[0] = steps[3]
    for index in order:
        steps[index]()
    assert cluster.port(WEB).cluster_ip == "10.96.0.77"
    assert cluster.backends(WEB, "n1").cluster == [f"{E2}:8080"]


def test_endpoints_move_between_slices_without_a_gap_in_one_step() -> None:
    cluster = Cluster(service(), slice_("s1", endpoint(E1), endpoint(E2)), slice_("s2", endpoint(E3)))
    moved = cluster.step(slice_("s1", endpoint(E1)), slice_("s2", endpoint(E2), endpoint(E3)))
    assert moved.changes == {}


def test_a_slice_moves_to_another_service() -> None:
    cluster = Cluster(service(), service("api", cluster_ips=("10.96.0.21",)), slice_("s", endpoint(E1, "n1")))
    cluster.step(slice_("s", endpoint(E1, "n1"), of="api"))
    assert cluster.backends(WEB, "n1") == ([], [], 0, None)
    assert cluster.backends("default/api:http/TCP/ipv4", "n1").local == [f"{E1}:8080"]


def test_a_renamed_port_leaves_the_old_key_empty() -> None:
    cluster = cluster_of(endpoint(E1, "n1"))
    cluster.step(service(ports=[port(80, "web")]))
    assert list(cluster.ports) == ["default/web:web/TCP/ipv4"]
    assert cluster.scopes(Kind.CLUSTER_ENDPOINTS, WEB) == cluster.scopes(Kind.LOCAL_ENDPOINTS, WEB) == {}


def test_slices_without_their_service_give_nothing() -> None:
    one: EndpointSlice = slice_("web-1", endpoint(E1, "n1"))
    cluster = Cluster(one)
    assert [list(held) for held in cluster.state.values()] == [[(Kind.CLUSTER, "")]]
    cluster.step(service())
    assert cluster.backends(WEB, "n1").local == [f"{E1}:8080"]
