"""The line under test with every process started, ended and restarted by hand: for the tests of faults."""

import asyncio
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rulecast.lab import Host, Lab, Namespace, Node, Probe, run_probes
from rulecast_agent.kernel.nft_netlink import NftSocket
from tests.netns.cluster import DEFAULT_FLAGS, MODE, MODE_FLAGS, SLOWNESS, eventually
from tests.netns.objects import Object, Svc, node_objects, service_cidrs

GRPC_PORT = 9443
MARKER = 250
"""The number of the service that changes with each state, so that a kernel can be seen to have it."""
_EMPTY_LEGACY = """
for stem in ip ip6; do
    for table in $(cat /proc/net/${stem}_tables_names 2>/dev/null); do
        ${stem}tables-legacy -t $table -F && ${stem}tables-legacy -t $table -X || exit
    done
done
"""
"""A table that nobody asked for is not made by asking; see `rulecast_agent.kernel.iptables.Iptables.peek`."""
_T = TypeVar("_T")


class Process:
    """A `rulecast` command on a host of the lab."""

    def __init__(self, lab: Lab, host: Host, argv: Sequence[str], log: Path, path: str = "") -> None:
        self._file = log
        command = [sys.executable, "-m", "rulecast.cli", *argv]
        if path:
            command = ["env", f"PATH={path}", *command]
        with log.open("ab") as output:
            self.popen = lab.popen(host, command, stdout=output, stderr=output)

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._file.read_text()

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        self.popen.kill()
        self.popen.wait()

    def stop(self, patience: float = 5.0) -> int:
        """SIGTERM; the exit code. Raises TimeoutExpired when it does not go."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(patience * SLOWNESS)

    def exit_code(self, patience: float = 10.0) -> int:
        """Wait until it ends by itself."""
        return self.popen.wait(patience * SLOWNESS)

    def until_logged(self, text: str, patience: float = 20.0) -> None:
        """Wait until a text is in the log."""

        def there() -> bool:
            running, log = self.running, self.log
            assert text in log or running, f"ended without {text!r}: {log}"
            return text in log

        eventually(there, lambda: f"{text!r} in {self.log[-3000:]}", patience)


class Loop:
    """An event loop in a thread that lives in a namespace: for stand-ins and proxies on the fabric."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run to the end, in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def call(self, work: Callable[[], _T]) -> _T:
        """Call in the loop's thread."""

        async def wrapped() -> _T:
            return work()

        return self.run(wrapped())

    def close(self) -> None:
        self.run(self._cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _cancel_others() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _run(self) -> None:
        with self._namespace.entered():
            self._loop.run_forever()


class Answered:
    """An HTTP answer."""

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        self.status = status
        self.headers = headers
        self.text = text

    @property
    def json(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.text)
        return decoded


class Rig:
    """Processes, manifests, and what can be asked of them. Node n1 is where agents run unless said."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.n1, self.n2 = lab.nodes["n1"], lab.nodes["n2"]
        self.pod, self.outside = self.n1.pods["cli1"], lab.outside
        self.directory = directory
        self.manifests = directory / "manifests"
        self.generation = 0
        self.nodes: list[Object] = []
        self.processes: list[Process] = []
        self._closing: list[Callable[[], None]] = []
        self._count = 0
        self._status: subprocess.Popen[bytes] | None = None
        self._fresh()

    def reset(self) -> None:
        """End everything and empty the kernels."""
        for process in self.processes:
            if process.running:
                process.kill()
        self.processes.clear()
        for close in reversed(self._closing):
            close()
        self._closing.clear()
        for node in (self.n1, self.n2):
            node.namespace.run("nft", "flush ruleset")
            node.namespace.run("sh", "-c", _EMPTY_LEGACY)
            node.namespace.run("conntrack", "-F")
        self._fresh()

    def _fresh(self) -> None:
        self.nodes = node_objects(self.lab)
        shutil.rmtree(self.manifests, ignore_errors=True)
        self.manifests.mkdir()
        self.write()

    # What there is

    def objects(self, *services: Svc, extra: Iterable[Object] = ()) -> list[Object]:
        """A whole state of the cluster, with a marker of its own."""
        self.generation += 1
        marker = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "generation", "namespace": "lab"},
            "spec": {
                "clusterIP": f"10.96.0.{MARKER}",
                "clusterIPs": [f"10.96.0.{MARKER}", f"2001:db8:96::{MARKER}"],
                "ipFamilies": ["IPv4", "IPv6"],
                "ports": [{"port": self.generation, "protocol": "TCP"}],
            },
        }
        made = [each for service in services for each in service.manifests(self.lab)]
        return [*self.nodes, service_cidrs(), marker, *made, *extra]

    def write(self, *services: Svc, extra: Iterable[Object] = ()) -> None:
        """Make these services all that the manifests say."""
        new = self.manifests / ".new"
        objects = self.objects(*services, extra=extra)
        new.write_text("\n---\n".join(json.dumps(each) for each in objects))
        new.rename(self.manifests / "state.yaml")

    def apply(self, *services: Svc, extra: Iterable[Object] = (), patience: float = 20.0) -> None:
        """Write, and wait until n1's kernel has it."""
        self.write(*services, extra=extra)
        self.until_programmed(patience=patience)

    # Processes

    def server(self, *flags: str, port: int = GRPC_PORT, source: Sequence[str] = ()) -> Process:
        """Start a server on the fabric, and wait until it listens."""
        argv = ["server", *(source or ("--manifests", str(self.manifests)))]
        argv += ["--listen", f"0.0.0.0:{port}", "--http", f"127.0.0.1:{port - 3}"]
        process = self.start(self.lab.fabric, *argv, *(flags or ("--insecure",)))
        process.until_logged("gRPC on port")
        return process

    def agent(
        self,
        *flags: str,
        servers: str = "",
        name: str = "n1",
        node: Node | None = None,
        transport: Sequence[str] = ("--insecure",),
        path: str = "",
    ) -> Process:
        """Start an agent of a server, in the mode under test unless the flags name another."""
        flags = flags if "--mode" in flags else (*MODE_FLAGS, *flags)
        argv = ["agent", "--server", servers or f"{self.lab.fabric.ip()}:{GRPC_PORT}", *transport]
        return self.start(node or self.n1, *argv, "--node-name", name, *DEFAULT_FLAGS, *flags, path=path)

    def start(self, host: Host, *argv: str, path: str = "") -> Process:
        """Start any command."""
        self._count += 1
        log = self.directory / f"{self._count}-{argv[0]}.log"
        process = Process(self.lab, host, argv, log, path)
        self.processes.append(process)
        return process

    def run(self, host: Host, *argv: str) -> tuple[int, str]:
        """Run a command to its end: exit code, and what it wrote on both streams."""
        process = self.start(host, *argv)
        return process.exit_code(), process.log

    def loop(self) -> Loop:
        """An event loop on the fabric."""
        loop = Loop(self.lab.fabric.namespace)
        self._closing.append(loop.close)
        return loop

    def at_end(self, close: Callable[[], None]) -> None:
        """Call at the next reset; the last one first."""
        self._closing.append(close)

    # What is seen

    def until_programmed(self, node: Node | None = None, patience: float = 20.0) -> None:
        """Wait until a kernel has the state that was written last, hooks included."""
        eventually(
            lambda: self.programmed(node or self.n1),
            lambda: f"generation {self.generation} in the kernel: {self}",
            patience,
        )

    def programmed(self, node: Node) -> bool:
        """Whether the last state is in a kernel; IPv6 is written after IPv4."""
        if MODE in ("nftables", "ipvs"):
            listed = self.ruleset(node)
            hook = "chain nat-postrouting" if MODE == "nftables" else "chain postrouting"
            return all(
                f"{address}{MARKER} . tcp . {self.generation} :" in listed
                for address in ("10.96.0.", "2001:db8:96::")
            ) and (listed.count(hook) == 2)
        backend = MODE.removeprefix("iptables-")
        listed = "".join(node.namespace.run(f"{tool}-{backend}-save") for tool in ("iptables", "ip6tables"))
        return all(
            f"-d {address}{MARKER}/{length} -p tcp -m tcp --dport {self.generation} " in listed
            for address, length in (("10.96.0.", 32), ("2001:db8:96::", 128))
        ) and (listed.count("-A OUTPUT -j RULECAST-OUTPUT") == 2)

    def until_connected(self, connected: bool = True) -> None:
        """Wait until n1's agent has a server, or knows that it has none."""
        eventually(
            lambda: self.healthz().json["feed"]["connected"] is connected,
            lambda: f"connected {connected}: {self}",
        )

    def ruleset(self, node: Node | None = None) -> str:
        """Everything in a kernel."""
        return (node or self.n1).namespace.run("nft", "list", "ruleset")

    def writes(self) -> int:
        """The number of transactions that n1's kernel took in its life, whoever made them."""
        return self.n1.namespace.call(_nft_generation)

    def get(
        self, path: str, *, host: Host | None = None, address: str = "127.0.0.1", port: int = 10256
    ) -> Answered:
        """GET from a host. Raises OSError when nobody listens."""
        host = host or self.n1
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = http.client.HTTPConnection(address, port)
        connection.sock = host.namespace.socket(family, socket.SOCK_STREAM)
        connection.sock.settimeout(3)
        try:
            connection.sock.connect((address, port))
            connection.request("GET", path)
            response = connection.getresponse()
            return Answered(response.status, dict(response.getheaders()), response.read().decode())
        finally:
            connection.close()

    def healthz(self) -> Answered:
        """n1's agent's health; waits for its port."""
        found: list[Answered] = []

        def answers() -> bool:
            try:
                found.append(self.get("/healthz"))
            except OSError:
                return False
            return True

        eventually(answers, lambda: f"/healthz answers: {self}")
        return found[-1]

    def metric(self, name: str, *, host: Host | None = None, port: int = 10256) -> float:
        """The sum of a metric's samples."""
        lines = self.get("/metrics", host=host, port=port).text.splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert found, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def agents(self) -> list[dict[str, Any]]:
        """ListAgents of the server on the usual port."""
        if self._status is None:
            argv = [sys.executable, "-m", "tests.netns.agents_status", f"127.0.0.1:{GRPC_PORT}"]
            self._status = subprocess.Popen(
                ["ip", "netns", "exec", self.lab.fabric.namespace.name, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )
            self.at_end(self._end_status)
        assert self._status.stdin is not None
        assert self._status.stdout is not None
        self._status.stdin.write(b"\n")
        self._status.stdin.flush()
        answered: list[dict[str, Any]] = json.loads(self._status.stdout.readline())["agents"]
        return answered

    def _end_status(self) -> None:
        assert self._status is not None
        self._status.kill()
        self._status.communicate()
        self._status = None

    def eventually(self, condition: Callable[[], bool], patience: float = 20.0) -> None:
        """Wait until a condition holds; a failure shows the logs."""
        eventually(condition, lambda: str(self), patience)

    def ask(self, address: str, port: int = 80, *, client: Host | None = None, times: int = 12) -> set[str]:
        """Who answers new connections: names of backends, or verdicts."""
        probe = Probe((client or self.pod).namespace, address, port, timeout=0.9)
        answers = run_probes([probe] * times)
        return {each.reached.backend if each.reached else str(each.verdict) for each in answers}

    def until_asked(
        self,
        expected: set[str],
        address: str,
        port: int = 80,
        *,
        client: Host | None = None,
        times: int = 12,
        patience: float = 5.0,
    ) -> None:
        """Wait until exactly these answer."""
        seen: list[set[str]] = []

        def right() -> bool:
            seen.append(self.ask(address, port, client=client, times=times))
            return seen[-1] == expected

        eventually(right, lambda: f"{expected} at {address}:{port}, saw {seen[-1]}: {self}", patience)

    def __str__(self) -> str:
        return "\n".join(
            f"--- {process.popen.args}: {process.popen.poll()}\n{process.log[-2000:]}"
            for process in self.processes
        )


def _nft_generation() -> int:
    netlink = NftSocket()
    try:
        return netlink.generation()
    finally:
        netlink.close()
