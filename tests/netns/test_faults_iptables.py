"""The iptables mode among others who change rules, restarts, locks, refusals and changes of mode."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rulecast.model import Family, Protocol
from tests.netns import raw
from tests.netns.objects import BOTH, CLUSTER_IP, VIP, Svc, frontend
from tests.netns.rig import Process, Rig
from tests.netns.test_faults_agent import ended, everywhere, hows, staying
from tests.netns.test_faults_kernel import EMPTY, LOCAL, RANGED, STICKY, WEB, check_packets
from tests.netns.traffic import Traffic
from tests.netns.world import A, B, C

SERVICES = (WEB, EMPTY, STICKY, RANGED, LOCAL)
BACKENDS = ("nft", "legacy")
TOOLS = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}


def flags(backend: str) -> tuple[str, ...]:
    return ("--mode", "iptables", "--iptables-backend", backend, "--sync-period", "2s")


def iptables(rig: Rig, backend: str, family: Family, arguments: str) -> str:
    return rig.n1.namespace.run(f"{TOOLS[family]}-{backend}", *arguments.split())


def saved(rig: Rig, backend: str) -> list[str]:
    """Both families' tables, without the counters and the time."""
    lines = []
    for family in BOTH:
        for table in ("nat", "filter"):
            text = rig.n1.namespace.run(f"{TOOLS[family]}-{backend}-save", "-t", table)
            lines += [line.split(" [")[0] for line in text.splitlines() if not line.startswith("#")]
    return sorted(lines)


def until_in(rig: Rig, expected: set[str] | None = None) -> None:
    """web is as it should be, in both families."""
    for family in BOTH:
        rig.until_asked(expected or {"A", "B"}, frontend(CLUSTER_IP, 70, family), patience=20, times=25)


class TestRestarts:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, rig: Rig) -> Process:
        rig.write(*SERVICES)
        return rig.server()

    @hows
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_an_agent_that_restarts_costs_no_packet_and_writes_nothing(
        self, rig: Rig, backend: str, how: str
    ) -> None:
        """kubernetes/kubernetes#75360 and #126468."""
        agent = rig.agent(*flags(backend))
        agent.until_logged("first state in the kernel")
        until_in(rig)
        rig.until_connected()
        with Traffic(everywhere(rig), staying=staying(rig)) as traffic:
            before = rig.writes()
            for _ in range(3):
                ended(agent, how)
                agent = rig.agent(*flags(backend))
                agent.until_logged("first state in the kernel")
                rig.until_connected()
                assert rig.metric("rulecast_agent_operations_total") == 0
                if backend == "nft":
                    assert rig.writes() == before
        traffic.check()
        ended(agent, how)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_what_changed_while_it_was_away_is_right_afterwards(self, rig: Rig, backend: str) -> None:
        agent = rig.agent(*flags(backend))
        until_in(rig)
        agent.kill()
        rig.write(Svc("web", 70, [B, C]), EMPTY)
        with Traffic(everywhere(rig)) as traffic:
            agent = rig.agent(*flags(backend))
            until_in(rig, {"B", "C"})
        traffic.check()
        assert "RULECAST-FW" not in "\n".join(saved(rig, backend))
        agent.kill()
        rig.write(*SERVICES)

    def test_any_change_of_mode_leaves_nothing_behind_and_costs_no_packet(self, rig: Rig) -> None:
        """kubernetes/kubernetes#102314."""
        modes = [flags("nft"), flags("legacy"), ("--mode", "nftables"), flags("legacy"), flags("nft")]
        agent = rig.agent("--mode", "nftables")
        until_in(rig)
        with Traffic(everywhere(rig), staying=staying(rig)) as traffic:
            for mode in modes:
                ended(agent, "SIGTERM")
                agent = rig.agent(*mode)
                agent.until_logged("removed the rules that another mode had left")
                held = {
                    "nftables": "table ip rulecast" in rig.ruleset(),
                    "nft": any("RULECAST" in line for line in saved(rig, "nft")),
                    "legacy": any("RULECAST" in line for line in saved(rig, "legacy")),
                }
                assert [name for name, there in held.items() if there] == [
                    mode[3] if "iptables" in mode else mode[1]
                ]
                check_packets(rig)
        traffic.check()
        ended(agent, "SIGTERM")


class TestCleanup:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_cleanup_leaves_what_others_have(self, rig: Rig, backend: str) -> None:
        """cloudnativelabs/kube-router#830."""
        for family in BOTH:
            iptables(rig, backend, family, "-t nat -N RULECASTLIKE")
            iptables(rig, backend, family, "-t nat -A PREROUTING -p tcp --dport 1 -j RULECASTLIKE")
            iptables(rig, backend, family, "-t filter -A FORWARD -p tcp --dport 1 -j ACCEPT")
        before = saved(rig, backend)
        rig.write(*SERVICES)
        server = rig.server()
        agent = rig.agent(*flags(backend))
        until_in(rig)
        agent.stop()
        server.kill()
        assert rig.run(rig.n1, "cleanup")[0] == 0
        assert [line for line in saved(rig, backend) if "RULECAST-" in line] == []
        assert set(before) <= set(saved(rig, backend))


DAMAGES = {
    "nat flushed": ("-t nat -F",),
    "nat flushed and its chains deleted": ("-t nat -F", "-t nat -X"),
    "filter flushed": ("-t filter -F",),
    "everything flushed": ("-t nat -F", "-t nat -X", "-t filter -F", "-t filter -X"),
    "a hook deleted": ("-t nat -D PREROUTING -j RULECAST-SERVICES",),
    "a chain flushed": ("-t nat -F RULECAST-FRONTENDS",),
    "a dispatch of refusals flushed": ("-t filter -F RULECAST-UNDELIVERED",),
    "the masquerading flushed": ("-t nat -F RULECAST-POSTROUTING",),
    "a rule put first": ("-t nat -I RULECAST-SERVICES -p tcp -j RETURN",),
}


class TestOthers:
    """kubernetes/kubernetes#81517 and #129128."""

    @pytest.fixture(autouse=True, scope="class", params=BACKENDS)
    @classmethod
    def backend(cls, rig: Rig, request: pytest.FixtureRequest) -> str:
        rig.reset()
        rig.write(*SERVICES)
        rig.server()
        rig.agent(*flags(request.param))
        until_in(rig)
        check_packets(rig)
        backend: str = request.param
        return backend

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
    def test_what_others_take_away_comes_back(self, rig: Rig, backend: str, damage: tuple[str, ...]) -> None:
        before, drift = saved(rig, backend), rig.metric("rulecast_agent_drift_total")
        for family in BOTH:
            for command in damage:
                iptables(rig, backend, family, command)
        # The commands are many, and what the first ones took may be back before the last.
        rig.eventually(lambda: saved(rig, backend) == before, 5.0)
        rig.eventually(lambda: rig.metric("rulecast_agent_drift_total") > drift, 5.0)
        check_packets(rig)

    def test_a_rule_of_another_is_no_drift_and_nothing_is_rewritten(self, rig: Rig, backend: str) -> None:
        drift, done = (rig.metric(f"rulecast_agent_{name}_total") for name in ("drift", "operations"))
        with Traffic(everywhere(rig)) as traffic:
            for number in range(10):
                iptables(
                    rig, backend, Family.IPV4, f"-t filter -A FORWARD -p tcp --dport {number + 1} -j ACCEPT"
                )
                time.sleep(0.3)
        traffic.check()
        assert rig.metric("rulecast_agent_drift_total") == drift
        assert rig.metric("rulecast_agent_operations_total") == done


class TestLocalhostNodePorts:
    """With --iptables-localhost-nodeports, which puts route_localnet on."""

    @pytest.fixture(autouse=True, scope="class", params=BACKENDS)
    @classmethod
    def line(cls, rig: Rig, request: pytest.FixtureRequest) -> Iterator[None]:
        rig.reset()
        rig.write(*SERVICES)
        rig.server()
        rig.agent(
            *flags(request.param), "--iptables-localhost-nodeports", "--nodeport-addresses", "0.0.0.0/0,::/0"
        )
        until_in(rig)
        yield
        rig.n1.namespace.run("sysctl", "-qw", "net.ipv4.conf.all.route_localnet=0")

    def test_a_node_port_answers_on_the_ipv4_loopback(self, rig: Rig) -> None:
        """Those on other nodes too: they see the node's address."""
        assert rig.ask("127.0.0.1", 30070, client=rig.n1, times=25) == {"A", "B"}
        assert rig.ask("::1", 30070, client=rig.n1) == {"refused"}

    def test_the_local_policy_does_not_bind_the_node_itself(self, rig: Rig) -> None:
        assert rig.ask("127.0.0.1", 30074, client=rig.n1, times=25) == {"A", "B"}

    def test_the_loopback_stays_closed_to_neighbors(self, rig: Rig) -> None:
        """CVE-2020-8558."""
        servers = rig.lab.servers
        addresses = ["127.0.0.1", rig.n1.ip(Family.IPV4)]
        for address, port in zip(addresses, (9000, 9001), strict=True):
            servers.listen("n1", rig.n1.namespace, [address], port, Protocol.UDP)
        before = servers.received("n1", Protocol.UDP, 9001)
        try:
            for address, port in zip(addresses, (9000, 9001), strict=True):
                raw.send_udp_frame(rig.outside, rig.n1, Family.IPV4, address, port)
            rig.eventually(lambda: servers.received("n1", Protocol.UDP, 9001) > before, 3)
            assert servers.received("n1", Protocol.UDP, 9000) == 0
        finally:
            servers.close("n1")


class TestTheLock:
    def test_a_lock_that_others_hold_delays_a_change_and_no_more(self, rig: Rig) -> None:
        """kubernetes/kubernetes#7370 and #85771."""
        rig.write(WEB)
        rig.server()
        agent = rig.agent(*flags("legacy"))
        until_in(rig)
        holder = subprocess.Popen(["flock", "/run/xtables.lock", "sleep", "8"])
        try:
            rig.write(Svc("web", 70, [C]))
            time.sleep(2.0)
            assert agent.running
            assert rig.ask(frontend(CLUSTER_IP, 70, Family.IPV4)) == {"A", "B"}
            holder.wait(20)
            until_in(rig, {"C"})
        finally:
            holder.kill()
            holder.wait()


class Refusing:
    """iptables-restore before the real one on the PATH, which refuses what it is told to."""

    SCRIPT = """#!/bin/sh
text=$(cat)
if [ -e {directory}/refuse ] && printf '%s\\n' "$text" | grep -q -f {directory}/refuse; then
    echo 'iptables-restore: line 7 failed' >&2
    exit 1
fi
printf '%s\\n' "$text" | {real} "$@"
"""

    def __init__(self, directory: Path, backend: str) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        self.path = f"{directory}:{os.environ['PATH']}"
        self._refuse = directory / "refuse"
        for tool in TOOLS.values():
            program = directory / f"{tool}-{backend}-restore"
            program.write_text(self.SCRIPT.format(directory=directory, real=shutil.which(program.name)))
            program.chmod(0o755)

    def refuse(self, words: str) -> None:
        self._refuse.write_text(words + "\n")

    def work(self) -> None:
        self._refuse.unlink()


class TestRefusals:
    """kubernetes/kubernetes#24357."""

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_refused_service_is_told_and_holds_back_no_other(self, rig: Rig, backend: str) -> None:
        rig.reset()
        tool = Refusing(rig.directory / "refusing", backend)
        tool.refuse("default/bad")
        bad = Svc("bad", 75, [A])
        rig.write(WEB, bad)
        rig.server()
        agent = rig.agent(*flags(backend), path=tool.path)
        until_in(rig)
        agent.until_logged("service port default/bad")
        rig.write(Svc("web", 70, [B, C]), bad)
        until_in(rig, {"B", "C"})
        assert rig.ask(frontend(VIP, 70, Family.IPV4), client=rig.outside, times=25) == {"B", "C"}
        tool.work()
        rig.until_asked({"A"}, frontend(CLUSTER_IP, 75, Family.IPV4), patience=10)
        agent.until_logged("is no longer refused")
        agent.kill()
