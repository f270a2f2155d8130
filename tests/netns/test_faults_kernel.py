"""Rules that others take away, and rules that the kernel does not take."""

import os
import re
import shutil
from pathlib import Path

import pytest

from rulecast.lab import Probe, Verdict, run_probes
from rulecast.model import Family
from tests.netns.objects import BOTH, CLUSTER_IP, VIP, Svc, frontend
from tests.netns.rig import Answered, Process, Rig
from tests.netns.test_faults_agent import everywhere
from tests.netns.traffic import Traffic
from tests.netns.world import LOCAL_OUT, A, B, C

WEB = Svc("web", 70, [A, B])
EMPTY = Svc("empty", 71)
STICKY = Svc("sticky", 72, [A, B], spec={"sessionAffinity": "ClientIP"})
RANGED = Svc("ranged", 73, [A], spec={"loadBalancerSourceRanges": ["192.0.2.128/25", "2001:db8:2:1::/64"]})
LOCAL = Svc("local", 74, [A, B], spec=LOCAL_OUT | {"healthCheckNodePort": 32074})
SERVICES = (WEB, EMPTY, STICKY, RANGED, LOCAL)


def check_packets(rig: Rig, patience: float = 5.0) -> None:
    """Each kind of rule, within five seconds."""
    for family in BOTH:
        for client, address, port, expected in (
            (rig.pod, frontend(CLUSTER_IP, 70, family), 80, {"A", "B"}),
            (rig.outside, rig.n1.ip(family), 30070, {"A", "B"}),
            (rig.outside, frontend(VIP, 70, family), 80, {"A", "B"}),
            (rig.pod, frontend(CLUSTER_IP, 71, family), 80, {"refused"}),
            (rig.outside, rig.n1.ip(family), 30074, {"A"}),
            (rig.pod, frontend(CLUSTER_IP, 72, family), 80, None),
        ):
            if expected is not None:
                rig.until_asked(expected, address, port, client=client, patience=patience)
            else:
                assert len(rig.ask(address, port, client=client) & {"A", "B"}) == 1
    probes = [Probe(rig.outside.namespace, frontend(VIP, 73, family), 80, timeout=0.5) for family in BOTH]
    assert {answer.verdict for answer in run_probes(probes)} == {Verdict.DROPPED}


def same_rules(listed: str) -> list[str]:
    """A ruleset without the clients that it learned, in an order that restores may change."""
    listed = re.sub(r"elements = \{[^}]*\}", _sorted_elements, listed)
    return sorted(line.strip() for line in listed.splitlines() if " expires " not in line)


def _sorted_elements(found: re.Match[str]) -> str:
    return " ".join(sorted(re.split(r",\s+", re.sub(r"^elements = \{\s*|\s*\}$", "", found[0]))))


DAMAGES = {
    "everything flushed": "flush ruleset",
    "both tables deleted": "delete table ip rulecast; delete table ip6 rulecast",
    "one table deleted": "delete table ip rulecast",
    "a table flushed": "flush table ip6 rulecast",
    "a map flushed": "flush map ip rulecast services; flush map ip6 rulecast services",
    "endpoints flushed": "flush map ip rulecast endpoints-tcp",
    "the set of refusing services flushed": "flush map ip6 rulecast no-endpoint-services",
    "an element deleted": "delete element ip rulecast services { 10.96.0.70 . tcp . 80 }",
    "an element changed": (
        "delete element ip rulecast services { 10.96.0.70 . tcp . 80 }; "
        "add element ip rulecast services { 10.96.0.70 . tcp . 80 : drop }"
    ),
    "a hooked chain flushed": "flush chain ip rulecast nat-prerouting",
    "a hooked chain deleted": (
        "delete chain ip6 rulecast nat-output; delete chain ip6 rulecast nat-prerouting"
    ),
    "a chain flushed": "flush chain ip rulecast cluster-ip-tcp-2",
    "a rule added": "insert rule ip rulecast nat-prerouting meta l4proto tcp return",
    "the masquerading flushed": "flush chain ip rulecast nat-postrouting",
}


class TestOthers:
    """kubernetes/kubernetes#81517 and #129128."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def line(cls, rig: Rig) -> None:
        rig.write(*SERVICES)
        rig.server()
        rig.agent()
        rig.until_programmed()
        check_packets(rig)

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
    def test_what_others_take_away_comes_back(self, rig: Rig, damage: str) -> None:
        before, drift = same_rules(rig.ruleset()), rig.metric("rulecast_agent_drift_total")
        rig.n1.namespace.run("nft", damage)
        check_packets(rig)
        rig.eventually(lambda: rig.metric("rulecast_agent_drift_total") > drift, 5.0)
        assert same_rules(rig.ruleset()) == before

    def test_what_others_do_to_their_own_is_nothing_to_us(self, rig: Rig) -> None:
        drift = rig.metric("rulecast_agent_drift_total")
        with Traffic(everywhere(rig)) as traffic:
            for _ in range(30):
                rig.n1.namespace.run(
                    "nft", "add table inet mine; add chain inet mine c; flush table inet mine"
                )
            rig.n1.namespace.run("nft", "delete table inet mine")
            rig.apply(WEB, LOCAL)
            rig.apply(*SERVICES)
        traffic.check()
        assert rig.metric("rulecast_agent_drift_total") == drift


class Nft:
    """An nft before the real one on the PATH, which refuses what it is told to."""

    SCRIPT = """#!/bin/sh
if [ -e {directory}/fail ]; then cat {directory}/fail >&2; exit 1; fi
if [ -e {directory}/refuse ]; then
    text=$(cat)
    if printf '%s\\n' "$text" | grep -q -f {directory}/refuse; then
        echo 'Error: Could not process rule: Too many links' >&2
        exit 1
    fi
    printf '%s\\n' "$text" | {real} "$@"
    exit
fi
exec {real} "$@"
"""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        self.path = f"{directory}:{os.environ['PATH']}"
        self._fail, self._refuse = directory / "fail", directory / "refuse"
        (directory / "nft").write_text(self.SCRIPT.format(directory=directory, real=shutil.which("nft")))
        (directory / "nft").chmod(0o755)

    def fail(self, words: str) -> None:
        """Fail always."""
        self._fail.write_text(words + "\n")

    def refuse(self, pattern: str) -> None:
        """Refuse scripts that have this."""
        self._refuse.write_text(pattern + "\n")

    def work(self) -> None:
        self._fail.unlink(missing_ok=True)
        self._refuse.unlink(missing_ok=True)


class TestRefusals:
    """kubernetes/kubernetes#24357 and #139515: what the kernel does not take holds up nothing else."""

    @pytest.fixture(scope="class")
    @classmethod
    def nft(cls, rig: Rig) -> Nft:
        return Nft(rig.directory / "bin")

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def agent(cls, rig: Rig, nft: Nft) -> Process:
        rig.write(WEB, LOCAL)
        rig.server()
        agent = rig.agent("--sync-period", "1s", path=nft.path)
        rig.until_programmed()
        rig.until_connected()
        return agent

    def test_a_refused_service_is_told_and_all_others_work(self, rig: Rig, nft: Nft, agent: Process) -> None:
        nft.refuse("sticky")
        with Traffic(everywhere(rig)) as traffic:
            rig.apply(WEB, LOCAL, STICKY, Svc("late", 75, [A, B, C]))
            for family in BOTH:
                rig.until_asked({"A", "B", "C"}, frontend(CLUSTER_IP, 75, family))
                assert rig.ask(frontend(CLUSTER_IP, 72, family), times=1) == {"dropped"}
            assert rig.metric("rulecast_agent_services_in_error") == 4
            for port in "tu":
                agent.until_logged(f"service port default/sticky:{port}")
            named = [each for each in rig.agents()[0]["errors"] if "sticky" in str(each)]
            assert len(named) == 4
            assert "Too many links" in str(named[0])
            assert rig.healthz().status == 200
            # Others go on changing while it is tried again and again.
            rig.apply(WEB, LOCAL, STICKY, EMPTY)
            rig.until_asked({"refused"}, frontend(CLUSTER_IP, 71, Family.IPV4))
            nft.work()
            for family in BOTH:
                address = frontend(CLUSTER_IP, 72, family)
                assert len(self.settled(rig, address)) == 1
            assert rig.metric("rulecast_agent_services_in_error") == 0
            assert rig.agents()[0]["errors"] == []
        traffic.check()

    def asked(self, rig: Rig) -> Answered:
        return rig.get("/", address=rig.n1.ip(), port=32074)

    def settled(self, rig: Rig, address: str) -> set[str]:
        seen: list[set[str]] = [set()]

        def reached() -> bool:
            seen[0] = rig.ask(address)
            return seen[0] <= {"A", "B"}

        rig.eventually(reached, 5.0)
        return seen[0]

    def test_a_service_refused_at_the_start_is_told_and_all_others_work(
        self, rig: Rig, nft: Nft, agent
    ) -> None:
        agent.kill()
        rig.n1.namespace.run("nft", "flush ruleset")
        nft.refuse("sticky")
        rig.write(WEB, LOCAL, STICKY)
        again = rig.agent("--sync-period", "1s", path=nft.path)
        rig.until_programmed()
        assert rig.ask(frontend(CLUSTER_IP, 70, Family.IPV6), times=25) == {"A", "B"}
        again.until_logged("default/sticky:t")
        nft.work()
        assert len(self.settled(rig, frontend(CLUSTER_IP, 72, Family.IPV4))) == 1

    @pytest.mark.parametrize("words", ["Operation not permitted", "Cannot allocate memory"])
    def test_while_nothing_can_be_written_the_old_state_works_and_health_tells(
        self, rig: Rig, nft: Nft, words: str
    ) -> None:
        """kubernetes/kubernetes#115825 and #111661."""
        rig.apply(WEB, LOCAL)
        assert self.asked(rig).status == 200
        failures = rig.metric("kubeproxy_sync_proxy_rules_nftables_sync_failures_total")
        nft.fail(f"Error: Could not process rule: {words}")
        with Traffic(everywhere(rig)) as traffic:
            rig.write(WEB, LOCAL, STICKY)
            rig.eventually(lambda: rig.healthz().status == 503, 8.0)
            assert rig.get("/livez").status == 503
            assert words in rig.healthz().text
            assert self.asked(rig).status == 503
            assert self.asked(rig).json["serviceProxyHealthy"] is False
            assert rig.metric("kubeproxy_sync_proxy_rules_nftables_sync_failures_total") > failures
            assert words in rig.agents()[0]["nodeError"]
            nft.work()
            rig.until_programmed(patience=5.0)
            rig.eventually(lambda: rig.healthz().status == 200, 5.0)
            assert self.asked(rig).status == 200
        traffic.check()
        assert len(self.settled(rig, frontend(CLUSTER_IP, 72, Family.IPV6))) == 1
        rig.eventually(lambda: rig.agents()[0]["nodeError"] == "", 5.0)

    def test_rules_that_are_flushed_while_nothing_can_be_written_come_back_later(
        self, rig: Rig, nft: Nft
    ) -> None:
        rig.apply(WEB, LOCAL, STICKY)
        before = same_rules(rig.ruleset())
        nft.fail("Error: Could not process rule: Cannot allocate memory")
        rig.n1.namespace.run("nft", "flush ruleset")
        rig.eventually(lambda: rig.healthz().status == 503, 8.0)
        nft.work()
        rig.until_programmed(patience=5.0)
        assert same_rules(rig.ruleset()) == before
        rig.eventually(lambda: rig.healthz().status == 200, 5.0)

    def test_a_service_refused_while_flushed_rules_come_back_is_told_and_tried_again(
        self, rig: Rig, nft: Nft
    ) -> None:
        rig.apply(WEB, LOCAL, STICKY)
        before = same_rules(rig.ruleset())
        nft.refuse("sticky")
        rig.n1.namespace.run("nft", "flush ruleset")
        rig.until_programmed(patience=5.0)
        rig.eventually(lambda: rig.metric("rulecast_agent_services_in_error") == 4, 5.0)
        assert len(rig.agents()[0]["errors"]) == 4
        nft.work()
        rig.eventually(lambda: rig.metric("rulecast_agent_services_in_error") == 0, 5.0)
        assert same_rules(rig.ruleset()) == before
