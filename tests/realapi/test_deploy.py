"""deploy/ on a real API server: taken as it is, and its rights are enough and no more than enough."""

import asyncio
import base64
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from rulecast.flags import HostPort
from rulecast_agent.feed.channels import ChannelSettings, ClientTls
from rulecast_agent.feed.discovery import AddressFile, Discovery
from rulecast_agent.feed.slices import ApiServers, LookupFailedError, SliceLookup
from rulecast_agent.feed.tokens import TokenFile
from rulecast_server.certs.pki import Openssl
from tests.deploy import sandbox
from tests.deploy.manifests import KINDS_OF_OTHERS, KUBECTL, choices, render
from tests.realapi.cluster import node, service
from tests.realapi.control_plane import ApiServer, ControlPlane
from tests.realapi.installed import SPACE, Installation, Process, refused, wait
from tests.wire.conftest import Authority, start_agent
from tests.wire.waiting import eventually

__all__ = ["start_agent"]

pytestmark = [
    pytest.mark.realapi,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not {"KUBE_APISERVER", "ETCD"} <= os.environ.keys(),
        reason="KUBE_APISERVER and ETCD do not name the programs (`make conformance` builds them)",
    ),
    pytest.mark.skipif(KUBECTL is None, reason="kubectl, which renders deploy/, is not installed"),
]
NAME = "rulecast-server.rulecast.svc"
# Any address that the API takes in a slice; the route there is what `Near` stands in for.
ADDRESS = "192.0.2.21"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/rulecast/endpointslices"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    if reason := sandbox.unavailable():
        pytest.skip(f"no overlay file system: {reason}")
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    authority = Authority(plane.directory, "kubernetes")
    cert, key = authority.issue("kube-apiserver", "kube-apiserver", "IP:127.0.0.1")
    api = ApiServer(plane, 16446, f"--tls-cert-file={cert}", f"--tls-private-key-file={key}")
    installation = None
    try:
        api.start()
        installation = Installation(plane, api, authority.cert)
        installation.kubectl("apply", "-f", "-", objects=installation.objects)
        for number in range(2):
            api.apply([node(number)])
        yield installation
    finally:
        if installation is not None:
            installation.close()
        api.stop()
        plane.close()


@pytest.fixture(scope="module")
def certificates(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """The Job has run."""
    job = installed.start("Job/rulecast-certs", tmp_path_factory.mktemp("job"))
    assert job.ended() == 0, job.log
    return job


@pytest.fixture(scope="module")
def server(
    installed: Installation, certificates: Process, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Process, int, int]:
    """A replica, in sync; its ports."""
    return start_server(installed, tmp_path_factory.mktemp("server"))


def start_server(
    installed: Installation, directory: Path, *, synced: bool = True
) -> tuple[Process, int, int]:
    tls = installed.secret_files(directory / "tls", "rulecast-server-tls")
    ports = ("--listen=127.0.0.1:0", "--http=127.0.0.1:0")
    process = installed.start("Deployment/rulecast-server", directory, *ports, tls=tls)
    found = process.until(r"gRPC on port (\d+), HTTP on port (\d+)")
    if synced:
        process.until(r"synced: ")
    return process, int(found[1]), int(found[2])


@pytest.mark.parametrize("components", choices(), ids="+".join)
def test_the_apiserver_takes_every_choice_of_components_in_place_of_the_default(
    installed: Installation, components
) -> None:
    objects = tuple(
        each for each in render(*components) if not each["apiVersion"].startswith(KINDS_OF_OTHERS)
    )
    said = installed.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", objects=objects)
    assert len(said.splitlines()) == len(objects)


def test_applied_again_nothing_changes(installed: Installation) -> None:
    before = installed.kubectl("get", "-f", "-", "-o", "yaml", objects=installed.objects)
    installed.kubectl("apply", "-f", "-", objects=installed.objects)
    assert installed.kubectl("get", "-f", "-", "-o", "yaml", objects=installed.objects) == before


def test_the_namespace_admits_the_pods(installed: Installation) -> None:
    """Pod Security, priority classes and the validation of pods, which a template is spared."""
    for workload in installed.templates:
        installed.kubectl("get", "namespace", "rulecast")
        name = installed.add_pod(workload, "node-1")
        pod = installed.api.request("GET", f"{SPACE}/pods/{name}")
        assert pod["spec"]["priority"] >= 2_000_000_000
        installed.api.request("DELETE", f"{SPACE}/pods/{name}", {"gracePeriodSeconds": 0})


def test_the_job_makes_certificates_and_a_second_run_none(
    installed: Installation, certificates: Process, tmp_path: Path
) -> None:
    assert "3 parts written" in certificates.log
    again = installed.start("CronJob/rulecast-certs", tmp_path)
    assert again.ended() == 0
    assert "nothing to do" in again.log
    bundle = installed.api.request("GET", f"{SPACE}/configmaps/rulecast-ca")["data"]["ca.crt"]
    served = installed.api.request("GET", f"{SPACE}/secrets/rulecast-server-tls")["data"]
    cert = base64.b64decode(served["tls.crt"]).decode()
    assert Openssl().verifies(cert, bundle)
    assert Openssl().names(cert, [NAME])
    assert "PRIVATE" not in certificates.log + again.log


def test_the_job_may_write_its_three_objects_and_no_other(
    installed: Installation, certificates: Process
) -> None:
    token = installed.token("rulecast-certs")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "other"}, "data": {}}
    assert refused(installed.api, "POST", f"{SPACE}/secrets", token, secret) == 403
    named = {**secret, "metadata": {"name": "rulecast-server-tls"}}
    assert refused(installed.api, "POST", f"{SPACE}/secrets", token, named) == 403
    assert refused(installed.api, "GET", f"{SPACE}/secrets", token) == 403
    assert refused(installed.api, "DELETE", f"{SPACE}/secrets/rulecast-authority", token) == 403
    assert refused(installed.api, "GET", f"{SPACE}/secrets/rulecast-authority", token) == 0


def test_certificates_that_cannot_be_written_are_one_line(installed: Installation, tmp_path: Path) -> None:
    role = installed.role("Role", "rulecast-certs")
    installed.put_role({**role, "rules": []})
    secret = {"namespace": "rulecast", "resource": "secrets", "name": "rulecast-authority"}
    try:
        wait(
            lambda: not installed.allowed("rulecast-certs", verb="get", **secret), lambda: "the right is gone"
        )
        job = installed.start("Job/rulecast-certs", tmp_path)
        assert job.ended() == 2
        (line,) = job.log.splitlines()
        assert line.startswith("rulecast: ")
        for word in ("403", "rulecast:rulecast-certs", 'cannot get resource "configmaps"', "rulecast-ca"):
            assert word in line
    finally:
        installed.put_role(role)


class Near:
    """What a lookup finds, with the address at which it is reached from here."""

    def __init__(self, lookup: SliceLookup) -> None:
        self._lookup = lookup

    async def __call__(self) -> Sequence[HostPort]:
        return [HostPort("127.0.0.1", found.port) for found in await self._lookup() if found.host == ADDRESS]


class Node:
    """What an agent's pod has on a node."""

    def __init__(self, installed: Installation, directory: Path, number: int) -> None:
        self.name = f"node-{number}"
        self.installed, self.directory = installed, directory
        self.pod = installed.add_pod("DaemonSet/rulecast-agent", self.name)
        self.account = installed.account_files(directory / "agent-account", "rulecast-agent", pod=self.pod)
        self.token = directory / "agent-token"
        self.token.write_text(installed.token("rulecast-agent", pod=self.pod, audience="rulecast"))
        self.ca = directory / "agent-ca"
        self.ca.write_text(installed.api.request("GET", f"{SPACE}/configmaps/rulecast-ca")["data"]["ca.crt"])

    def lookup(self) -> SliceLookup:
        api = ApiServers([HostPort("127.0.0.1", int(self.installed.port))], self.account)
        return SliceLookup(api, "rulecast", "rulecast-server")

    def start(self, start_agent):
        file = AddressFile(self.directory, "rulecast/rulecast-server")
        return start_agent(
            node=self.name,
            channel=ChannelSettings(tls=ClientTls(self.ca), server_name=NAME, connect_backoff=0.2),
            token=TokenFile(self.token),
            discovery=Discovery(Near(self.lookup()), file, pause=0.2),
        )

    def close(self) -> None:
        self.installed.api.request("DELETE", f"{SPACE}/pods/{self.pod}", {"gracePeriodSeconds": 0})


@pytest_asyncio.fixture
async def agent_node(installed: Installation, server, tmp_path: Path) -> AsyncIterator[Node]:
    place = Node(installed, tmp_path, 0)
    yield place
    place.close()


def publish(installed: Installation, port: int) -> None:
    """The slice that the endpoint slice controller makes of a replica's pod."""
    metadata = {
        "name": "rulecast-server-x",
        "namespace": "rulecast",
        "labels": {"kubernetes.io/service-name": "rulecast-server"},
    }
    installed.api.apply(
        [
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": metadata,
                "addressType": "IPv4",
                "ports": [
                    {"name": "grpc", "port": port, "protocol": "TCP"},
                    {"name": "http", "port": 9440, "protocol": "TCP"},
                ],
                "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": True}}],
            }
        ]
    )


@pytest.mark.asyncio
async def test_an_agent_finds_the_server_proves_its_node_and_gets_its_rules(
    installed: Installation, server, agent_node: Node, start_agent, tmp_path: Path
) -> None:
    publish(installed, server[1])
    agent = agent_node.start(start_agent)
    await eventually(lambda: agent.feed.status.connected or agent.feed.status.last_error, within=30)
    await eventually(lambda: agent.feed.status.connected, within=30)
    assert agent.feed.status.problems == ()
    await asyncio.to_thread(installed.api.apply, [service(3)])
    await eventually(lambda: any(view is not None for view in agent.views.values()), within=30)
    # Another replica takes its place, at another port.
    server[0].stop()
    directory = tmp_path / "second"
    directory.mkdir()
    _, port, _ = await asyncio.to_thread(start_server, installed, directory)
    await asyncio.to_thread(publish, installed, port)
    await eventually(
        lambda: agent.feed.status.connected and agent.feed.status.server == f"127.0.0.1:{port}", within=60
    )
    assert AddressFile(tmp_path, "rulecast/rulecast-server").load() == [HostPort("127.0.0.1", port)]


@pytest.mark.asyncio
async def test_an_agent_may_read_the_servers_addresses_and_nothing_else(
    installed: Installation, agent_node: Node
) -> None:
    publish(installed, 9443)
    assert await agent_node.lookup()() == [HostPort(ADDRESS, 9443)]
    token = (agent_node.account / "token").read_text()
    for path in (
        "/apis/discovery.k8s.io/v1/endpointslices",
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
        "/api/v1/services",
        f"{SPACE}/secrets/rulecast-server-tls",
        f"{SPACE}/configmaps/rulecast-ca",
        "/api/v1/nodes",
    ):
        assert refused(installed.api, "GET", path, token) == 403, path
    # The token for the server opens nothing at the API server.
    assert refused(installed.api, "GET", SLICES, agent_node.token.read_text()) == 401


@pytest.mark.asyncio
async def test_an_agent_without_its_right_says_so_in_one_line(
    installed: Installation, agent_node: Node
) -> None:
    role = installed.role("Role", "rulecast-agent")
    installed.put_role({**role, "rules": []})
    attributes = {"namespace": "rulecast", "verb": "list", "group": "discovery.k8s.io"}
    try:
        wait(
            lambda: not installed.allowed("rulecast-agent", resource="endpointslices", **attributes),
            lambda: "the right is gone",
        )
        with pytest.raises(LookupFailedError) as caught:
            await agent_node.lookup()()
        line = str(caught.value)
        assert "\n" not in line
        for word in ("HTTP 403", "rulecast:rulecast-agent", 'cannot list resource "endpointslices"'):
            assert word in line
    finally:
        installed.put_role(role)


def test_the_server_reads_no_secret_and_writes_nothing(installed: Installation, server) -> None:
    token = installed.token("rulecast-server")
    secrets = f"{SPACE}/secrets"
    assert refused(installed.api, "GET", secrets, token) == 403
    assert refused(installed.api, "GET", f"{SPACE}/pods", token) == 403
    assert refused(installed.api, "POST", f"{SPACE}/configmaps", token, {"metadata": {"name": "x"}}) == 403
    assert refused(installed.api, "DELETE", "/api/v1/namespaces/default/services/web-3", token) == 403


def test_with_all_its_rights_the_server_is_well(
    installed: Installation, certificates: Process, tmp_path
) -> None:
    process, _, http = start_server(installed, tmp_path)
    for path in ("/livez", "/readyz", "/healthz"):
        with urllib.request.urlopen(f"http://127.0.0.1:{http}{path}", timeout=10) as answer:
            assert answer.status == 200
    assert "orbidden" not in process.log
    assert "Traceback" not in process.log
    process.stop()


def test_a_right_that_the_server_lacks_is_named_in_one_line(
    installed: Installation, certificates: Process, tmp_path: Path
) -> None:
    role = installed.role("ClusterRole", "rulecast-server")
    rules = [rule for rule in role["rules"] if rule.get("resources") != ["endpointslices"]]
    assert len(rules) == len(role["rules"]) - 1
    installed.put_role({**role, "rules": rules})
    attributes = {"verb": "list", "group": "discovery.k8s.io", "resource": "endpointslices"}
    try:
        wait(lambda: not installed.allowed("rulecast-server", **attributes), lambda: "the right is gone")
        process, _, http = start_server(installed, tmp_path, synced=False)
        process.until("orbidden")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{http}/readyz", timeout=10)
        # Lists are watches first.
        assert 'cannot watch resource \\"endpointslices\\"' in caught.value.read().decode()
        named = [line for line in process.log.splitlines() if "endpointslices" in line]
        assert len(named) == 1, process.log
        assert "system:serviceaccount:rulecast:rulecast-server" in named[0]
        assert "Traceback" not in process.log
    finally:
        installed.put_role(role)
    # Given the right, it goes on by itself.
    process.until(r"synced: ")
    process.stop()
