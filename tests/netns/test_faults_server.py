"""Servers and apiservers that go, change, or fall silent: what agents make of it."""

import dataclasses
import json
import time
from collections.abc import Callable

import pytest

from rulecast.model import Family
from tests.fakes.apiserver import FakeApiServer
from tests.netns.objects import BOTH, CLUSTER_IP, Ep, Svc, frontend
from tests.netns.rig import GRPC_PORT, Loop, Rig
from tests.netns.test_faults_agent import everywhere
from tests.netns.traffic import Traffic
from tests.netns.world import A2, A, B, C
from tests.wire.proxy import Proxy

WEB = Svc("web", 70, [A, B])
OTHER = Svc("other", 71, [A, B, C])
DOOMED = Svc("doomed", 72, [A])


class TestServers:
    def test_without_a_server_rules_stay_and_the_agent_tells(self, rig: Rig) -> None:
        rig.write(WEB)
        server = rig.server()
        agent = rig.agent()
        rig.until_programmed()
        rig.until_connected()
        assert rig.metric("rulecast_agent_feed_staleness_seconds") == 0
        writes = rig.writes()
        with Traffic(everywhere(rig)) as traffic:
            server.kill()
            rig.until_connected(False)
            health = rig.healthz()
            assert health.status == 200
            assert health.json["feed"]["lastError"]
            assert rig.get("/livez").status == 200
            assert rig.get("/readyz").status == 200
            rig.eventually(lambda: rig.metric("rulecast_agent_feed_staleness_seconds") > 0, 3)
            assert rig.metric("rulecast_agent_feed_connected") == 0
            assert agent.log.count("rules stay, trying again") == 1
            # With an empty log it knows nothing of what this agent had before.
            rig.server()
            rig.until_connected()
            assert rig.writes() == writes
            assert rig.metric("rulecast_agent_feed_staleness_seconds") == 0
            rig.apply(WEB, OTHER)
            assert rig.ask(frontend(CLUSTER_IP, 71, Family.IPV6), times=40) == {"A", "B", "C"}
        traffic.check()

    def test_another_replica_takes_over_with_its_own_count(self, rig: Rig) -> None:
        rig.reset()
        rig.write(WEB)
        first = rig.server(port=9453)
        first.until_logged("synced")
        fabric = rig.lab.fabric.ip()
        rig.agent(servers=f"{fabric}:9453,{fabric}:9463")
        rig.until_programmed()
        for services in ((WEB, OTHER), (WEB, OTHER, DOOMED)):
            rig.apply(*services)
        rig.until_connected()
        rig.server(port=9463).until_logged("synced")
        writes = rig.writes()
        with Traffic(everywhere(rig)) as traffic:
            first.kill()
            rig.eventually(lambda: rig.healthz().json["feed"]["server"].endswith(":9463"))
            rig.until_connected()
            assert rig.writes() == writes
            rig.apply(WEB, OTHER)
            assert rig.ask(frontend(CLUSTER_IP, 72, Family.IPV4), times=1) == {"dropped"}
        traffic.check()


class CuttingProxy(Proxy):
    """Cuts each connection after the next number of bytes; then no more."""

    def __init__(self, upstream: int, cuts: list[int]) -> None:
        super().__init__(upstream)
        self._cuts = cuts

    async def _serve(self, reader, writer) -> None:  # type: ignore[no-untyped-def]
        self.cut_after = self._cuts.pop(0) if self._cuts else None
        await super()._serve(reader, writer)


class TestCuts:
    def test_nothing_of_a_broken_snapshot_is_applied(self, rig: Rig) -> None:
        """istio/istio#31943."""
        many = [Svc(f"s{n}", 100 + n, [A, B], families=(Family.IPV4,)) for n in range(60)]
        rig.write(WEB, OTHER, *many)
        rig.server()
        agent = rig.agent()
        rig.until_programmed()
        rig.until_connected()
        whole = rig.metric("rulecast_agent_feed_bytes_received_total")
        agent.kill()
        rig.write(dataclasses.replace(WEB, endpoints=[A2, B]), DOOMED, *many[:-1])
        loop = rig.loop()
        proxy = CuttingProxy(GRPC_PORT, [400, int(whole / 3), int(whole / 1.3)])
        loop.run(proxy.start(host="0.0.0.0"))
        rig.at_end(lambda: loop.run(proxy.stop()))
        writes = rig.writes()
        with Traffic(everywhere(rig)) as traffic:
            agent = rig.agent(servers=f"{rig.lab.fabric.ip()}:{proxy.port}")
            rig.eventually(lambda: proxy.accepted > 2)
            if proxy.accepted == 3:
                assert rig.writes() == writes
            rig.until_programmed()
        traffic.check()
        assert proxy.accepted == 4
        assert rig.ask(frontend(CLUSTER_IP, 70, Family.IPV4), times=25) == {"A2", "B"}
        assert rig.ask(frontend(CLUSTER_IP, 72, Family.IPV6)) == {"A"}
        assert rig.ask(frontend(CLUSTER_IP, 71, Family.IPV6), times=1) == {"dropped"}


class Cluster:
    """The stand-in in a thread on the fabric, and what goes on in it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.api = FakeApiServer(bookmark_interval=1.0)
        self.loop: Loop = rig.loop()
        self.start()
        rig.at_end(self.stop)
        self.kubeconfig = rig.directory / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(self._config()))

    def start(self) -> None:
        self.loop.run(self.api.start(self.rig.lab.fabric.ip(), self.api.port))

    def stop(self) -> None:
        self.loop.run(self.api.stop())

    def be(self, *services: Svc) -> None:
        """Make these services all that there are."""
        objects = self.rig.objects(*services)
        wanted = {(each["kind"], each["metadata"]["name"]) for each in objects}

        def change() -> None:
            for held in [
                each.object for plural in self.api.state.objects.values() for each in plural.values()
            ]:
                if (held["kind"], held["metadata"]["name"]) not in wanted:
                    self.api.delete(held)
            self.api.put(*objects)

        self.loop.call(change)

    def _config(self) -> dict[str, object]:
        server = f"http://{self.rig.lab.fabric.ip()}:{self.api.port}"
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }

    @property
    def source(self) -> tuple[str, ...]:
        return ("--kubeconfig", str(self.kubeconfig), "--watch-timeout", "3")


MOVED = dataclasses.replace(WEB, endpoints=[B])


def check_moved(rig: Rig) -> None:
    """`MOVED` and nothing else is in the kernel."""
    # Services and slices come on watches of their own.
    rig.until_programmed()
    for family in BOTH:
        rig.until_asked({"B"}, frontend(CLUSTER_IP, 70, family), times=20)
    assert rig.ask(frontend(CLUSTER_IP, 72, Family.IPV4), times=1) == {"dropped"}


class TestApiserver:
    """Each fault: changes and deletions happen behind the watch's back, and nothing is written afterwards."""

    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, rig: Rig) -> Cluster:
        cluster = Cluster(rig)
        cluster.be(WEB, DOOMED)
        rig.server("--insecure", source=cluster.source)
        rig.agent()
        return cluster

    @pytest.fixture(autouse=True)
    def settled(self, rig: Rig, cluster: Cluster) -> None:
        cluster.be(WEB, DOOMED)
        rig.until_programmed()

    def test_deletions_while_disconnected_are_found(self, rig: Rig, cluster: Cluster) -> None:
        """kubernetes/kubernetes#30622."""
        with Traffic(everywhere(rig)) as traffic:
            cluster.stop()
            cluster.be(MOVED)
            self._lost(rig)
            cluster.start()
            check_moved(rig)
        traffic.check()

    @pytest.mark.parametrize("as_event", [True, False], ids=["event", "status"])
    def test_a_compacted_version_is_not_asked_for_again(
        self, rig: Rig, cluster: Cluster, as_event: bool
    ) -> None:
        """kubernetes/kubernetes#3216."""
        cluster.api.gone_as_event = as_event
        with Traffic(everywhere(rig)) as traffic:
            cluster.stop()
            cluster.be(MOVED)
            cluster.loop.call(cluster.api.compact)
            cluster.start()
            check_moved(rig)
        traffic.check()

    def test_a_silent_watch_is_noticed(self, rig: Rig, cluster: Cluster) -> None:
        with Traffic(everywhere(rig)) as traffic:
            cluster.loop.call(lambda: cluster.api.stalled.update(("services", "endpointslices")))
            cluster.be(MOVED)
            self._lost(rig)
            cluster.loop.call(cluster.api.stalled.clear)
            check_moved(rig)
        traffic.check()

    def test_an_apiserver_that_was_set_back_is_followed(self, rig: Rig, cluster: Cluster) -> None:
        """kubernetes/kubernetes#91073: its versions are lower than what was seen."""
        backup = cluster.loop.call(cluster.api.state.backup)
        for _ in range(3):
            cluster.be(WEB, DOOMED, OTHER)
        rig.until_programmed()
        with Traffic(everywhere(rig)) as traffic:
            cluster.stop()
            cluster.loop.call(lambda: cluster.api.restore(backup))
            cluster.be(MOVED)
            cluster.start()
            # A node waits 30 s for a server that is behind before it believes that the cluster went back.
            rig.until_programmed(patience=75)
            check_moved(rig)
        traffic.check()

    def _lost(self, rig: Rig) -> None:
        """The server keeps serving, and says that it has lost its source."""

        def told() -> bool:
            return rig.get("/healthz", host=rig.lab.fabric, port=GRPC_PORT - 3).status == 503

        rig.eventually(told)
        assert rig.get("/readyz", host=rig.lab.fabric, port=GRPC_PORT - 3).status == 200
        assert rig.healthz().json["feed"]["connected"] is True


class TestStarts:
    def test_no_write_before_the_first_whole_state(self, rig: Rig) -> None:
        """kubernetes/kubernetes#126468: neither a server nor an agent takes a part for the whole."""
        rig.write(WEB)
        rig.server()
        rig.agent().until_logged("first state in the kernel")
        rig.until_programmed()
        rules = rig.ruleset()
        for process in rig.processes:
            process.kill()
        cluster = Cluster(rig)
        cluster.api.stalled.add("endpointslices")
        cluster.be(WEB, OTHER)
        writes = rig.writes()
        with Traffic(everywhere(rig)) as traffic:
            rig.server("--insecure", source=("--kubeconfig", str(cluster.kubeconfig)))
            rig.agent()
            rig.agent("--http", "0.0.0.0:10257", name="n2", node=rig.n2)
            rig.eventually(lambda: cluster.api.watching("endpointslices") == 1)
            rig.healthz()
            # Time enough for agents to connect and to do wrong.
            time.sleep(2)
            assert rig.get("/readyz", host=rig.lab.fabric, port=GRPC_PORT - 3).status == 503
            assert rig.writes() == writes
            assert rig.ruleset() == rules
            assert rig.ruleset(rig.n2) == ""
            assert rig.get("/readyz").status == 503
            cluster.loop.call(cluster.api.stalled.clear)
            cluster.loop.call(cluster.api.cut)
            for node in (rig.n1, rig.n2):
                rig.until_programmed(node)
        traffic.check()
        rig.until_asked({"A", "B", "C"}, frontend(CLUSTER_IP, 71, Family.IPV6), times=40)


class TestStandalone:
    def test_from_manifests(self, rig: Rig) -> None:
        rig.write(WEB)
        agent = self._agent(rig, "--manifests", str(rig.manifests))
        rig.until_programmed()
        with Traffic(everywhere(rig)) as traffic:
            self._follows(rig, rig.apply)
            rig.manifests.rename(rig.manifests.with_name("gone"))
            agent.until_logged("its last state stays in use")
            self._stays(rig)
            rig.manifests.with_name("gone").rename(rig.manifests)
            rig.apply(WEB)
            assert rig.ask(frontend(CLUSTER_IP, 71, Family.IPV4), times=1) == {"dropped"}
        traffic.check()

    def test_from_an_apiserver(self, rig: Rig) -> None:
        rig.reset()
        cluster = Cluster(rig)
        cluster.be(WEB)
        self._agent(rig, *cluster.source)
        rig.until_programmed()
        with Traffic(everywhere(rig)) as traffic:

            def apply(*services: Svc) -> None:
                cluster.be(*services)
                rig.until_programmed()

            self._follows(rig, apply)
            cluster.stop()
            self._stays(rig)
            cluster.be(WEB)
            cluster.start()
            rig.until_programmed()
            assert rig.ask(frontend(CLUSTER_IP, 71, Family.IPV4), times=1) == {"dropped"}
        traffic.check()

    def _agent(self, rig: Rig, *source: str):  # type: ignore[no-untyped-def]
        flags = ("--node-name", "n1", "--cluster-cidr", "10.244.0.0/16,2001:db8:244::/48")
        return rig.start(rig.n1, "agent", "--standalone", *source, *flags)

    def _follows(self, rig: Rig, apply: Callable[..., None]) -> None:
        for endpoints in ([A], [A, Ep("C")], [C]):
            apply(WEB, dataclasses.replace(OTHER, endpoints=endpoints))
            for family in BOTH:
                names = {each.name for each in endpoints}
                rig.until_asked(names, frontend(CLUSTER_IP, 71, family), times=25)

    def _stays(self, rig: Rig) -> None:
        assert rig.healthz().status == 200
        for family in BOTH:
            assert rig.ask(frontend(CLUSTER_IP, 71, family)) == {"C"}
            assert rig.ask(frontend(CLUSTER_IP, 70, family), times=25) == {"A", "B"}
