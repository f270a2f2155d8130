"""The flags by which an agent finds its servers."""

from pathlib import Path

import pytest

from rulecast.errors import UsageError
from rulecast.flags import HostPort
from rulecast_agent.settings import AgentSettings, parse

SERVICE = ["--server-service", "rulecast/rulecast-server"]


class Files:
    """What kubelet mounts, and the flags that name it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("token", "ca.crt"):
            (directory / name).write_text("x")
        self.flags = [*SERVICE, "--apiserver-credentials", str(directory), "--state-dir", str(directory)]
        self.flags += ["--tls-ca", str(directory / "ca.crt"), "--token-file", str(directory / "token")]

    def parse(self, *more: str, **environment: str) -> AgentSettings:
        return parse([*self.flags, *more, "--cluster-cidr", "10.0.0.0/8"], {"NODE_NAME": "n1", **environment})

    def refused(self, *more: str, **environment: str) -> str:
        with pytest.raises(UsageError) as caught:
            self.parse(*more, **environment)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize(
    ("host", "wanted"), [("192.0.2.1", "192.0.2.1"), ("fd00::1", "fd00::1"), ("cp.example", "cp.example")]
)
def test_the_apiserver_is_the_one_that_every_pod_knows(files: Files, host: str, wanted: str) -> None:
    settings = files.parse(KUBERNETES_SERVICE_HOST=host, KUBERNETES_SERVICE_PORT="6443")
    assert settings.discovery is not None
    assert settings.discovery.apiservers == (HostPort(wanted, 6443),)
    assert settings.warnings == ()


def test_or_those_that_are_given(files: Files) -> None:
    settings = files.parse(
        "--apiserver", "192.0.2.1:6443,[fd00::1]:6443", KUBERNETES_SERVICE_HOST="10.96.0.1"
    )
    assert settings.discovery is not None
    assert settings.discovery.apiservers == (HostPort("192.0.2.1", 6443), HostPort("fd00::1", 6443))


def test_servers_have_the_name_of_their_service_whatever_their_address(files: Files) -> None:
    given = "--apiserver", "192.0.2.1:6443"
    for more, wanted in (((), "rulecast-server.rulecast.svc"), (("--tls-server-name", "x"), "x")):
        tls = files.parse(*given, *more).tls
        assert tls is not None
        assert tls.server_name == wanted


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--server", "s:9443"], ["--server-service", "--server"]),
        (["--standalone"], ["--standalone"]),
        (["--insecure"], ["--insecure"]),
        (["--server-service", "rulecast-server"], ["--server-service", "NAMESPACE/NAME"]),
        (["--server-service", "Rulecast/server"], ["--server-service"]),
        (["--apiserver", "192.0.2.1"], ["--apiserver"]),
        (
            ["--apiserver-credentials", "/does/not/exist"],
            ["--apiserver-credentials", "/does/not/exist/token"],
        ),
    ],
)
def test_what_contradicts_itself_is_one_line(files: Files, more: list[str], words: list[str]) -> None:
    line = files.refused(*more, KUBERNETES_SERVICE_HOST="192.0.2.1")
    for word in words:
        assert word in line


def test_nobody_to_ask_is_said_at_once(files: Files) -> None:
    assert "--apiserver" in files.refused()
    assert "KUBERNETES_SERVICE_HOST" in files.refused(
        KUBERNETES_SERVICE_HOST="a b", KUBERNETES_SERVICE_PORT="x"
    )


def test_apiserver_without_a_service_has_no_use() -> None:
    with pytest.raises(UsageError, match="--apiserver has no use"):
        parse(["--server", "s:9443", "--insecure", "--apiserver", "192.0.2.1:6443"], {"NODE_NAME": "n1"})


def test_no_place_for_the_addresses_is_warned_of(files: Files) -> None:
    at = files.flags.index("--state-dir")
    del files.flags[at : at + 2]
    assert any("--state-dir" in line for line in files.parse(KUBERNETES_SERVICE_HOST="192.0.2.1").warnings)
