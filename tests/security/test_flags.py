"""Flags of access: what contradicts itself is one clear line."""

from pathlib import Path

import pytest

from rulecast.errors import UsageError
from rulecast_agent import settings as agent
from rulecast_server import settings as server


@pytest.fixture
def names(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "file"
    file.touch()
    return {"FILE": str(file), "DIR": str(tmp_path)}


TLS = ("--tls-cert", "FILE", "--tls-key", "FILE")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--insecure", "--agent-auth", "token"), "tokens are secrets"),
        (("--agent-auth", "token"), "--tls-cert and --tls-key are required"),
        (TLS, "--client-ca are required"),
        ((*TLS, "--agent-auth", "token", "--manifests", "DIR"), "which --manifests has not"),
        (("--insecure", "--agent-service-account", "agent"), "is not NAMESPACE/NAME"),
        (("--insecure", "--agent-service-account", "a/b,"), "empty part"),
        (("--insecure", "--token-audience", ""), "is not a name"),
        (("--insecure", "--max-streams-per-node", "0"), "not a number above 0"),
        (("--insecure", "--token-max-age", "-1"), "not a positive number"),
    ],
)
def test_server_flags_that_cannot_be(names: dict[str, str], flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        server.parse([names.get(flag, flag) for flag in flags])
    assert "\n" not in str(caught.value)


def test_tokens_need_no_certificates_of_agents(names: dict[str, str]) -> None:
    flags = [*TLS, "--agent-auth", "token", "--agent-service-account", "a/b,c/d.e"]
    access = server.parse([names.get(flag, flag) for flag in flags]).access
    assert access.agent_accounts == ("a/b", "c/d.e")


AGENT = ("--server", "h:1", "--node-name", "n1")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*AGENT, "--token-file", "FILE"), "--tls-ca required"),
        ((*AGENT, "--token-file", "FILE", "--insecure"), "--insecure excludes --token-file"),
        ((*AGENT, "--tls-ca", "FILE"), "--tls-cert, --tls-key required"),
        (
            (*AGENT, "--tls-ca", "FILE", "--token-file", "FILE", "--tls-cert", "FILE"),
            "--tls-key required",
        ),
        (("--standalone", "--token-file", "FILE"), "--token-file has no use with --standalone"),
        ((*AGENT, "--token-file", "/nowhere/token"), "/nowhere/token: No such file"),
    ],
)
def test_agent_flags_that_cannot_be(names: dict[str, str], flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        agent.parse([names.get(flag, flag) for flag in flags])


@pytest.mark.parametrize("more", [(), TLS], ids=["alone", "with a certificate"])
def test_a_token_and_a_ca_are_enough(names: dict[str, str], more: tuple[str, ...]) -> None:
    flags = (*AGENT, "--tls-ca", "FILE", "--token-file", "FILE", *more)
    tls = agent.parse([names.get(flag, flag) for flag in flags]).tls
    assert tls is not None
    assert tls.token == Path(names["FILE"])
    assert (tls.cert is None) == (not more)
