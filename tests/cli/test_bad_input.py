"""Bad input on the command line gets one clear line on stderr and exit code 2, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def rulecast(*args: str, without_rights: bool = False) -> subprocess.CompletedProcess[str]:
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if without_rights else []
    return subprocess.run(
        [*drop, sys.executable, "-m", "rulecast.cli", *args],
        capture_output=True,
        text=True,
        timeout=30,
    )


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = result.stderr.splitlines()
    assert result.returncode == 2, result
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("rulecast: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ["command"]),
        (("serve",), ["serve"]),
        (("server",), ["--tls-cert", "--insecure"]),
        (("server", "--frobnicate"), ["--frobnicate"]),
        (("server", "--insecure", "--listen", "nonsense"), ["--listen", "nonsense"]),
        (("server", "--insecure", "--listen", "127.0.0.1:99999"), ["--listen", "99999"]),
        (("server", "--insecure", "--listen", "::1:9443"), ["--listen", "::1:9443"]),
        (("server", "--insecure", "--http", "[::1:9440"), ["--http"]),
        (("server", "--insecure", "--kubeconfig", "/does/not/exist"), ["/does/not/exist"]),
        (("server", "--insecure", "--manifests", "/does/not/exist"), ["/does/not/exist"]),
        (("server", "--insecure", "--tls-cert", "/does/not/exist"), ["/does/not/exist"]),
        (("server", "--insecure", "--mark-interval", "-1"), ["--mark-interval", "-1"]),
        (("server", "--insecure", "--mark-interval", "61"), ["--mark-interval", "61"]),
        (("agent",), ["--server"]),
        (("agent", "--insecure", "--server", ""), ["--server"]),
        (("agent", "--insecure", "--server", "h:1", "--mode", "ebpf"), ["--mode", "ebpf"]),
        (("agent", "--insecure", "--server", "h:1", "--cluster-cidr", "10.0.0.0/99"), ["--cluster-cidr"]),
        (("agent", "--insecure", "--server", "h:1", "--nodeport-addresses", "all"), ["--nodeport-addresses"]),
        (("agent", "--insecure", "--server", "h:1", "--masquerade-bit", "32"), ["--masquerade-bit"]),
        (("agent", "--insecure", "--server", "h:1", "--detect-local-mode", "Guess"), ["--detect-local-mode"]),
        (("agent", "--server", "h:1"), ["--insecure"]),
        (("cleanup", "--everything"), ["--everything"]),
        (("demo", "--fast"), ["--fast"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_command_line_is_one_line_that_names_the_flag(args: tuple[str, ...], words: list[str]) -> None:
    assert_refused(rulecast(*args), *words)


def test_a_kubeconfig_that_is_not_one_is_refused_by_name(tmp_path: Path) -> None:
    bad = tmp_path / "kubeconfig"
    bad.write_text("{ this is: [not yaml")
    assert_refused(
        rulecast("server", "--insecure", "--listen", "127.0.0.1:0", "--kubeconfig", str(bad)), str(bad)
    )


def test_a_broken_manifest_at_start_is_refused_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text("kind: Service\nmetadata:\n  name: [web\n")
    result = rulecast(
        "server",
        "--insecure",
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--manifests",
        str(tmp_path),
    )
    assert_refused(result, "web.yaml:4")


def test_a_tls_key_that_is_not_one_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("cert", "key", "ca"):
        (tmp_path / name).write_text("not PEM\n")
    result = rulecast(
        *("server", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--manifests", str(tmp_path)),
        *("--tls-cert", f"{tmp_path}/cert", "--tls-key", f"{tmp_path}/key", "--client-ca", f"{tmp_path}/ca"),
    )
    assert_refused(result, str(tmp_path))


def test_a_port_in_use_is_refused_with_its_address(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        grpc = rulecast(
            *("server", "--insecure", "--listen", address, "--http", "127.0.0.1:0"),
            *("--manifests", str(tmp_path)),
        )
        http = rulecast(
            *("server", "--insecure", "--listen", "127.0.0.1:0", "--http", address),
            *("--manifests", str(tmp_path)),
        )
    assert_refused(grpc, "--listen", address)
    assert_refused(http, "--http", address)


def test_help_lists_every_command() -> None:
    result = rulecast("--help")
    assert result.returncode == 0
    for command in ("server", "agent", "cleanup", "demo"):
        assert command in result.stdout


@pytest.mark.parametrize(
    ("command", "defaults"),
    [("server", ("0.0.0.0:9443", "0.0.0.0:9440", "90")), ("agent", ("0.0.0.0:10256", "30s", "24h"))],
)
def test_help_names_the_defaults(command: str, defaults: tuple[str, ...]) -> None:
    shown = rulecast(command, "--help").stdout
    assert [each for each in defaults if f"default {each}" not in shown] == []


@pytest.mark.parametrize(("mode", "words"), [("nftables", "not permitted"), ("iptables", "root")])
def test_an_agent_without_rights_is_refused_at_start_and_not_retried(mode: str, words: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give its rights away")
    result = rulecast(
        *("agent", "--server", "127.0.0.1:1", "--insecure", "--node-name", "n1", "--http", "127.0.0.1:0"),
        *("--mode", mode),
        without_rights=True,
    )
    assert_refused(result, mode, words)


@pytest.mark.skipif(Path("/proc/net/ip_vs").exists(), reason="this kernel has IPVS")
def test_a_mode_whose_kernel_part_is_missing_is_refused_by_the_name_of_the_module(tmp_path: Path) -> None:
    result = rulecast(
        *("agent", "--standalone", "--manifests", str(tmp_path), "--mode", "ipvs"),
        # Where the module can be loaded, the host must not be programmed for the test.
        without_rights=os.geteuid() == 0,
    )
    assert_refused(result, "--mode ipvs", "ip_vs")
