"""Two labs with the same addresses and one apiserver: ours runs in one, kube-proxy in the other."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rulecast.lab import Host, Lab, Node
from tests.conformance import places
from tests.conformance.sctp import SctpProbes
from tests.fakes.apiserver import FakeApiServer
from tests.netns.cluster import CLUSTER_CIDR, build_lab
from tests.netns.objects import Object, service_cidrs
from tests.netns.rig import Loop

_API_PORT = 8080
_GRPC_PORT = 9443
_LEGACY = ("iptables", "iptables-save", "iptables-restore")


class Mode(NamedTuple):
    """Our flags for a mode, and how kube-proxy is brought into it."""

    flags: tuple[str, ...]
    mode: str
    legacy: bool = False
    """Whether the programs that kube-proxy finds under the name `iptables` are the legacy ones."""


MODES = {
    "nftables": Mode(("--mode", "nftables"), "nftables"),
    "iptables": Mode(("--mode", "iptables", "--iptables-backend", "nft"), "iptables"),
    "iptables-legacy": Mode(("--mode", "iptables", "--iptables-backend", "legacy"), "iptables", legacy=True),
    "ipvs": Mode(("--mode", "ipvs"), "ipvs"),
}


JUDGES = {"ipvs": "nftables"}
"""By which mode of kube-proxy one of ours is judged, if not the same: its IPVS mode has faults of its own."""


class Side:
    """One lab with who programs its nodes."""

    def __init__(self, name: str, lab: Lab, directory: Path) -> None:
        self.name, self.lab, self.directory = name, lab, directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.sctp = SctpProbes(lab)

    def client(self, name: str) -> Host:
        """A machine of the lab by its name."""
        for node in self.lab.nodes.values():
            if name in node.pods:
                return node.pods[name]
        return next(host for host in self.lab.hosts if host.name == name)

    def spawn(self, host: Host, name: str, argv: Sequence[str]) -> None:
        with (self.directory / f"{self.name}-{name}.log").open("ab") as log:
            self.processes[name] = self.lab.popen(host, argv, stdout=log, stderr=log)

    def check(self) -> None:
        """Everything runs. Raises AssertionError with the end of the log of what does not."""
        for name, process in self.processes.items():
            log = self.directory / f"{self.name}-{name}.log"
            assert process.poll() is None, f"{self.name} {name} ended:\n{log.read_text()[-3000:]}"


class Twins:
    """Both sides, and the apiserver that both follow."""

    def __init__(self, ours: Lab, theirs: Lab, api: FakeApiServer, loop: Loop, directory: Path) -> None:
        self.api, self._loop = api, loop
        self.ours = Side("ours", ours, directory)
        self.theirs = Side("kube-proxy", theirs, directory)
        self.sides = (self.ours, self.theirs)
        self._objects: dict[tuple[str, str], Object] = {}

    def start(self, ours_as: str, theirs_as: str, binary: str) -> None:
        """Start every process in these modes; kube-proxy's pauses between two writes are as short as ours."""
        directory = self.ours.directory
        flags_of_mode, theirs = MODES[ours_as].flags, MODES[theirs_as]
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(self.ours.lab)))
        ours = [sys.executable, "-m", "rulecast.cli"]
        serve = ["server", "--kubeconfig", str(kubeconfig), "--insecure"]
        serve += ["--listen", f"0.0.0.0:{_GRPC_PORT}", "--http", "127.0.0.1:9440"]
        self.ours.spawn(self.ours.lab.fabric, "server", [*ours, *serve])
        for node in self.ours.lab.nodes.values():
            flags = ["--server", f"{self.ours.lab.fabric.ip()}:{_GRPC_PORT}", "--insecure"]
            flags += ["--node-name", node.name, "--cluster-cidr", CLUSTER_CIDR, *flags_of_mode]
            self.ours.spawn(node, node.name, [*ours, "agent", *flags, "--min-sync-period", "50ms"])
        for node in self.theirs.lab.nodes.values():
            config = directory / f"kube-proxy-{node.name}.json"
            config.write_text(json.dumps(_proxy_config(node, theirs.mode)))
            master = f"--master=http://{self.theirs.lab.fabric.ip()}:{_API_PORT}"
            argv = [binary, f"--config={config}", master, "--v=1"]
            if theirs.legacy:
                argv = ["env", f"PATH={_legacy_programs(directory)}:{os.environ['PATH']}", *argv]
            self.theirs.spawn(node, node.name, argv)

    def put(self, objects: Sequence[Object]) -> None:
        """Make these all that exists: what differs is written, then what is no more is deleted."""
        new = {(each["kind"], each["metadata"]["name"]): each for each in (service_cidrs(), *objects)}
        changed = [each for key, each in new.items() if self._objects.get(key) != each]
        gone = [each for key, each in self._objects.items() if key not in new]
        self._objects = new

        def write() -> None:
            self.api.put(*changed)
            for each in gone:
                self.api.delete(each)

        self._loop.call(write)


@contextlib.contextmanager
def twins(directory: Path) -> Iterator[Twins]:
    """Everything built, nothing started."""
    with _lab() as ours, _lab() as theirs:
        loop = Loop(ours.fabric.namespace)
        api = FakeApiServer()
        try:
            loop.run(api.start())
            loop.run(api.listen(_listening(ours), _listening(theirs)))
            made = Twins(ours, theirs, api, loop, directory)
            with made.ours.sctp, made.theirs.sctp:
                yield made
        finally:
            loop.run(api.stop())
            loop.close()


def _lab() -> Lab:
    lab = build_lab()
    try:
        places.check(lab)
        for node in lab.nodes.values():
            node.serve(*places.NODE_PORTS)
            for pod in node.pods.values():
                if not pod.name.startswith("cli"):
                    pod.serve(*places.PORTS)
        for address in places.BLOCKED.addresses.values():
            lab.outside.add_address(address)
            lab.nodes["n2"].route(address, lab.nodes["n1"])
    except BaseException:
        lab.close()
        raise
    return lab


def _legacy_programs(directory: Path) -> Path:
    """A directory in which the iptables programs are the legacy ones."""
    made = directory / "legacy"
    made.mkdir(exist_ok=True)
    for name in (*_LEGACY, *(each.replace("ip", "ip6", 1) for each in _LEGACY)):
        link = made / name
        if not link.is_symlink():
            link.symlink_to(shutil.which("xtables-legacy-multi") or "xtables-legacy-multi")
    return made


def _listening(lab: Lab) -> socket.socket:
    made = lab.fabric.namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((lab.fabric.ip(), _API_PORT))
    return made


def _kubeconfig(lab: Lab) -> Object:
    return {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": {"server": f"http://{lab.fabric.ip()}:{_API_PORT}"}}],
        "users": [{"name": "it", "user": {}}],
    }


def _proxy_config(node: Node, mode: str) -> Object:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "hostnameOverride": node.name,
        "clusterCIDR": CLUSTER_CIDR,
        "clientConnection": {"contentType": "application/json"},
        "conntrack": {"maxPerCore": 0, "min": 0},
        # iptables mode serves node ports on all addresses unless told; the other modes' default is ours.
        "nodePortAddresses": ["primary"],
        "iptables": {"minSyncPeriod": "50ms", "syncPeriod": "1h", "localhostNodePorts": False},
        "nftables": {"minSyncPeriod": "50ms", "syncPeriod": "1h"},
    }
