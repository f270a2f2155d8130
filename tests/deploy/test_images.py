"""The images: pinned, small in rights, and with the programs that are called in them."""

import re
from pathlib import Path

import pytest

from tests.deploy.images import arguments, stages
from tests.deploy.manifests import DEPLOY, KUBECTL, ROOT, choices, pods, render

STAGES = stages()


def test_the_base_is_pinned_and_the_only_one() -> None:
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", arguments()["BASE"])
    assert {stage.base for stage in STAGES.values()} == {"${BASE}"}


@pytest.mark.parametrize("target", ["server", "load"])
def test_what_needs_no_rights_is_nobody_in_particular(target: str) -> None:
    assert STAGES[target].user == "65532:65532"


@pytest.mark.parametrize("target", ["server", "agent"])
def test_the_entry_point_is_the_command(target: str) -> None:
    assert list(STAGES[target].entrypoint) == ["/venv/bin/rulecast"]
    assert list(STAGES[target].command) == [target]


@pytest.mark.parametrize(
    ("target", "programs"),
    [("server", {"openssl"}), ("agent", {"nftables", "iptables", "kmod"})],
)
def test_programs_that_are_called_are_installed(target: str, programs: set[str]) -> None:
    (run,) = STAGES[target].runs
    assert "--no-install-recommends" in run
    assert run.endswith("rm -rf /var/lib/apt/lists/*")
    assert programs <= set(run.split())
    others = {"nftables", "iptables", "gcc", "git", "curl"} - programs
    assert target != "server" or others.isdisjoint(run.split())


def test_what_is_installed_is_what_the_lock_says() -> None:
    (run,) = STAGES["build"].runs
    assert "pip install -c requirements.lock ." in run
    locked = (ROOT / "requirements.lock").read_text().splitlines()
    assert all("==" in line for line in locked if line and not line.lstrip().startswith("#"))


def test_all_that_is_copied_is_there_and_not_ignored() -> None:
    let_in = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for stage in STAGES.values():
        for *sources, _ in stage.copies:
            if not sources[0].startswith("--from="):
                assert set(sources) <= let_in
                assert all((ROOT / source).exists() for source in sources)
    for name in let_in:
        assert (ROOT / name).exists()


@pytest.mark.skipif(KUBECTL is None, reason="kubectl, which renders deploy/, is not installed")
def test_manifests_run_images_that_are_built_here() -> None:
    for components in choices():
        for _, pod in pods(render(*components)):
            for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
                repository, _, target = container["image"].partition(":")[0].partition("/")
                assert repository == "rulecast"
                assert target in STAGES
                command = container.get("args", [""])[0]
                assert command in {"server": ("server", "certs"), "agent": ("agent", "")}[target]


def test_nothing_secret_or_large_goes_into_a_build() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    assert not any(Path(line[1:]).name.startswith(".") for line in lines if line.startswith("!"))
