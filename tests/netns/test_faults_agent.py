"""Agents that end, at any moment and in any way, and what stays."""

import dataclasses
import itertools
import shutil
import time
from pathlib import Path

import pytest

from rulecast.lab import Probe, run_probes
from rulecast.model import Family
from tests.netns.objects import BOTH, CLUSTER_IP, VIP, Object, Svc, frontend
from tests.netns.rig import Process, Rig
from tests.netns.traffic import Target, Traffic
from tests.netns.world import A2, A, B, C

WEB = Svc("web", 70, [A, B])
OTHER = Svc("other", 71, [C])
STICKY = Svc(
    "sticky",
    72,
    [A, A2, B, C],
    spec={"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}},
)


def everywhere(rig: Rig) -> list[Target]:
    """web at its cluster IPs from a pod; at node ports and load-balancer IPs from outside."""
    return [
        target
        for family in BOTH
        for target in (
            Target(rig.pod, frontend(CLUSTER_IP, 70, family), 80),
            Target(rig.outside, rig.n1.ip(family), 30070),
            Target(rig.outside, frontend(VIP, 70, family), 80),
        )
    ]


def staying(rig: Rig) -> list[Target]:
    return [Target(rig.pod, frontend(CLUSTER_IP, 70, family), 80) for family in BOTH]


def ended(agent: Process, how: str) -> None:
    if how == "SIGKILL":
        agent.kill()
    else:
        assert agent.stop() == 0


hows = pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])


class TestRestarts:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, rig: Rig) -> Process:
        rig.write(WEB, STICKY)
        return rig.server()

    @hows
    def test_an_agent_that_restarts_costs_no_packet_and_writes_nothing(self, rig: Rig, how: str) -> None:
        """kubernetes/kubernetes#75360 and #126468."""
        rig.write(WEB, STICKY)
        agent = rig.agent()
        rig.until_programmed()
        rig.until_connected()
        with Traffic(everywhere(rig), staying=staying(rig)) as traffic:
            before = rig.writes()
            for _ in range(3):
                ended(agent, how)
                agent = rig.agent()
                agent.until_logged("first state in the kernel")
                rig.until_connected()
                assert rig.writes() == before
                assert rig.metric("rulecast_agent_operations_total") == 0
        traffic.check()
        ended(agent, how)

    @hows
    def test_what_changed_while_it_was_away_is_right_afterwards(self, rig: Rig, how: str) -> None:
        agent = rig.agent()
        for services in ((WEB, OTHER), (dataclasses.replace(WEB, endpoints=[B, C]),), (WEB, STICKY)):
            rig.until_programmed()
            rig.until_connected()
            ended(agent, how)
            rig.write(*services)
            with Traffic(everywhere(rig)) as traffic:
                agent = rig.agent()
                rig.until_programmed()
                for family in BOTH:
                    names = {each.name for each in services[0].endpoints}
                    assert rig.ask(frontend(CLUSTER_IP, 70, family), times=25) == names
                    other = {"C"} if OTHER in services else {"dropped"}
                    assert rig.ask(frontend(CLUSTER_IP, 71, family), times=1) == other
            traffic.check()
        ended(agent, how)

    def test_clients_keep_their_backends(self, rig: Rig) -> None:
        """kubernetes/kubernetes#123162."""
        rig.write(WEB, STICKY)
        agent = rig.agent()
        rig.until_programmed()
        clients = {
            family: [f"{text}{60 + n}" for n in range(15)]
            for family, text in ((Family.IPV4, "198.51.100."), (Family.IPV6, "2001:db8:51::"))
        }
        for address in [*clients[Family.IPV4], *clients[Family.IPV6]]:
            rig.outside.add_address(address)
            rig.n2.route(address, rig.n1)

        def backends() -> list[str]:
            probes = [
                Probe(rig.outside.namespace, frontend(VIP, 72, family), 80, source=client)
                for family in BOTH
                for client in clients[family]
            ]
            return [answer.reached.backend if answer.reached else "nobody" for answer in run_probes(probes)]

        first = backends()
        assert len(set(first)) > 1
        assert "nobody" not in first
        for how in ("SIGKILL", "SIGTERM"):
            ended(agent, how)
            rig.write(WEB, STICKY, OTHER)
            agent = rig.agent()
            rig.until_programmed()
            assert backends() == first
        ended(agent, "SIGKILL")


class TestRestartsAtSize:
    def test_two_thousand_other_services_make_no_difference(self, rig: Rig) -> None:
        """kubernetes/kubernetes#126468: changes of what was read back are few, and in order."""
        crowd = [
            dataclasses.replace(OTHER, name=f"s{number}", number=number, exposed=False, families=(family,))
            for number, family in itertools.product(range(1000, 2000), BOTH)
        ]
        rig.write(WEB, extra=crowded(rig, crowd))
        rig.server()
        agent = rig.agent()
        rig.until_programmed()
        rig.until_connected()
        assert rig.ruleset().count(" : goto cluster-ip-tcp-1") == 2000
        with Traffic(everywhere(rig), staying=staying(rig)) as traffic:
            for number, how in enumerate(("SIGKILL", "SIGTERM", "SIGKILL")):
                before = rig.writes()
                ended(agent, how)
                if number:
                    rig.write(WEB, extra=crowded(rig, crowd[number:]))
                agent = rig.agent()
                agent.until_logged("first state in the kernel", patience=40)
                rig.until_programmed()
                if not number:
                    rig.until_connected()
                    assert rig.writes() == before
        traffic.check()

    def killed_early(self, rig: Rig, table: str) -> bool:
        """Kills an agent once a table is there; False when it was done by then."""
        rig.n1.namespace.run("nft", "flush ruleset")
        agent = rig.agent()
        end = time.monotonic() + 20
        while f"table {table} rulecast" not in rig.n1.namespace.run("nft", "list tables"):
            assert time.monotonic() < end, str(rig)
        agent.kill()
        return rig.ruleset().count("hook prerouting") < 4

    @pytest.mark.parametrize("table", ["ip", "ip6"])
    def test_one_that_is_killed_while_it_loads_leaves_nothing_half_done(self, rig: Rig, table: str) -> None:
        rig.reset()
        crowd = [
            dataclasses.replace(OTHER, name=f"s{number}", number=number, exposed=False, families=(family,))
            for number, family in itertools.product(range(1000, 2500), BOTH)
        ]
        rig.write(WEB, STICKY, extra=crowded(rig, crowd))
        rig.server().until_logged("synced")
        rig.eventually(lambda: self.killed_early(rig, table))
        rig.agent()
        rig.until_programmed()
        rig.until_connected()
        for family in BOTH:
            assert rig.ask(frontend(CLUSTER_IP, 70, family), times=25) == {"A", "B"}
            assert rig.ask({Family.IPV4: "10.96.6.7", Family.IPV6: "2001:db8:96::1507"}[family]) == {"C"}
        assert rig.ruleset().count(" : goto cluster-ip-tcp-1") == 3000


def crowded(rig: Rig, crowd: list[Svc]) -> list[Object]:
    """Objects of many services; their numbers give addresses of the same range."""
    made = []
    for service in crowd:
        text = f"10.96.{service.number // 250}.{service.number % 250}"
        if service.families == (Family.IPV6,):
            text = f"2001:db8:96::{service.number}"
        first, *slices = dataclasses.replace(service, name=f"{service.name}-{service.families[0]}").manifests(
            rig.lab
        )
        made += [first | {"spec": first["spec"] | {"clusterIP": text, "clusterIPs": [text]}}, *slices]
    return made


class TestEnding:
    def test_sigterm_ends_both_at_once_and_leaves_the_rules(self, rig: Rig) -> None:
        rig.write(WEB)
        server, agent = rig.server(), rig.agent()
        rig.until_programmed()
        rules = rig.ruleset()
        assert server.stop(3) == 0
        assert agent.stop(3) == 0
        assert rig.ruleset() == rules
        assert rig.ask(frontend(CLUSTER_IP, 70, Family.IPV4), times=25) == {"A", "B"}

    def test_sigterm_ends_an_agent_that_never_found_a_server(self, rig: Rig) -> None:
        agent = rig.agent(servers=f"{rig.lab.fabric.ip()}:9")
        agent.until_logged("rules stay, trying again")
        assert agent.stop(3) == 0

    def test_a_second_agent_in_the_namespace_is_refused(self, rig: Rig) -> None:
        first = rig.agent()
        first.until_logged("HTTP on port")
        second = rig.agent("--http", "127.0.0.1:0")
        assert second.exit_code() == 2
        assert len(second.log.splitlines()) == 1
        assert "another rulecast agent" in second.log
        assert first.running


FOREIGN = """
table ip rulecast-of-someone {
    chain c {
        type filter hook input priority 5;
        tcp dport 1 drop;
    }
}
table inet filter {
    set s {
        type ipv4_addr;
        elements = { 192.0.2.77 }
    }
    chain forward {
        type filter hook forward priority 0; policy accept;
        ip saddr @s drop;
    }
}
table ip6 nat {
    chain p {
        type nat hook prerouting priority -90;
    }
}
"""


class TestCleanup:
    def test_cleanup_leaves_the_kernel_as_it_was_before_the_agent(self, rig: Rig) -> None:
        rig.n1.namespace.run("nft", "-f", "-", text=FOREIGN)
        before = rig.ruleset()
        rig.write(WEB, STICKY)
        rig.server()
        agent = rig.agent()
        rig.until_programmed()
        during = rig.ruleset()
        code, words = rig.run(rig.n1, "cleanup")
        assert code == 2
        assert "runs in this network namespace" in words
        assert len(words.splitlines()) == 1
        assert rig.ruleset() == during
        agent.stop()
        assert rig.run(rig.n1, "cleanup")[0] == 0
        assert rig.ruleset() == before
        assert rig.run(rig.n1, "cleanup")[0] == 0
        assert rig.ruleset() == before


class TestSavedState:
    """kubernetes/kubernetes#119265: a node that comes up while no server answers."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def saved(cls, rig: Rig) -> Path:
        """A state directory as an agent left it; its server is gone, and the node was rebooted."""
        state = rig.directory / "state"
        shutil.rmtree(state, ignore_errors=True)
        rig.write(WEB, STICKY)
        server, agent = rig.server(), rig.agent("--state-dir", str(state))
        rig.until_programmed()
        rig.until_connected()
        server.kill()
        assert agent.stop() == 0
        return state

    def test_a_rebooted_node_has_the_last_good_state(self, rig: Rig, saved: Path) -> None:
        rig.n1.namespace.run("nft", "flush ruleset")
        agent = rig.agent("--state-dir", str(saved))
        rig.until_programmed()
        for family in BOTH:
            assert rig.ask(frontend(CLUSTER_IP, 70, family), times=25) == {"A", "B"}
        health = rig.healthz()
        assert health.status == 200
        assert health.json["feed"]["fromCheckpoint"] is True
        assert "starting from the state saved" in agent.log
        writes = rig.writes()
        rig.server()
        rig.until_connected()
        assert rig.healthz().json["feed"]["fromCheckpoint"] is False
        assert rig.writes() == writes
        agent.kill()

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda data: data[: len(data) // 2], "bytes instead of"),
            (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "wrong checksum"),
            (lambda data: b"garbage\n" * 100, "not a checkpoint"),
            (lambda data: b"", "not a checkpoint"),
        ],
        ids=["cut", "one bit", "garbage", "empty"],
    )
    def test_a_damaged_file_is_told_and_not_used(self, rig: Rig, saved: Path, damage, words: str) -> None:
        damaged = rig.directory / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        damaged.mkdir()
        file = next(saved.iterdir())
        (damaged / file.name).write_bytes(damage(file.read_bytes()))
        self._not_used(rig, rig.agent("--state-dir", str(damaged), servers="192.0.2.1:9"), words)

    def test_the_file_of_another_node_is_told_and_not_used(self, rig: Rig, saved: Path) -> None:
        agent = rig.agent("--state-dir", str(saved), name="n2", servers="192.0.2.1:9")
        self._not_used(rig, agent, "of node 'n1', not of 'n2'")

    def _not_used(self, rig: Rig, agent: Process, words: str) -> None:
        rules = rig.ruleset()
        agent.until_logged("rules stay, trying again")
        told = [line for line in agent.log.splitlines() if words in line]
        assert len(told) == 1
        assert "the saved state is not used" in told[0]
        assert any(words in each for each in rig.healthz().json["feed"]["problems"])
        assert rig.ruleset() == rules
        agent.kill()
