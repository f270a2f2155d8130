"""The agent's container works with the rights and mounts that the DaemonSet gives, and needs them."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy import sandbox
from tests.deploy.manifests import DEPLOY, KUBECTL, Object, arguments, cluster_environment, pods, render
from tests.deploy.sandbox import Container, Mount

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(KUBECTL is None, reason="kubectl, which renders deploy/, is not installed"),
]
VIP = "10.96.0.20"
# Standalone: who serves the agent is another test's matter. Flags of the transport have no use then.
_SOURCE = ("--standalone", "--manifests=/manifests")
_TRANSPORT = ("--server-service=", "--tls-ca=", "--token-file=")


@pytest.fixture(scope="module", autouse=True)
def overlay() -> None:
    if reason := sandbox.unavailable():
        pytest.skip(f"no overlay file system: {reason}")


class Pod:
    """The agent's container of the rendered DaemonSet, in a network namespace of its own."""

    def __init__(self, components: tuple[str, ...], directory: Path, namespace: str) -> None:
        objects = render(*components)
        (self.container,) = dict(pods(objects))["DaemonSet/rulecast-agent"]["spec"]["containers"]
        self.pod: Object = dict(pods(objects))["DaemonSet/rulecast-agent"]
        self.environment = cluster_environment(objects)
        self.directory, self.namespace = directory, namespace
        self.log = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, without: str = "") -> None:
        """`without`: a capability that is taken away."""
        security = self.container["securityContext"]
        argv = [
            each for each in arguments(self.container, self.environment) if not each.startswith(_TRANSPORT)
        ]
        environment = {each["name"]: each["value"] for each in self.container["env"] if "value" in each}
        container = Container(
            argv=[*argv, *_SOURCE, *more],
            user=security["runAsUser"],
            capabilities=[each for each in security["capabilities"]["add"] if each != without],
            mounts=[*self._mounts(), Mount(str(DEPLOY / "examples"), "/manifests", read_only=True)],
            environment={**self.environment, **environment, "NODE_NAME": "n1"},
        )
        self.process = sandbox.start(container, self.namespace, self.log)

    def _mounts(self) -> Iterator[Mount]:
        volumes = {each["name"]: each for each in self.pod["spec"]["volumes"]}
        for mount in self.container["volumeMounts"]:
            host = volumes[mount["name"]].get("hostPath")
            if host is None:
                continue
            path = self.directory / mount["name"]
            if host["path"].startswith(("/proc", "/lib")):
                path = Path(host["path"])
            elif host["type"] == "DirectoryOrCreate":
                path.mkdir(exist_ok=True)
            else:
                path.touch()
            yield Mount(str(path), mount["mountPath"], read_only=mount.get("readOnly", False))

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, *argv], capture_output=True, text=True, check=False
        )
        return done.stdout

    def ready(self) -> bool:
        probe = "import urllib.request as r; r.urlopen('http://127.0.0.1:10256/readyz', timeout=2)"
        command = ["ip", "netns", "exec", self.namespace, "python3", "-c", probe]
        return subprocess.run(command, capture_output=True).returncode == 0

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.communicate(timeout=20)
            self.process = None


@pytest.fixture
def pod_of(tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    made: list[Pod] = []

    def make(mode: str) -> Pod:
        name = f"rcpod{len(made)}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        made.append(Pod((f"mode-{mode}", "certs-self-signed"), tmp_path, name))
        return made[-1]

    yield make
    for pod in made:
        pod.stop()
        subprocess.run(["ip", "netns", "del", pod.namespace], check=True)


@pytest.mark.parametrize(
    ("mode", "backend"), [("nftables", ""), ("iptables", "nft"), ("iptables", "legacy")], ids=str
)
def test_the_rights_of_the_manifest_are_enough(pod_of, mode: str, backend: str) -> None:
    pod = pod_of(mode)
    pod.start(*([f"--iptables-backend={backend}"] if backend else []))
    pod.wait(pod.ready)
    rules = pod.run("nft", "list", "ruleset") if mode == "nftables" else pod.run(f"iptables-{backend}-save")
    assert VIP in rules
    # Connection tracking is set through the host's sysctls, where the container's own are read-only.
    timeout = pod.run("cat", "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait")
    assert int(timeout) == 3600
    log = pod.log.read_text()
    assert "Traceback" not in log
    assert "nf_conntrack_tcp_timeout" not in log
    pod.wait((pod.directory / "state" / "desired.checkpoint").exists)
    pod.stop()
    assert "Traceback" not in pod.log.read_text()


@pytest.mark.parametrize(
    ("mode", "more", "capability"),
    [
        ("nftables", [], "NET_ADMIN"),
        ("iptables", ["--iptables-backend=nft"], "NET_ADMIN"),
        ("iptables", ["--iptables-backend=legacy"], "NET_RAW"),
    ],
)
def test_none_of_them_can_be_spared_and_what_is_missing_is_one_line(
    pod_of, mode: str, more: list[str], capability: str
) -> None:
    pod = pod_of(mode)
    pod.start(*more, without=capability)
    assert pod.process is not None
    _, _ = pod.process.communicate(timeout=60)
    assert pod.process.returncode == 2
    log = pod.log.read_text()
    assert "Traceback" not in log
    (line,) = (each for each in log.splitlines() if each.startswith("rulecast: "))
    assert f"--mode {mode}" in line
