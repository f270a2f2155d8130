"""The whole line at one size: server start, agent start, one change, first packets, memory."""

import contextlib
import errno
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from bench import modes, objects
from bench.process import Process, quantile

_NETLINK_NETFILTER, _GROUP_NFTABLES = 12, 7
KUBECONFIG = """apiVersion: v1
kind: Config
current-context: bench
contexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]
clusters: [{{name: bench, cluster: {{server: "{url}"}}}}]
users: [{{name: bench, user: {{token: none}}}}]
"""


class Backend:
    """Accepts on every local address, so that any endpoint answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("0.0.0.0", objects.BACKEND_PORT), backlog=1024)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                return
            accepted.close()

    def close(self) -> None:
        # Closing alone would leave the thread in its accept, and the port in use.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(number: int, timeout: float = 1.0) -> float:
    """Seconds for a connection to a service's cluster IP. Raises OSError."""
    begin = time.perf_counter()
    with socket.create_connection((objects.cluster_ip(number), 80), timeout=timeout):
        return time.perf_counter() - begin


def start_server(url: str, work: Path, *, core: int | None = None) -> Process:
    """A server that watches the apiserver at `url`, on one core if told."""
    kubeconfig = work / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG.format(url=url))
    flags = ["--kubeconfig", str(kubeconfig), "--insecure", "--listen", "127.0.0.1:9443"]
    server = Process(
        ["rulecast.cli", "server", *flags, "--http", "127.0.0.1:9440"], log=work / "log", core=core
    )
    try:
        server.ready("http://127.0.0.1:9440/readyz")
    except TimeoutError:
        server.end()
        raise
    return server


def measure(mode: str, services: int, *, endpoints: int, changes: int, work: Path) -> dict[str, float]:
    """Run the line. Times in ms unless named otherwise, memory in MB."""
    found: dict[str, float] = {}
    arguments = ["bench.apiserver", str(services), str(endpoints)]
    backend = Backend()
    made = modes.MODES[mode]
    try:
        with contextlib.ExitStack() as running:
            api = running.enter_context(Process(arguments, log=work / "log", talk=True))
            url = api.hear()
            processes: dict[str, Process] = {}
            if made.ours:
                server = processes["server"] = running.enter_context(start_server(url, work))
                found["server spawn to ready"] = server.became_ready * 1000
            agent = processes["agent"] = running.enter_context(modes.start(mode, work, api=url))
            found["agent spawn to answering"] = _until_answering(agent, services) * 1000
            agent.ready(modes.HEALTH)
            time.sleep(1.0)
            for name, process in processes.items():
                found[f"{name} MB"], found[f"{name} peak MB"] = process.memory()
            if made.mechanism in ("nftables", "iptables-nft"):
                found |= _changes(api, processes, services, changes)
            found |= _packets(services)
    finally:
        backend.close()
        modes.clean(mode, work)
    return found


def _until_answering(agent: Process, services: int) -> float:
    """Seconds from the agent's start until the last service answers. Raises OSError."""
    while True:
        try:
            connect(services - 1, 0.1)
        except OSError:
            if time.monotonic() - agent.started > 120 or not agent.alive():
                raise
            time.sleep(0.005)
        else:
            return time.monotonic() - agent.started


def _changes(api: Process, processes: Mapping[str, Process], services: int, changes: int) -> dict[str, float]:
    """Replace one endpoint at a time; the kernel's own notification ends the clock."""
    latencies = []
    before = {name: process.cpu() for name, process in processes.items()}
    with Changed() as changed:
        for shift in range(1, changes + 1):
            # Beyond the pause that the agent keeps between two writes.
            time.sleep(0.15)
            changed.forget()
            begin = time.perf_counter()
            api.say(f"{shift * 7919 % services} {shift}")
            changed.wait()
            latencies.append(time.perf_counter() - begin)
    found = {"change p50": quantile(latencies, 0.5) * 1000, "change p99": quantile(latencies, 0.99) * 1000}
    for name, process in processes.items():
        found[f"{name} CPU a change"] = (process.cpu() - before[name]) / changes * 1000
    return found


class Changed:
    """Tells when the kernel's rules changed, by its own notification. A context manager.

    Legacy tables and IPVS notify nobody: those modes' `line` has no times of changes.
    """

    def __enter__(self) -> "Changed":
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._socket.bind((0, 1 << (_GROUP_NFTABLES - 1)))
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def forget(self) -> None:
        """What came until now does not count."""
        self._socket.setblocking(False)
        while True:
            try:
                self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # So much came that some of it is lost: forgotten as well.
                    raise

    def wait(self) -> None:
        """Wait for the next change. Raises TimeoutError."""
        self._socket.settimeout(60.0)
        self._socket.recv(1 << 16)


def _packets(services: int) -> dict[str, float]:
    times = [connect(number * 7919 % services) for number in range(2000)]
    return {"connect p50 us": quantile(times, 0.5) * 1e6, "connect p99 us": quantile(times, 0.99) * 1e6}


def prepare_namespace() -> None:
    """Make 10.0.0.0/8 local in the network namespace of this process (which must be one of its own)."""
    for command in ("link set lo up", "route add local 10.0.0.0/8 dev lo"):
        subprocess.run(["ip", *command.split()], check=True)
