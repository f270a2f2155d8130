"""Tokens and rights, reviewed by a real apiserver for a server that has the documented rights alone."""

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from rulecast_agent.feed.channels import ChannelSettings, ClientTls
from rulecast_agent.feed.tokens import TokenFile
from rulecast_server.kube.auth import kubeconfig_loader
from rulecast_server.kube.client import ApiClient
from rulecast_server.kube.reviews import Reviews
from rulecast_server.rpc.token_authorizer import TokenAuthorizer
from rulecast_server.rpc.tokens import TokenIdentities, TokenSettings
from tests.realapi.control_plane import ApiServer, ControlPlane
from tests.security.conftest import CONTENTS
from tests.wire.conftest import Authority, Server, authority, start_agent, start_server
from tests.wire.test_rpc import hello, read_step
from tests.wire.test_tls import server_files
from tests.wire.waiting import eventually

__all__ = ["authority", "start_agent", "start_server"]

pytestmark = [
    pytest.mark.realapi,
    pytest.mark.asyncio,
    pytest.mark.skipif(
        not {"KUBE_APISERVER", "ETCD"} <= os.environ.keys(),
        reason="KUBE_APISERVER and ETCD do not name the programs (`make conformance` builds them)",
    ),
]
Code = grpc.StatusCode
RBAC = "/apis/rbac.authorization.k8s.io/v1"
SPACE = "/api/v1/namespaces/rulecast"


class Cluster:
    """ServiceAccounts, Pods on nodes, and rights."""

    def __init__(self, plane: ControlPlane, api: ApiServer) -> None:
        self.plane, self.api = plane, api
        api.request("POST", "/api/v1/namespaces", {"metadata": {"name": "rulecast"}})
        for account in ("rulecast-server", "rulecast-agent", "viewer"):
            api.request("POST", f"{SPACE}/serviceaccounts", {"metadata": {"name": account}})
        for node in ("node1", "node2"):
            api.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
            self.add_pod(node)
        self.allow(
            "rulecast-server",
            {
                "apiGroups": ["authentication.k8s.io"],
                "resources": ["tokenreviews"],
                "verbs": ["create"],
            },
            {
                "apiGroups": ["authorization.k8s.io"],
                "resources": ["subjectaccessreviews"],
                "verbs": ["create"],
            },
        )
        self.allow("viewer", {"nonResourceURLs": ["/rulecast.v1.Nodes/*"], "verbs": ["get"]})

    def add_pod(self, node: str) -> None:
        spec = {
            "nodeName": node,
            "serviceAccountName": "rulecast-agent",
            "containers": [{"name": "agent", "image": "rulecast"}],
        }
        self.api.request("POST", f"{SPACE}/pods", {"metadata": {"name": f"agent-{node}"}, "spec": spec})

    def delete_pod(self, node: str) -> None:
        self.api.request("DELETE", f"{SPACE}/pods/agent-{node}", {"gracePeriodSeconds": 0})

    def allow(self, account: str, *rules: object) -> None:
        self.api.request(
            "POST", f"{RBAC}/clusterroles", {"metadata": {"name": account}, "rules": list(rules)}
        )
        subject = {"kind": "ServiceAccount", "name": account, "namespace": "rulecast"}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": account}
        binding = {"metadata": {"name": account}, "roleRef": role, "subjects": [subject]}
        self.api.request("POST", f"{RBAC}/clusterrolebindings", binding)

    def token(self, account: str, *, audience: str | None = "rulecast", node: str = "") -> str:
        spec: dict[str, object] = {"audiences": [audience]} if audience else {}
        if node:
            spec["boundObjectRef"] = {"kind": "Pod", "apiVersion": "v1", "name": f"agent-{node}"}
        answer = self.api.request("POST", f"{SPACE}/serviceaccounts/{account}/token", {"spec": spec})
        token = answer["status"]["token"]
        assert isinstance(token, str)
        return token

    def kubeconfig(self, account: str) -> Path:
        path = self.plane.kubeconfig(self.api)
        content = json.loads(path.read_text())
        content["users"][0]["user"] = {"token": self.token(account, audience=None)}
        mine = path.with_suffix(f".{account}")
        mine.write_text(json.dumps(content))
        return mine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    api = ApiServer(plane, 16445)
    try:
        api.start()
        yield Cluster(plane, api)
    finally:
        api.stop()
        plane.close()


@pytest_asyncio.fixture
async def server(start_server, cluster: Cluster, authority: Authority, tmp_path) -> AsyncIterator[Server]:
    """--agent-auth token, with the rights of rulecast-server."""
    client = await ApiClient.connect(kubeconfig_loader(cluster.kubeconfig("rulecast-server")))
    reviews = Reviews(client)
    identities = TokenIdentities(reviews, TokenSettings(fresh=1.0))
    authorizer = TokenAuthorizer(identities, reviews, accounts=["rulecast/rulecast-agent"])
    files = server_files(authority, tmp_path)._replace(client_ca=None)
    yield await start_server(contents=CONTENTS, tls=files, authorizer=authorizer)
    await client.close()


async def watch(server: Server, ca: bytes, token: str, node: str) -> tuple[Code, str]:
    credentials = grpc.ssl_channel_credentials(ca)
    async with grpc.aio.secure_channel(server.address, credentials) as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch(metadata=(("authorization", f"Bearer {token}"),))
        try:
            await call.write(hello(node))
            await read_step(call)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        call.cancel()
        return Code.OK, ""


async def test_a_token_is_good_for_the_node_of_its_pod_alone(
    server: Server, cluster: Cluster, authority: Authority
) -> None:
    ca = authority.cert.read_bytes()
    token = cluster.token("rulecast-agent", node="node1")
    assert await watch(server, ca, token, "node1") == (Code.OK, "")
    code, why = await watch(server, ca, token, "node2")
    assert code is Code.PERMISSION_DENIED
    assert why.endswith("is bound to node 'node1', not to 'node2'")
    for other, wanted in (
        (cluster.token("rulecast-agent"), Code.PERMISSION_DENIED),
        (cluster.token("viewer"), Code.PERMISSION_DENIED),
        (cluster.token("rulecast-agent", audience="vault", node="node1"), Code.UNAUTHENTICATED),
        (cluster.token("rulecast-agent", audience=None, node="node1"), Code.UNAUTHENTICATED),
        (token[:-8] + "AAAAAAAA", Code.UNAUTHENTICATED),
    ):
        assert (await watch(server, ca, other, "node1"))[0] is wanted


async def test_a_deleted_pod_ends_its_agents_stream_and_a_new_one_gets_in(
    server: Server, cluster: Cluster, authority: Authority, start_agent, tmp_path
) -> None:
    file = tmp_path / "token"
    file.write_text(cluster.token("rulecast-agent", node="node1"))
    agent = start_agent(
        server.address,
        node="node1",
        channel=ChannelSettings(tls=ClientTls(authority.cert), connect_backoff=0.2),
        token=TokenFile(file),
    )
    await eventually(lambda: agent.feed.status.connected)
    cluster.delete_pod("node1")
    # The apiserver itself remembers a token for ten seconds.
    await eventually(lambda: "does not accept the token" in agent.feed.status.last_error, within=40)
    assert not server.hub.streams
    cluster.add_pod("node1")
    file.write_text(cluster.token("rulecast-agent", node="node1"))
    await eventually(lambda: agent.feed.status.connected)
    assert len(agent.updates) == 1


async def test_rbac_decides_who_inspects(server: Server, cluster: Cluster, authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
    async with grpc.aio.secure_channel(server.address, credentials) as channel:
        for token, nodes, agents in (
            (cluster.token("viewer"), Code.OK, Code.PERMISSION_DENIED),
            (cluster.token("rulecast-agent", node="node2"), Code.PERMISSION_DENIED, Code.PERMISSION_DENIED),
            (cluster.token("viewer", audience=None), Code.UNAUTHENTICATED, Code.UNAUTHENTICATED),
        ):
            metadata = (("authorization", f"Bearer {token}"),)
            listed = rules_pb2_grpc.NodesStub(channel).List(pb.ListNodesRequest(), metadata=metadata)
            assert await listed.code() is nodes
            rules = rules_pb2_grpc.RulesStub(channel)
            assert await rules.ListAgents(pb.ListAgentsRequest(), metadata=metadata).code() is agents
