"""Mutual TLS between the processes: who is let in, and certificates that change under way."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rulecast.model import Family
from tests.netns.objects import CLUSTER_IP, Svc, frontend
from tests.netns.rig import GRPC_PORT, Process, Rig
from tests.netns.world import A, B
from tests.wire.conftest import Authority
from tests.wire.proxy import Proxy

WEB = Svc("web", 70, [A, B])
MORE = Svc("more", 71, [A])


class Files:
    """One side's certificate, key and CA in a directory, replaced one after the other while in use."""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.cert, self.key, self.ca = (directory / name for name in ("tls.crt", "tls.key", "ca.crt"))

    def put(self, issued: tuple[Path, Path], ca: Path) -> None:
        for source, target in zip((*issued, ca), (self.cert, self.key, self.ca), strict=True):
            new = target.with_suffix(".new")
            shutil.copy(source, new)
            new.rename(target)

    @property
    def server_flags(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key), "--client-ca", str(self.ca))

    @property
    def agent_flags(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca))


class Pki:
    """Two authorities, and the files of both sides."""

    def __init__(self, rig: Rig) -> None:
        directory = rig.directory / "pki"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        self.ours = Authority(directory, "ours")
        self.theirs = Authority(directory, "theirs")
        self.server, self.agent = Files(directory / "server"), Files(directory / "agent")
        self._names = (f"IP:{rig.lab.fabric.ip()}",)
        self.serve(self.ours)

    def serve(self, authority: Authority, client_ca: Path | None = None) -> None:
        """Give the server a new certificate."""
        issued = authority.issue("server", "rulecast", *self._names)
        self.server.put(issued, client_ca or authority.cert)

    def identify(self, cn: str, authority: Authority | None = None, ca: Path | None = None) -> None:
        """Give the agent a new certificate."""
        authority = authority or self.ours
        issued = authority.issue(f"agent-{authority.cert.stem}", cn)
        self.agent.put(issued, ca or self.ours.cert)


class TestTls:
    @pytest.fixture(scope="class")
    @classmethod
    def pki(cls, rig: Rig) -> Pki:
        return Pki(rig)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, rig: Rig, pki: Pki) -> Process:
        rig.write(WEB)
        return rig.server(*pki.server.server_flags)

    def test_another_nodes_certificate_is_refused_until_the_right_one_is_there(
        self, rig: Rig, pki: Pki, server: Process
    ) -> None:
        pki.identify("system:node:n2")
        agent = rig.agent(transport=pki.agent.agent_flags)
        agent.until_logged("does not name node 'n1'")
        assert "rules stay, trying again" in agent.log
        assert rig.ruleset() == ""
        assert "n1" in server.log
        pki.identify("system:node:n1")
        rig.until_programmed()
        rig.until_connected()
        assert rig.ask(frontend(CLUSTER_IP, 70, Family.IPV4), times=25) == {"A", "B"}
        assert agent.stop() == 0

    def test_an_agent_of_another_authority_is_refused(self, rig: Rig, pki: Pki) -> None:
        pki.identify("system:node:n1", pki.theirs, ca=pki.ours.cert)
        self._stays_out(rig, pki)

    def test_a_server_of_another_authority_is_refused(self, rig: Rig, pki: Pki) -> None:
        pki.identify("system:node:n1", ca=pki.theirs.cert)
        self._stays_out(rig, pki)

    def test_a_server_of_another_name_is_refused(self, rig: Rig, pki: Pki) -> None:
        pki.identify("system:node:n1")
        self._stays_out(rig, pki, "--tls-server-name", "other.example")

    def test_without_certificates_nobody_is_served(self, rig: Rig) -> None:
        self._stays_out(rig, None)

    def _stays_out(self, rig: Rig, pki: Pki | None, *flags: str) -> None:
        before = rig.ruleset()
        agent = rig.agent(*flags, transport=pki.agent.agent_flags if pki else ("--insecure",))
        agent.until_logged("UNAVAILABLE")
        told = [line for line in agent.log.splitlines() if "trying again" in line]
        assert len(told) == 1
        assert rig.healthz().json["feed"]["lastError"]
        assert rig.ruleset() == before
        assert rig.get("/readyz").status == 503
        agent.kill()

    def test_both_sides_follow_certificates_and_authorities_that_are_replaced(
        self, rig: Rig, pki: Pki, server: Process
    ) -> None:
        """kubernetes/kubernetes#77651: first both authorities are trusted, then only the new one."""
        pki.identify("system:node:n1")
        loop, proxy = rig.loop(), Proxy(GRPC_PORT)
        loop.run(proxy.start(host="0.0.0.0"))
        rig.at_end(lambda: loop.run(proxy.stop()))
        agent = rig.agent(servers=f"{rig.lab.fabric.ip()}:{proxy.port}", transport=pki.agent.agent_flags)
        rig.until_connected()
        bundle = rig.directory / "pki" / "bundle.crt"
        bundle.write_text(pki.ours.cert.read_text() + pki.theirs.cert.read_text())
        pki.identify("system:node:n1", ca=bundle)
        self._reconnects(rig, lambda: loop.call(proxy.cut))
        pki.serve(pki.theirs, client_ca=bundle)
        self._reconnects(rig, lambda: loop.call(proxy.cut))
        pki.identify("system:node:n1", pki.theirs, ca=pki.theirs.cert)
        pki.serve(pki.theirs)
        self._reconnects(rig, lambda: loop.call(proxy.cut))
        assert agent.running
        assert server.running
        old = Files(rig.directory / "pki" / "old")
        old.put(pki.ours.issue("old", "system:node:n2"), pki.theirs.cert)
        stranger = rig.agent(
            "--http",
            "0.0.0.0:10257",
            name="n2",
            node=rig.n2,
            transport=old.agent_flags,
        )
        stranger.until_logged("UNAVAILABLE")

    def _reconnects(self, rig: Rig, cut: Callable[[], None]) -> None:
        """The running connection goes on as it was; the next one has the new files."""
        rig.apply(WEB, MORE)
        connects = rig.metric("rulecast_agent_feed_connects_total")
        cut()
        rig.eventually(lambda: rig.metric("rulecast_agent_feed_connects_total") > connects)
        rig.until_connected()
        rig.apply(WEB)
