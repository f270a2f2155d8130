"""`rulecast demo`: a small cluster in network namespaces on this machine, with real traffic."""

import collections
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from rulecast.errors import UsageError
from rulecast.flags import Parser
from rulecast.lab import Answer, Host, Lab, LabError, Pod, Probe, Verdict, run_probes, unavailable
from rulecast.model import Family

_CLUSTER_IP = {Family.IPV4: "10.96.0.20", Family.IPV6: "2001:db8:96::20"}
_EXTERNAL_IP = {Family.IPV4: "203.0.113.10", Family.IPV6: "2001:db8:113::10"}
_NODE_PORT = 30080
_CLUSTER_CIDR = "10.244.0.0/16,2001:db8:244::/48"
_GRPC_PORT = 9443
_REQUESTS = 24
"""To two backends, all of them go to the same one once in eight million runs."""
_PATIENCE = 20.0
"""Seconds for a change to reach both kernels before the demo gives up; it takes a fraction of one."""


class _Failed(Exception):
    """The cluster did not do what the demo shows; `str()` tells what, with the processes' last words."""


def main(argv: Sequence[str]) -> int:
    """Run the demo: 0 when all of it went as told, 1 when not. Raises UsageError when it cannot run here."""
    Parser(
        prog="rulecast demo",
        description="Two nodes, pods and an outside client in network namespaces; a server, an agent on each"
        " node, and requests that are really answered. Needs root; leaves nothing behind.",
        allow_abbrev=False,
    ).parse_args(argv)
    if reason := unavailable():
        raise UsageError(f"demo: {reason}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    signal.signal(signal.SIGINT, _interrupted)
    started = time.monotonic()
    out = _Output()
    try:
        with tempfile.TemporaryDirectory(prefix="rulecast-demo-") as directory, Lab() as lab:
            _Demo(lab, Path(directory), out).run()
    except (LabError, _Failed) as error:
        out.line(out.red(f"failed: {error}"))
        return 1
    except KeyboardInterrupt:
        out.line("\ninterrupted; everything is removed again")
        return 130
    out.line(f"\nDone in {time.monotonic() - started:.1f} s; namespaces, rules and processes are gone again.")
    return 0


def _terminated(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _interrupted(number: int, _frame: FrameType | None) -> None:
    # Once is enough: what follows is the cleaning up, which a second one must not cut short.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Output:
    """Colors on a terminal only."""

    def __init__(self) -> None:
        self._tty = sys.stdout.isatty()

    def line(self, text: str = "") -> None:
        print(text, flush=True)

    def bold(self, text: str) -> str:
        return self._color("1", text)

    def green(self, text: str) -> str:
        return self._color("32", text)

    def red(self, text: str) -> str:
        return self._color("31", text)

    def dim(self, text: str) -> str:
        return self._color("2", text)

    def _color(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._tty else text


class _Demo:
    def __init__(self, lab: Lab, directory: Path, out: _Output) -> None:
        self._lab = lab
        self._out = out
        self._logs = directory
        self._manifests = directory / "manifests"
        self._manifests.mkdir()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._n1, self._n2 = lab.add_node("n1", "za"), lab.add_node("n2", "zb")
        self._client = self._n1.add_pod("client", 100)
        self._web: dict[str, Pod] = {
            "web-1": self._n1.add_pod("web-1"),
            "web-2": self._n2.add_pod("web-2"),
            "web-3": self._n2.add_pod("web-3"),
        }
        for pod in self._web.values():
            pod.serve(8080)
        for family in Family:
            lab.outside.route(_EXTERNAL_IP[family], self._n1)

    def run(self) -> None:
        """All steps; raises _Failed at the first that does not hold."""
        self._introduce()
        self._write({"web-1": True, "web-2": True})
        self._start()
        two = {"web-1", "web-2"}
        self._step("A pod asks the Service's cluster IP; the backends see the pod itself")
        for family in Family:
            self._expect(self._client, _CLUSTER_IP[family], 80, two, self._client.ip(family))
        self._step("A client outside asks a node port; the answer comes back through that node")
        for family in Family:
            self._expect(self._lab.outside, self._n1.ip(family), _NODE_PORT, two, self._n1.ip(family))
        self._step("The same client asks an external address")
        for family in Family:
            self._expect(self._lab.outside, _EXTERNAL_IP[family], 80, two, self._n1.ip(family))
        self._step("web-1 becomes unready")
        self._write({"web-1": False, "web-2": True})
        self._expect_everywhere({"web-2"})
        self._step("web-1 is ready again, and web-3 joins")
        self._write({"web-1": True, "web-2": True, "web-3": True})
        self._expect_everywhere({"web-1", "web-2", "web-3"})
        self._step("The server is killed: nobody computes rules now, and the rules stay")
        self._processes["server"].kill()
        self._processes.pop("server").wait()
        self._expect_everywhere({"web-1", "web-2", "web-3"})
        self._step("The server is back, and the Service is scaled down to web-3, then to nothing")
        self._start_server()
        self._write({"web-3": True})
        self._expect_everywhere({"web-3"})
        self._out.line()
        self._write({})
        self._expect_everywhere(set())

    def _introduce(self) -> None:
        out, n1, n2 = self._out, self._n1, self._n2
        out.line(out.bold("Two nodes, real packets, no Kubernetes"))
        for node in (n1, n2):
            pods = "   ".join(f"{pod.name} {pod.ip()}" for pod in node.pods.values())
            out.line(f"  {node.name:8}{node.ip():14}{pods}")
        out.line(f"  {'outside':8}{self._lab.outside.ip():14}a client that is neither node nor pod")

    def _start(self) -> None:
        started = time.monotonic()
        self._start_server()
        for node in (self._n1, self._n2):
            argv = ["agent", "--server", f"{self._lab.fabric.ip()}:{_GRPC_PORT}", "--insecure"]
            argv += ["--node-name", node.name, "--mode", "nftables", "--cluster-cidr", _CLUSTER_CIDR]
            argv += ["--state-dir", str(self._logs / f"state-{node.name}")]
            self._spawn(node, f"agent {node.name}", argv)
        for client in (self._client, self._lab.outside):
            self._settle(client, _EXTERNAL_IP[Family.IPV4], 80, {"web-1", "web-2"})
        self._out.line(f"  one server and two agents, first answer after {time.monotonic() - started:.1f} s")

    def _start_server(self) -> None:
        argv = ["server", "--manifests", str(self._manifests), "--insecure"]
        argv += ["--listen", f"{self._lab.fabric.ip()}:{_GRPC_PORT}", "--http", "127.0.0.1:9440"]
        self._spawn(self._lab.fabric, "server", argv)

    def _spawn(self, host: Host, name: str, argv: Sequence[str]) -> None:
        with (self._logs / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "rulecast.cli", *argv]
            self._processes[name] = self._lab.popen(host, command, stdout=log, stderr=log)

    def _step(self, text: str) -> None:
        self._out.line()
        self._out.line(self._out.bold(text))

    def _expect_everywhere(self, backends: set[str]) -> None:
        self._expect(self._client, _CLUSTER_IP[Family.IPV4], 80, backends, self._client.ip())
        self._expect(self._lab.outside, self._n1.ip(), _NODE_PORT, backends, self._n1.ip())
        self._expect(self._lab.outside, self._n2.ip(), _NODE_PORT, backends, self._n2.ip())
        self._expect(self._client, _CLUSTER_IP[Family.IPV6], 80, backends, self._client.ip(Family.IPV6))

    def _expect(self, client: Host, address: str, port: int, backends: set[str], source: str) -> None:
        """Show who answers; exactly `backends` must, seeing `source`. None means that all is refused."""
        answers, waited = self._settle(client, address, port, backends)
        sources = {answer.reached.source for answer in answers if answer.reached}
        if sources - {source}:
            raise _Failed(f"{client.name} was seen as {', '.join(sorted(sources))}, not as {source}")
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        seen = f"as {source}" if backends else ""
        delay = self._out.dim(f"(after {waited * 1000:.0f} ms)") if waited > 0.005 else ""
        out = self._out
        out.line(
            f"  {out.green('ok')} {client.name:8}-> {where:26} {_summary(answers):30} {seen} {delay}".rstrip()
        )

    def _settle(
        self, client: Host, address: str, port: int, backends: set[str]
    ) -> tuple[Sequence[Answer], float]:
        """Ask until exactly `backends` answer; raises _Failed when it does not come to that."""
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            answers = run_probes([Probe(client.namespace, address, port, timeout=2.0)] * _REQUESTS)
            seen = {answer.reached.backend if answer.reached else "" for answer in answers}
            refused = all(answer.verdict is Verdict.REFUSED for answer in answers)
            if (refused and not backends) or (backends and seen == backends):
                return answers, waited
            self._check_processes()
            if waited > _PATIENCE:
                expected = ", ".join(sorted(backends)) or "a refusal"
                raise _Failed(
                    f"{client.name} asked {address} port {port} for {_PATIENCE:.0f} s and wanted {expected};"
                    f" it got {_summary(answers)}\n{self._last_words()}"
                )
            time.sleep(0.01)

    def _check_processes(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise _Failed(f"the {name} ended with {process.returncode}\n{self._last_words(name)}")

    def _last_words(self, *names: str) -> str:
        texts = []
        for path in sorted(self._logs.glob("*.log")):
            if not names or path.stem in names:
                texts += [f"{path.stem}: {line}" for line in path.read_text().splitlines()[-5:]]
        return "\n".join(texts)

    def _write(self, web: Mapping[str, bool]) -> None:
        """Put the state into one manifest file, at once; `web` maps pods to their readiness."""
        documents = [*self._nodes(), _service()]
        for family in Family:
            endpoints = [
                {
                    "addresses": [self._web[name].ip(family)],
                    "nodeName": self._web[name].node.name,
                    "conditions": {"ready": ready, "serving": ready, "terminating": False},
                }
                for name, ready in web.items()
            ]
            documents.append(
                {
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {
                        "name": f"web-ipv{int(family)}",
                        "namespace": "default",
                        "labels": {"kubernetes.io/service-name": "web"},
                    },
                    "addressType": f"IPv{int(family)}",
                    "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
                    "endpoints": endpoints,
                }
            )
        new = self._manifests / ".web.yaml.new"
        new.write_text("\n---\n".join(json.dumps(each, indent=1) for each in documents) + "\n")
        new.rename(self._manifests / "web.yaml")

    def _nodes(self) -> list[object]:
        return [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": node.name, "labels": {"topology.kubernetes.io/zone": node.zone}},
                "spec": {"podCIDRs": list(node.pod_cidrs.values())},
                "status": {
                    "addresses": [{"type": "InternalIP", "address": node.ip(family)} for family in Family]
                },
            }
            for node in (self._n1, self._n2)
        ]


def _service() -> object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {
            "type": "NodePort",
            "clusterIP": _CLUSTER_IP[Family.IPV4],
            "clusterIPs": list(_CLUSTER_IP.values()),
            "ipFamilies": ["IPv4", "IPv6"],
            "externalIPs": list(_EXTERNAL_IP.values()),
            "ports": [{"name": "http", "port": 80, "nodePort": _NODE_PORT, "protocol": "TCP"}],
        },
    }


def _summary(answers: Sequence[Answer]) -> str:
    counts = collections.Counter(
        answer.reached.backend if answer.reached else str(answer.verdict) for answer in answers
    )
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
