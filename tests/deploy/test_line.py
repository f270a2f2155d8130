"""The Deployment's and the DaemonSet's containers, with the command lines of the manifests, make one line.

Each is in a network namespace of its own, with the files that kubelet would mount. There is no DNS, and the
only address that an agent is given is the API server's.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from rulecast.lab import Lab, LabError
from rulecast.lab.topology import Host
from rulecast.model import Family
from rulecast_server.certs.command import complete, parse
from rulecast_server.certs.pki import Openssl
from rulecast_server.certs.places import DirectoryPlace
from tests.deploy import sandbox
from tests.deploy.manifests import KUBECTL, Object, arguments, cluster_environment, pods, render
from tests.deploy.sandbox import Container, Mount
from tests.fakes.apiserver_reviews import ReviewingApiServer
from tests.wire.conftest import Authority

pytestmark = [
    pytest.mark.netns,
    pytest.mark.asyncio,
    pytest.mark.timeout(240),
    pytest.mark.skipif(KUBECTL is None, reason="kubectl, which renders deploy/, is not installed"),
]
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_NOBODY = 65532


def service(number: int) -> Object:
    address = f"10.96.1.{number}"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"web-{number}", "namespace": "default"},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": address,
            "clusterIPs": [address],
            "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
        },
    }


class Line:
    """An API server, servers on hosts, and the agent of node n1."""

    def __init__(self, lab: Lab, api: ReviewingApiServer, directory: Path) -> None:
        self.lab, self.api, self.directory = lab, api, directory
        self.node = lab.nodes["n1"]
        self.objects = render()
        self.templates = dict(pods(self.objects))
        self.tls = directory / "certs"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.state = directory / "state"
        self.state.mkdir()
        self.secrets = [api.issue(node="n1")]
        """Tokens; the first is the agent's for the servers. One container after the other has the same."""

    def start_server(self, host: Host) -> None:
        self._start("Deployment/rulecast-server", host, {"tls": self._served()}, "rulecast/rulecast-server")

    def start_agent(self) -> None:
        token = self._files("token", token=self.secrets[0])
        ca = self._files("ca", **{"ca.crt": (self.tls / "ca.crt").read_text()})
        lock = self.directory / "xtables.lock"
        lock.touch()
        volumes = {"token": token, "ca": ca, "state": self.state, "xtables-lock": lock}
        volumes |= {"modules": Path("/lib/modules"), "sysctls": Path("/proc/sys/net")}
        self._start("DaemonSet/rulecast-agent", self.node, volumes, "rulecast/rulecast-agent")

    async def stop(self, host: Host) -> None:
        process = self.processes.pop(host.name)
        process.terminate()
        await asyncio.to_thread(process.communicate)

    def publish(self, *hosts: Host) -> None:
        """The slice that the endpoint slice controller makes of the servers' pods."""
        self.api.put(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "rulecast-server-x",
                    "namespace": "rulecast",
                    "labels": {"kubernetes.io/service-name": "rulecast-server"},
                },
                "addressType": "IPv4",
                "ports": [{"name": "grpc", "port": 9443, "protocol": "TCP"}],
                "endpoints": [{"addresses": [each.ip()], "conditions": {"ready": True}} for each in hosts],
            }
        )

    async def has(self, number: int) -> None:
        """The node's kernel gets the rules of a Service."""
        address = service(number)["spec"]["clusterIP"]
        await self.until(lambda: address in self.node.namespace.run("nft", "list", "ruleset"), address)

    async def served_by(self, host: Host) -> None:
        await self.until(lambda: self.health()["feed"]["server"] == f"{host.ip()}:9443", host.name)
        await self.until(lambda: self.health()["feed"]["connected"], host.name)

    def health(self) -> Object:
        url = "http://127.0.0.1:10256/healthz"
        text = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=2).read().decode())"
        found: Object = json.loads(self.node.namespace.run("python3", "-c", text))
        return found

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        end = asyncio.get_running_loop().time() + 60
        while True:
            ended = [name for name, each in self.processes.items() if each.poll() is not None]
            assert not ended, f"{ended} ended: {self.logs()}"
            # Until it serves, who is asked does not answer.
            with contextlib.suppress(LabError):
                if await asyncio.to_thread(condition):
                    return
            assert asyncio.get_running_loop().time() < end, f"{what}: {self.logs()}"
            await asyncio.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.directory.glob("*.log")
        )

    def _start(self, workload: str, host: Host, volumes: dict[str, Path], account: str) -> None:
        spec = self.templates[workload]["spec"]
        (container,) = spec["containers"]
        environment = cluster_environment(self.objects)
        environment |= {"KUBERNETES_SERVICE_HOST": self.lab.fabric.ip(), "NODE_NAME": "n1"}
        environment["KUBERNETES_SERVICE_PORT"] = "6443"
        environment |= {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
        mounts = [
            Mount(str(volumes[each["name"]]), each["mountPath"], read_only=each.get("readOnly", False))
            for each in container["volumeMounts"]
        ]
        ca = (self.directory / "kubernetes.crt").read_text()
        self.secrets.append(self.api.issue(account))
        files = self._files(f"account-{host.name}", token=self.secrets[-1], **{"ca.crt": ca})
        security = {**spec["securityContext"], **container["securityContext"]}
        self.processes[host.name] = sandbox.start(
            Container(
                argv=arguments(container, environment),
                user=security["runAsUser"],
                capabilities=security["capabilities"].get("add", ()),
                mounts=[*mounts, Mount(str(files), _ACCOUNT, read_only=True)],
                environment=environment,
            ),
            host.namespace.name,
            self.directory / f"{host.name}.log",
        )

    def _files(self, name: str, **content: str) -> Path:
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        for file, text in content.items():
            (directory / file).write_text(text)
        return directory

    def _served(self) -> Path:
        pair = {f"tls.{part}": (self.tls / f"server.{part}").read_text() for part in ("crt", "key")}
        return self._files("served", **pair)


@pytest_asyncio.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    if reason := sandbox.unavailable():
        pytest.skip(f"no overlay file system: {reason}")
    await complete(DirectoryPlace(tmp_path / "certs"), parse([]).terms, Openssl())
    with Lab() as lab:
        node = lab.add_node("n1", zone="za")
        authority = Authority(tmp_path, "kubernetes")
        cert, key = authority.issue("apiserver", "kube-apiserver", f"IP:{lab.fabric.ip()}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        async with ReviewingApiServer() as api:
            listening = lab.fabric.namespace.socket(socket.AF_INET, socket.SOCK_STREAM)
            listening.bind((lab.fabric.ip(), 6443))
            await api.listen(listening, tls=context)
            api.put(
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": "n1"},
                    "status": {"addresses": [{"type": "InternalIP", "address": node.ip()}]},
                },
                service(1),
            )
            line = Line(lab, api, tmp_path)
            yield line
            for name in list(line.processes):
                await line.stop(next(host for host in [lab.fabric, *lab.hosts] if host.name == name))


def hosts_of(lab: Lab) -> Sequence[Host]:
    return [
        lab.add_host(f"s{last}", {Family.IPV4: f"192.0.2.{last}", Family.IPV6: f"2001:db8:2::{last}"})
        for last in (101, 102)
    ]


async def test_a_fresh_node_then_all_servers_replaced_then_no_apiserver(line: Line) -> None:
    one, two = hosts_of(line.lab)
    line.start_agent()
    line.start_server(one)
    line.publish(one)
    await line.has(1)
    await line.served_by(one)
    # All servers are replaced, at other addresses.
    line.start_server(two)
    line.publish(two)
    await line.stop(one)
    await line.served_by(two)
    line.api.put(service(2))
    await line.has(2)
    # The agent is restarted while no API server answers: the server knows its token.
    await line.stop(line.node)
    await line.api.stop()
    line.start_agent()
    await line.served_by(two)
    assert not line.health()["feed"]["fromCheckpoint"]
    assert "Traceback" not in line.logs()
    for secret in line.secrets:
        assert secret not in line.logs()
