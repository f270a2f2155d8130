"""docker-compose.yml: valid, and what it starts works with the rights that it gives, in namespaces apart."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from rulecast.lab import Lab
from rulecast.lab.topology import Host
from tests.deploy import sandbox
from tests.deploy.images import stages
from tests.deploy.manifests import ROOT, Object
from tests.deploy.sandbox import Container, Mount

COMPOSE = ROOT / "docker-compose.yml"
SERVICES: dict[str, Object] = yaml.safe_load(COMPOSE.read_text())["services"]
VIP = "10.96.0.20"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_compose_itself_takes_the_file() -> None:
    done = subprocess.run(
        ["docker-compose", "-f", str(COMPOSE), "config", "-q"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_the_least_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["NET_ADMIN"] if name.startswith("n") else [])
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert "network_mode" not in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert service["build"]["target"] in stages()
    assert (ROOT / service["build"]["dockerfile"]).is_file()


class Composed:
    """The services, each in the namespace of a host of a lab."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.hosts: dict[str, Host] = {"server": lab.fabric, "n1": lab.nodes["n1"], "n2": lab.nodes["n2"]}
        self.hosts["load"] = self.hosts["server"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def up(self, name: str) -> None:
        """Start a service, once those that it depends on are healthy."""
        service = SERVICES[name]
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            self.wait_healthy(other)
        stage = stages()[service["build"]["target"]]
        container = Container(
            argv=service["command"],
            program=[_here(word) for word in _program(stage.entrypoint)],
            user=int(service.get("user", stage.user or "0").partition(":")[0]),
            capabilities=service.get("cap_add", ()),
            mounts=[self._mount(volume) for volume in service.get("volumes", ())],
            environment={**service.get("environment", {}), "PYTHONPATH": str(ROOT)},
            hosts={"server": str(self.lab.fabric.ip())},
        )
        namespace = self.hosts[name].namespace.name
        self.processes[name] = sandbox.start(container, namespace, self.directory / f"{name}.log")

    def wait_healthy(self, name: str) -> None:
        """By the service's own health check."""
        kind, *test = SERVICES[name]["healthcheck"]["test"]
        assert kind == "CMD"
        command = ["ip", "netns", "exec", self.hosts[name].namespace.name, *map(_here, test)]
        self.wait(lambda: subprocess.run(command, capture_output=True).returncode == 0, f"{name} healthy")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 60
        while not condition():
            ended = [name for name, each in self.processes.items() if each.poll() is not None]
            assert not ended, f"{ended} ended: {self.logs()}"
            assert time.monotonic() < end, f"{what}: {self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.directory.glob("*.log")
        )

    def _mount(self, volume: str) -> Mount:
        source, target, *mode = volume.split(":")
        if source.startswith("./"):
            path = ROOT / source
            assert path.exists()
        else:
            path = self.directory / source
            path.mkdir()
        return Mount(str(path), target, read_only=mode == ["ro"])


def _program(entrypoint) -> list[str]:
    # The console script of the image is the module here: it may not be on this machine's path.
    return ["/venv/bin/python", "-m", "rulecast.cli"] if "rulecast" in entrypoint[0] else list(entrypoint)


def _here(word: str) -> str:
    return sys.executable if word == "/venv/bin/python" else word


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    reason = sandbox.unavailable()
    if reason:
        pytest.skip(f"no overlay file system: {reason}")
    with Lab() as lab:
        for name, zone in (("n1", "za"), ("n2", "zb")):
            lab.add_node(name, zone=zone)
        composed = Composed(lab, tmp_path_factory.mktemp("compose"))
        try:
            for name in ("server", "n1", "n2"):
                composed.up(name)
            yield composed
        finally:
            for process in composed.processes.values():
                process.terminate()
                process.communicate(timeout=20)


@pytest.mark.netns
@pytest.mark.parametrize("name", ["n1", "n2"])
def test_agents_have_the_rules_of_the_examples_and_keep_their_state(composed: Composed, name: str) -> None:
    composed.wait_healthy(name)
    assert VIP in composed.hosts[name].namespace.run("nft", "list", "ruleset")
    composed.wait((composed.directory / name / "desired.checkpoint").exists, "the state on disk")
    assert "Traceback" not in composed.logs()


@pytest.mark.netns
def test_the_load_gets_in_sync_beside_them(composed: Composed) -> None:
    composed.up("load")
    log = composed.directory / "load.log"
    composed.wait(lambda: "seconds" in log.read_text(), "all in sync")
    (first, *_) = log.read_text().splitlines()
    assert json.loads(first)["bytes"] > 0
    process = composed.processes.pop("load")
    process.communicate()
    assert process.returncode == 0, log.read_text()
