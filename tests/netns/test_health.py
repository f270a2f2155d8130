"""What load balancers and operators are told: health-check node ports, and health of agents and nodes."""

import dataclasses

import pytest

from rulecast.lab import Node
from rulecast.model import Family
from tests.netns.objects import BOTH, CLUSTER_IP, Ep, Svc, frontend
from tests.netns.rig import Answered, Rig
from tests.netns.world import A2, LOCAL_OUT, A, B

PORT = 32070
LOCAL = Svc("local", 70, [A], spec=LOCAL_OUT | {"healthCheckNodePort": PORT})
CLUSTER = dataclasses.replace(LOCAL, spec={})


def with_endpoints(*endpoints: Ep) -> Svc:
    return dataclasses.replace(LOCAL, endpoints=endpoints)


def asked(rig: Rig, node: Node, family: Family, port: int = PORT) -> Answered | None:
    """What a health-check node port answers to the load balancer; None when nobody listens."""
    try:
        return rig.get("/", host=rig.lab.lb, address=node.ip(family), port=port)
    except ConnectionRefusedError:
        return None


def until(rig: Rig, node: Node, family: Family, status: int | None, count: int = 0) -> None:
    """Wait for a status and a number of local endpoints; None: closed."""

    def right() -> bool:
        answered = asked(rig, node, family)
        if answered is None or status is None:
            return answered is None and status is None
        told = answered.json["localEndpoints"]
        assert answered.headers["X-Load-Balancing-Endpoint-Weight"] == str(told)
        assert answered.headers["Content-Type"] == "application/json"
        assert answered.headers["X-Content-Type-Options"] == "nosniff"
        assert answered.json["service"] == {"namespace": "default", "name": "local"}
        assert answered.json["serviceProxyHealthy"] is True
        return (answered.status, told) == (status, count)

    rig.eventually(right, 5)


families = pytest.mark.parametrize("family", BOTH, ids=lambda family: f"IPv{int(family)}")


class TestHealthCheckNodePorts:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def line(cls, rig: Rig) -> None:
        rig.server()
        for node in (rig.n1, rig.n2):
            rig.agent(name=node.name, node=node)

    @families
    def test_each_node_tells_of_its_own_endpoints(self, rig: Rig, family: Family) -> None:
        """kubernetes/kubernetes#44311."""
        for endpoints, here, there in (
            ([A], 1, 0),
            ([B], 0, 1),
            ([A, A2, B], 2, 1),
            ([A, Ep("A2", "unready")], 1, 0),
            ([], 0, 0),
        ):
            rig.apply(with_endpoints(*endpoints))
            until(rig, rig.n1, family, 200 if here else 503, here)
            until(rig, rig.n2, family, 200 if there else 503, there)

    @families
    def test_terminating_endpoints_drain(self, rig: Rig, family: Family) -> None:
        """They still answer at the node port, so that nothing is lost until the load balancer has looked."""
        rig.apply(with_endpoints(Ep("A", "terminating")))
        until(rig, rig.n1, family, 503, 0)
        assert rig.ask(rig.n1.ip(family), 30070, client=rig.outside) == {"A"}
        rig.apply(with_endpoints(Ep("A", "terminating"), A2))
        until(rig, rig.n1, family, 200, 1)

    @families
    def test_the_port_follows_the_policy(self, rig: Rig, family: Family) -> None:
        for _ in range(2):
            rig.apply(LOCAL)
            until(rig, rig.n1, family, 200, 1)
            rig.apply(CLUSTER)
            until(rig, rig.n1, family, None)
            assert rig.ask(rig.n1.ip(family), 30070, client=rig.outside) == {"A"}
        rig.apply(LOCAL)
        until(rig, rig.n1, family, 200, 1)
        rig.apply()
        until(rig, rig.n1, family, None)

    def test_a_port_that_another_program_has_is_told_and_taken_when_free(self, rig: Rig) -> None:
        rig.lab.nodes["n1"].serve(32071)
        moved = dataclasses.replace(LOCAL, spec=LOCAL_OUT | {"healthCheckNodePort": 32071})
        rig.apply(moved)
        rig.eventually(lambda: rig.metric("rulecast_agent_health_check_node_ports_failing") == 2)
        assert rig.ask(rig.n1.ip(), 30070, client=rig.outside) == {"A"}
        assert rig.healthz().status == 200
        rig.lab.servers.close("n1")

        def right() -> bool:
            answered = asked(rig, rig.n1, Family.IPV6, 32071)
            return answered is not None and answered.status == 200

        rig.eventually(right, 8)
        assert rig.metric("rulecast_agent_health_check_node_ports_failing") == 0


class TestNodeHealth:
    """KEP-3836."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def line(cls, rig: Rig) -> None:
        rig.write(LOCAL)
        rig.server()
        rig.agent()
        rig.until_programmed()

    @pytest.mark.parametrize(
        ("place", "change"),
        [
            ("spec", {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}),
            ("metadata", {"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        ],
        ids=["taint", "deletion"],
    )
    def test_a_node_that_is_to_go_is_told_to_load_balancers_alone(
        self, rig: Rig, place: str, change: dict[str, object]
    ) -> None:
        """kubernetes/kubernetes#105946."""
        assert rig.healthz().status == 200
        before = rig.nodes
        rig.nodes = [
            node | {place: node[place] | change} if node["metadata"]["name"] == "n1" else node
            for node in before
        ]
        rig.apply(LOCAL)
        rig.eventually(lambda: rig.healthz().status == 503, 5)
        assert rig.healthz().json["nodeEligible"] is False
        assert rig.get("/livez").status == 200
        for family in BOTH:
            until(rig, rig.n1, family, 200, 1)
            assert rig.ask(rig.n1.ip(family), 30070, client=rig.outside) == {"A"}
        rig.nodes = before
        rig.apply(LOCAL)
        rig.eventually(lambda: rig.healthz().status == 200, 5)
        assert rig.healthz().json["nodeEligible"] is True

    def test_a_node_object_that_is_deleted_takes_no_rules_along(self, rig: Rig) -> None:
        before = rig.nodes
        rig.nodes = [node for node in before if node["metadata"]["name"] != "n1"]
        rig.apply(LOCAL)
        rig.eventually(lambda: rig.healthz().status == 503, 5)
        assert "knows no Node named 'n1'" in rig.healthz().text
        for family in BOTH:
            assert rig.ask(rig.n1.ip(family), 30070, client=rig.outside) == {"A"}
            assert rig.ask(frontend(CLUSTER_IP, 70, family)) == {"A"}
        rig.nodes = before
        rig.apply(LOCAL)
        rig.eventually(lambda: rig.healthz().status == 200, 5)


class TestUnknownNode:
    @pytest.mark.parametrize("name", ["N1.example", "nobody"])
    def test_a_wrong_node_name_is_told(self, rig: Rig, name: str) -> None:
        """kubernetes/kubernetes#71851: no guess takes its place, and no endpoint is local."""
        rig.reset()
        rig.write(LOCAL)
        rig.server()
        agent = rig.agent(name=name)
        rig.until_programmed()
        agent.until_logged(f"the server knows no Node named '{name}'")
        assert rig.healthz().status == 503
        assert rig.get("/livez").status == 200
        assert rig.ask(frontend(CLUSTER_IP, 70, Family.IPV4)) == {"A"}
        assert "127.0.0.1 " not in rig.ruleset()
