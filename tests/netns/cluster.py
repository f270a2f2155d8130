"""The line under test: one server, an agent on each node, fed with manifests, in one lab."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rulecast.lab import Lab, Node
from rulecast.model import Family
from tests.netns.objects import BOTH, ROUTED, Object, Svc, node_objects, service_cidrs

CLUSTER_CIDR = "10.244.0.0/16,2001:db8:244::/48"
DEFAULT_FLAGS = ("--cluster-cidr", CLUSTER_CIDR)
MODE = os.environ.get("MODE", "nftables")
"""What the tables are asked of: nftables, iptables-nft or iptables-legacy."""
MODE_FLAGS = {
    "nftables": ("--mode", "nftables"),
    "iptables-nft": ("--mode", "iptables", "--iptables-backend", "nft"),
    "iptables-legacy": ("--mode", "iptables", "--iptables-backend", "legacy"),
    "ipvs": ("--mode", "ipvs"),
}[MODE]
_GRPC_PORT = 9443
SLOWNESS = float(os.environ.get("SLOWNESS", "1"))
"""How much slower than a real machine this one is: an emulated one by ten and more."""
_PATIENCE = 20.0
"""Seconds; only ever waited for when something is broken."""


def eventually(condition: Callable[[], bool], what: Callable[[], str], patience: float = _PATIENCE) -> None:
    """Wait until a condition holds; fail with `what()` when it does not come to hold."""
    end = time.monotonic() + patience * SLOWNESS
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {patience:g} s: {what()}")
        time.sleep(0.02)


def build_lab() -> Lab:
    """Two nodes with pods, two outside clients (one entering by each node), a load balancer.

    Backends A to A4 are on n1, B and C on n2; cli1 and cli2 are client pods.
    """
    lab = Lab()
    try:
        n1, n2 = lab.add_node("n1", zone="za"), lab.add_node("n2", zone="zb")
        for number, name in enumerate(("A", "A2", "A3", "A4"), 5):
            n1.add_pod(name, number)
        for number, name in enumerate(("B", "C"), 5):
            n2.add_pod(name, number)
        n1.add_pod("cli1", 100)
        n2.add_pod("cli2", 100)
        outside2 = lab.add_host("outside2", {Family.IPV4: "198.51.100.8", Family.IPV6: "2001:db8:51::8"})
        for destination in ROUTED:
            lab.outside.route(destination, n1)
            outside2.route(destination, n2)
        for family in BOTH:
            # Without masquerading, a remote backend's answer has to come back through the node that
            # translated.
            n2.route(lab.outside.ip(family), n1)
            n1.route(outside2.ip(family), n2)
    except BaseException:
        lab.close()
        raise
    return lab


class Cluster:
    """Server and agents as processes; `apply` puts a state into the kernels of both nodes."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.n1, self.n2 = lab.nodes["n1"], lab.nodes["n2"]
        self.outside2 = next(host for host in lab.hosts if host.name == "outside2")
        self.directory = directory
        self._manifests = directory / "manifests"
        self._manifests.mkdir()
        self._generation = 0
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._write([])
        self.server = self._start_server()
        status = [sys.executable, "-m", "tests.netns.agents_status", f"127.0.0.1:{_GRPC_PORT}"]
        self._status = subprocess.Popen(
            ["ip", "netns", "exec", lab.fabric.namespace.name, *status],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        for node in lab.nodes.values():
            self.start_agent(node)
        self.wait_for_agents()

    def close(self) -> None:
        """End what is not ended with the lab."""
        self._status.kill()
        self._status.communicate()

    def apply(self, *services: Svc, extra: Iterable[Object] = ()) -> None:
        """Make these services all that there are, and wait until both kernels have them."""
        before = self.status()["revision"]
        self._generation += 1
        objects = [each for service in services for each in service.manifests(self.lab)]
        self._write([*objects, *extra])
        eventually(lambda: self._settled(after=before), lambda: f"revision {before} acknowledged: {self}")

    def wait_for_agents(self) -> None:
        """Wait until both agents are connected and have in the kernel what the server last projected."""
        eventually(lambda: self._settled(after=0), lambda: f"both agents in sync: {self}")

    def start_agent(self, node: Node, *flags: str, defaults: Sequence[str] = DEFAULT_FLAGS) -> None:
        """Start an agent on a node."""
        state = self.directory / f"state-{node.name}"
        argv = ["agent", "--server", f"{self.lab.fabric.ip()}:{_GRPC_PORT}", "--insecure"]
        argv += ["--node-name", node.name, "--state-dir", str(state), *MODE_FLAGS, *defaults, *flags]
        self._agents[node.name] = self._spawn(node, argv, f"agent-{node.name}")

    def stop_agent(self, node: Node) -> None:
        """End an agent with SIGTERM; what it programmed stays."""
        process = self._agents.pop(node.name)
        process.terminate()
        process.wait(_PATIENCE)
        eventually(lambda: node.name not in self._connected(), lambda: f"{node.name} gone: {self}")

    @contextlib.contextmanager
    def agent_flags(self, node: Node, *flags: str, defaults: Sequence[str] = ()) -> Iterator[None]:
        """Run a node's agent with other flags for the length of the block."""
        self.stop_agent(node)
        self.start_agent(node, *flags, defaults=defaults)
        try:
            self.wait_for_agents()
            yield
        finally:
            self.stop_agent(node)
            self.start_agent(node)
            self.wait_for_agents()

    def restart_agent(self, node: Node) -> None:
        """End an agent and start it again with the same flags."""
        self.stop_agent(node)
        self.start_agent(node)
        self.wait_for_agents()

    def stop_server(self) -> None:
        """Kill the server."""
        self.server.kill()
        self.server.wait()

    def start_server(self) -> None:
        """Start the server again and wait until both agents are back."""
        self.server = self._start_server()
        eventually(self._server_answers, lambda: "the server answers")
        self.wait_for_agents()

    def status(self) -> dict[str, Any]:
        """ListAgents, as the server answers it now; empty while there is no server."""
        assert self._status.stdin is not None
        assert self._status.stdout is not None
        self._status.stdin.write(b"\n")
        self._status.stdin.flush()
        answer: dict[str, Any] = json.loads(self._status.stdout.readline())
        return answer

    def ruleset(self, node: Node) -> str:
        """What nft lists on a node, with the counters and dynamic elements of the moment."""
        return node.namespace.run("nft", "list", "ruleset")

    def log(self, name: str) -> str:
        """What a process (server, agent-n1, agent-n2) wrote so far."""
        return (self.directory / f"{name}.log").read_text()

    def __str__(self) -> str:
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.directory.glob("*.log")
        )
        return f"{self.status()}\n{logs}"

    def _connected(self) -> dict[str, Any]:
        return {each["nodeName"]: each for each in self.status().get("agents", ())}

    def _server_answers(self) -> bool:
        return "error" not in self.status()

    def _settled(self, *, after: int) -> bool:
        status = self.status()
        acknowledged = {each["nodeName"]: each["ackedRevision"] for each in status.get("agents", ())}
        return (
            status.get("revision", 0) > after
            and acknowledged.keys() == self._agents.keys()
            and min(acknowledged.values()) >= status["revision"]
        )

    def _start_server(self) -> subprocess.Popen[bytes]:
        argv = ["server", "--manifests", str(self._manifests), "--insecure"]
        argv += ["--listen", f"0.0.0.0:{_GRPC_PORT}", "--http", "127.0.0.1:9440"]
        return self._spawn(self.lab.fabric, argv, "server")

    def _spawn(self, host: Any, argv: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as log:
            return self.lab.popen(host, [sys.executable, "-m", "rulecast.cli", *argv], stdout=log, stderr=log)

    def _write(self, objects: Sequence[Object]) -> None:
        """One file, replaced at once. One Service changes with each state, so that each has a revision."""
        marker = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "generation", "namespace": "lab"},
            "spec": {
                "clusterIP": "10.96.255.254",
                "clusterIPs": ["10.96.255.254"],
                "ipFamilies": ["IPv4"],
                "ports": [{"port": 1 + self._generation, "protocol": "TCP"}],
            },
        }
        documents = [*node_objects(self.lab), service_cidrs(), marker, *objects]
        made = self._manifests / ".state.yaml.new"
        made.write_text("\n---\n".join(json.dumps(each) for each in documents))
        made.rename(self._manifests / "state.yaml")


class ReferenceCluster(Cluster):
    """The same with kube-proxy on each node, watching a stand-in: `KUBE_PROXY=BINARY pytest tests/netns`."""

    binary: str

    def _settled(self, *, after: int) -> bool:
        # kube-proxy takes Services and slices separately and writes once a second at most.
        marker = f"10.96.255.254 . tcp . {1 + self._generation} "
        before = self._rulesets()
        if not all(marker in ruleset for ruleset in before):
            return False
        time.sleep(1.3)
        return before == self._rulesets()

    def _rulesets(self) -> list[str]:
        rulesets = [self.ruleset(self.lab.nodes[name]) for name in self._agents]
        return [re.sub(r" expires \S+", "", ruleset) for ruleset in rulesets]

    def status(self) -> dict[str, Any]:
        return {"revision": self._generation, "agents": [{"nodeName": n} for n in self._agents]}

    def stop_agent(self, node: Node) -> None:
        process = self._agents.pop(node.name)
        process.terminate()
        process.wait(_PATIENCE)

    def start_agent(self, node: Node, *flags: str, defaults: Sequence[str] = DEFAULT_FLAGS) -> None:
        argv = [self.binary, "--proxy-mode=nftables", f"--master=http://{self.lab.fabric.ip()}:8080"]
        argv += ["--kube-api-content-type=application/json", f"--hostname-override={node.name}"]
        argv += ["--conntrack-max-per-core=0", "--conntrack-min=0", "--v=1", *defaults, *flags]
        with (self.directory / f"agent-{node.name}.log").open("ab") as log:
            self._agents[node.name] = self.lab.popen(node, argv, stdout=log, stderr=log)

    def _start_server(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "tests.fakes.serve", "--host", self.lab.fabric.ip(), "--port", "8080"]
        argv += ["--manifests", str(self._manifests / "state.yaml")]
        with (self.directory / "server.log").open("ab") as log:
            return self.lab.popen(self.lab.fabric, argv, stdout=log, stderr=log)
