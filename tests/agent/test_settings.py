"""The agent's command line: what is accepted, what is refused and how."""

from pathlib import Path

import pytest

from rulecast.errors import UsageError
from rulecast.flags import HostPort
from rulecast.model import Family
from rulecast_agent.settings import DetectLocalMode, duration, parse

BASE = ["--server", "s:9443", "--insecure"]
ENVIRONMENT = {"NODE_NAME": "n1"}


def refused(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse([*argv], ENVIRONMENT)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_defaults_are_kube_proxys() -> None:
    settings = parse(BASE, ENVIRONMENT)
    assert settings.mode == "nftables"
    assert settings.nodeport_addresses is None
    assert settings.masquerade_bit == 14
    assert settings.http == HostPort("0.0.0.0", 10256)
    assert settings.sync_period == 30
    assert settings.detection.mode is DetectLocalMode.CLUSTER_CIDR
    assert settings.conntrack.max_per_core == 32768
    assert settings.conntrack.minimum == 131072
    assert settings.conntrack.tcp_timeout_established == 86400
    assert settings.conntrack.tcp_timeout_close_wait == 3600


@pytest.mark.parametrize(
    ("argv", "environment", "name"),
    [
        (["--node-name", "N1.Example"], {"NODE_NAME": "other"}, "N1.Example"),
        ([], {"NODE_NAME": "Upper.From.Env"}, "Upper.From.Env"),
        ([], {"NODE_NAME": ""}, "host.example"),
        ([], {}, "host.example"),
    ],
)
def test_a_name_that_was_chosen_is_verbatim_and_only_the_host_name_is_lowered(
    argv: list[str], environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Host.EXAMPLE")
    assert parse([*BASE, *argv], environment).node_name == name


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["--server", "--standalone"]),
        (["--server", "", "--insecure"], ["--server"]),
        (["--server", "s:9443,", "--insecure"], ["--server"]),
        (["--server", "s", "--insecure"], ["--server", "'s'"]),
        (["--server", ":9443", "--insecure"], ["--server", "':9443'"]),
        (["--server", "s:0", "--insecure"], ["--server", "'s:0'"]),
        (["--server", "s:9443"], ["--tls-cert", "--tls-key", "--tls-ca", "--insecure"]),
        (["--server", "s:9443", "--standalone"], ["--standalone", "--server"]),
        ([*BASE, "--tls-server-name", "x"], ["--insecure", "--tls-server-name"]),
        ([*BASE, "--tls-ca", "/no/such"], ["--tls-ca", "/no/such"]),
        ([*BASE, "--mode", "ebpf"], ["--mode", "ebpf"]),
        ([*BASE, "--node-name", ""], ["--node-name"]),
        ([*BASE, "--node-name", "a/b"], ["--node-name", "a/b"]),
        ([*BASE, "--cluster-cidr", "10.0.0.0/99"], ["--cluster-cidr", "10.0.0.0/99"]),
        ([*BASE, "--cluster-cidr", "10.0.0.0"], ["--cluster-cidr", "10.0.0.0"]),
        ([*BASE, "--nodeport-addresses", "all"], ["--nodeport-addresses", "all"]),
        ([*BASE, "--nodeport-addresses", "primary,10.0.0.0/8"], ["--nodeport-addresses", "primary"]),
        ([*BASE, "--masquerade-bit", "32"], ["--masquerade-bit", "32"]),
        ([*BASE, "--masquerade-bit", "-1"], ["--masquerade-bit", "-1"]),
        ([*BASE, "--detect-local-mode", "Guess"], ["--detect-local-mode", "Guess"]),
        ([*BASE, "--detect-local-mode", "BridgeInterface"], ["--pod-bridge-interface"]),
        ([*BASE, "--detect-local-mode", "InterfaceNamePrefix"], ["--pod-interface-name-prefix"]),
        ([*BASE, "--pod-bridge-interface", "a b"], ["--pod-bridge-interface", "a b"]),
        ([*BASE, "--pod-bridge-interface", "x" * 16], ["--pod-bridge-interface"]),
        ([*BASE, "--http", "10256"], ["--http", "10256"]),
        ([*BASE, "--sync-period", "0s"], ["--sync-period", "0s"]),
        ([*BASE, "--sync-period", "1d"], ["--sync-period", "1d"]),
        ([*BASE, "--min-sync-period=-1s"], ["--min-sync-period", "-1s"]),
        ([*BASE, "--min-sync-period", "1h"], ["--min-sync-period", "--sync-period"]),
        ([*BASE, "--ipvs-mark-bit", "14"], ["--ipvs-mark-bit", "--masquerade-bit"]),
        ([*BASE, "--conntrack-min", "many"], ["--conntrack-min", "many"]),
        ([*BASE, "--conntrack-udp-timeout", "1x"], ["--conntrack-udp-timeout", "1x"]),
        ([*BASE, "--log-format", "xml"], ["--log-format", "xml"]),
        ([*BASE, "--state-dir", "/dev/null"], ["--state-dir", "/dev/null"]),
        ([*BASE, "--serv", "x:1"], ["--serv"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_one_line_that_names_the_flag(argv: list[str], words: list[str]) -> None:
    line = refused(*argv)
    for word in words:
        assert word in line


def test_tls_takes_three_files(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("cert", "key", "ca")}
    for path in files.values():
        path.write_text("x")
    flags = [text for name, path in files.items() for text in (f"--tls-{name}", str(path))]
    settings = parse(["--server", "s:1", *flags, "--tls-server-name", "rulecast"], ENVIRONMENT)
    assert settings.tls is not None
    assert (settings.tls.cert, settings.tls.key, settings.tls.ca) == tuple(files.values())
    assert settings.tls.server_name == "rulecast"
    assert "--tls-key" in refused("--server", "s:1", *flags[:2], *flags[4:])
    assert "--insecure" in refused("--server", "s:1", "--insecure", *flags)
    assert "--standalone" in refused("--standalone", *flags)


def test_standalone_needs_neither_server_nor_tls() -> None:
    settings = parse(["--standalone"], ENVIRONMENT)
    assert settings.standalone
    assert settings.servers == ()
    assert settings.tls is None


def test_servers_are_a_list_without_duplicates() -> None:
    settings = parse(["--server", "a:1,[2001:db8::1]:2, a:1", "--insecure"], ENVIRONMENT)
    assert settings.servers == (HostPort("a", 1), HostPort("2001:db8::1", 2))


def test_only_the_first_cidr_of_a_family_is_used_and_the_others_are_told() -> None:
    settings = parse([*BASE, "--cluster-cidr", "10.1.0.0/16,fd00::/48,10.2.0.0/16"], ENVIRONMENT)
    assert settings.detection.cluster_cidrs == {Family.IPV4: "10.1.0.0/16", Family.IPV6: "fd00::/48"}
    (warning,) = settings.warnings
    assert "10.2.0.0/16" in warning


@pytest.mark.parametrize("flags", [[], ["--cluster-cidr", "10.0.0.0/8", "--pod-bridge-interface", "cni0"]])
def test_what_has_no_effect_is_told(flags: list[str]) -> None:
    assert len(parse([*BASE, *flags], ENVIRONMENT).warnings) == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("1m30s", 90), ("250ms", 0.25), ("1.5h", 5400), ("0", 0), ("45", 45), ("100us", 1e-4)],
)
def test_durations_are_gos(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


def test_cidrs_are_canonical_with_host_bits_cleared() -> None:
    settings = parse([*BASE, "--nodeport-addresses", "192.0.2.77/24, 2001:DB8::1/64"], ENVIRONMENT)
    assert settings.nodeport_addresses == ("192.0.2.0/24", "2001:db8::/64")
