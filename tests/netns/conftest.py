"""One lab, one server and two agents for all packet tests."""

import os
from collections.abc import Iterator

import pytest

from rulecast.lab import Lab
from rulecast.model import Family
from tests.netns.cluster import Cluster, ReferenceCluster, build_lab
from tests.netns.expect import BLOCKED_IP
from tests.netns.objects import VIP, frontend
from tests.netns.rig import Rig
from tests.netns.world import SERVICES, more_slices

BACKEND_PORTS = (53, 5353, 8080, 8443, 9090)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the kernel."""
    for item in items:
        if item.path.parent.name == "netns":
            item.add_marker(pytest.mark.netns)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Nodes, pods with backends on the usual ports, clients. See `build_lab`."""
    with build_lab() as lab:
        for node in lab.nodes.values():
            node.serve(8080, 9001, 9002, 30001)
            for pod in node.pods.values():
                if not pod.name.startswith("cli"):
                    pod.serve(*BACKEND_PORTS)
        for family in Family:
            lab.outside.add_address(BLOCKED_IP[family])
            lab.nodes["n2"].route(BLOCKED_IP[family], lab.nodes["n1"])
            # A VIP that the node itself has, as some clouds do it.
            lab.nodes["n1"].add_address(frontend(VIP, 62, family))
            # The load balancer in front of the cluster, for the addresses that are its own.
            lab.lb.add_address(frontend(VIP, 23, family))
            for node in lab.nodes.values():
                node.route(frontend(VIP, 23, family), lab.lb)
        lab.lb.serve(80)
        yield lab


@pytest.fixture(scope="session")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The server and the agents, with the default flags."""
    directory = tmp_path_factory.mktemp("cluster")
    if binary := os.environ.get("KUBE_PROXY"):
        ReferenceCluster.binary = binary
        cluster: Cluster = ReferenceCluster(lab, directory)
    else:
        cluster = Cluster(lab, directory)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def world(cluster: Cluster) -> Cluster:
    """The cluster with the objects that the tables ask about."""
    cluster.apply(*SERVICES, extra=more_slices(cluster.lab))
    return cluster


@pytest.fixture(scope="session")
def fault_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A lab of its own for the tests that break things."""
    with build_lab() as lab:
        for node in lab.nodes.values():
            for pod in node.pods.values():
                if not pod.name.startswith("cli"):
                    pod.serve(8080)
        yield Rig(lab, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="class")
def rig(fault_rig: Rig) -> Iterator[Rig]:
    """Nothing runs yet, and nothing is in the kernels; the same for all tests of a class."""
    fault_rig.reset()
    yield fault_rig
    fault_rig.reset()
