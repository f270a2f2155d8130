"""Credentials: read anew when they change or are refused; bad ones told in one line; never in a log."""

import json
import os
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rulecast.errors import UsageError
from rulecast_server.kube.auth import ConfigError, in_cluster_loader, kubeconfig_loader
from rulecast_server.kube.client import ApiClient
from rulecast_server.kube.cluster import ClusterSource
from rulecast_server.kube.listwatch import WatchSettings
from rulecast_server.kube.open import open_source
from rulecast_server.settings import SourceSettings
from tests.fakes.apiserver import FakeApiServer
from tests.watch.harness import FAST, Object, eventually, kubeconfig, load_from, running, service

pytestmark = pytest.mark.asyncio

GOOD = kubeconfig("http://127.0.0.1:1")


def swap(path: Path, content: str) -> None:
    """Replace a file through a link, as the kubelet does in a mounted volume."""
    target = path.with_name(f"{path.name}.{time.monotonic_ns()}")
    target.write_text(content)
    link = path.with_name(f"{path.name}.new")
    link.symlink_to(target)
    os.replace(link, path)


async def source_from(path: Path, url: str, user: Object) -> ClusterSource:
    client = await ApiClient.connect(load_from(path, url, user))
    return ClusterSource(client, settings=WatchSettings(**FAST))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{ this is: [not yaml", ":1:"),
        ("a: 1\n---\nb: 2\n", ":2: expected a single document"),
        ("just text", "not a kubeconfig"),
        ("", "not a kubeconfig"),
        ({}, "current-context"),
        (GOOD | {"current-context": "elsewhere"}, "elsewhere"),
        (GOOD | {"clusters": []}, "it"),
        (GOOD | {"clusters": [{"name": "it", "cluster": {}}]}, "server"),
        (kubeconfig("ftp://x"), "ftp://x"),
        (GOOD | {"clusters": "x"}, "clusters"),
        (kubeconfig("https://127.0.0.1:1") | {"users": []}, "the context has no user"),
        (kubeconfig("http://127.0.0.1:1", {"tokenFile": "/does/not/exist"}), "/does/not/exist"),
        (kubeconfig("http://127.0.0.1:1", {"token": "a\nb"}), "control characters"),
        (kubeconfig("https://127.0.0.1:1", {"client-certificate-data": "!!!"}), ""),
        (kubeconfig("https://127.0.0.1:1", {"client-certificate": "/does/not/exist"}), "/does/not/exist"),
        (kubeconfig("http://127.0.0.1:1", {"exec": {"command": "false", "apiVersion": "v1"}}), "exec"),
        (kubeconfig("http://127.0.0.1:1", {"exec": {}}), "exec"),
        (kubeconfig("http://127.0.0.1:1", {"exec": {"command": "none", "apiVersion": "v1"}}), "No such file"),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value)[:0] or None,
)
async def test_a_bad_kubeconfig_is_one_line_that_names_the_file(
    tmp_path: Path, content: Any, words: str
) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        await ApiClient.connect(kubeconfig_loader(path))
    text = str(caught.value)
    assert str(path) in text
    assert words in text
    assert "\n" not in text


async def test_an_unknown_context_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(GOOD))
    with pytest.raises(ConfigError, match="nowhere"):
        await kubeconfig_loader(path, "nowhere")()


async def test_outside_a_cluster_without_flags_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="--kubeconfig") as caught:
        await open_source(SourceSettings())
    assert "\n" not in str(caught.value)


async def test_a_service_account_is_read_without_its_newline_and_again_when_it_rotates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "2001:db8::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    token, ca = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("one\n")
    ca.write_text(Authority(tmp_path, "cluster").ca.read_text())
    load = in_cluster_loader(str(token), str(ca))
    access = await load()
    assert (access.host, access.authorization) == ("https://[2001:db8::1]:443", "Bearer one")
    assert not access.due(time.time())
    swap(token, "two\n")
    assert access.due(time.time())
    assert (await load()).authorization == "Bearer two"


@pytest.mark.parametrize("moment", ["before the old one ends", "after"])
async def test_a_rotated_token_file_is_used_and_no_change_is_missed(tmp_path: Path, moment: str) -> None:
    """kubernetes/kubernetes#77651: 401 until a restart, over stale rules."""
    token = tmp_path / "token"
    swap(token, "token-one\n")
    async with FakeApiServer() as api:
        api.token = "token-one"
        source = await source_from(tmp_path / "kubeconfig", api.url, {"tokenFile": "token"})
        async with running(source) as seen:
            await eventually(lambda: bool(seen.synced_after))
            if moment == "before the old one ends":
                swap(token, "token-two\n")
            api.token = "token-two"
            api.cut()
            api.put(service())
            if moment == "after":
                await eventually(lambda: source.status["services"].errors["401"] >= 2)
                assert any("401" in problem for problem in source.problems())
                assert not any("token-" in problem for problem in source.problems())
                swap(token, "token-two\n")
            await eventually(lambda: "web" in seen.names("services"))
            await eventually(lambda: source.problems() == [])
            assert api.counters["list services"] == 1
            assert ("401" in source.status["services"].errors) == (moment == "after")


async def test_a_broken_file_while_running_keeps_the_former_credentials_and_is_told(tmp_path: Path) -> None:
    async with FakeApiServer() as api:
        api.token = "t"
        path = tmp_path / "kubeconfig"
        source = await source_from(path, api.url, {"token": "t"})
        async with running(source) as seen:
            await eventually(lambda: bool(seen.synced_after))
            good = path.read_text()
            path.write_text("{ broken: [")
            api.cut()
            api.put(service())
            await eventually(lambda: "web" in seen.names("services"))
            assert any("kubeconfig:1" in problem for problem in source.problems())
            path.write_text(good)
            api.cut()
            await eventually(lambda: source.problems() == [])


async def test_an_exec_plugin_runs_again_when_its_token_is_refused(tmp_path: Path) -> None:
    plugin, runs = tmp_path / "plugin", tmp_path / "runs"
    (tmp_path / "now").write_text("token-one")
    head = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential"'
    plugin.write_text(
        f"""#!/bin/sh
echo run >> {runs}
printf '%s,"status":{{"token":"%s"}}}}' '{head}' "$(cat {tmp_path}/now)"
"""
    )
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}}
    async with FakeApiServer() as api:
        api.token = "token-one"
        source = await source_from(tmp_path / "kubeconfig", api.url, user)
        async with running(source) as seen:
            await eventually(lambda: bool(seen.synced_after))
            # Not for each request.
            assert runs.read_text().count("run") == 1
            api.token = "token-two"
            (tmp_path / "now").write_text("token-two")
            api.cut()
            api.put(service())
            await eventually(lambda: "web" in seen.names("services"))
            assert source.status["services"].errors["401"] == 0


async def test_an_exec_credential_that_ran_out_is_renewed_before_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    access = await load_from(path, "http://127.0.0.1:1", {"token": "t"})()
    import msgspec

    ran_out = msgspec.structs.replace(access, expires=1000.0)
    assert ran_out.due(1000.0)
    assert not ran_out.due(999.0)


async def test_no_secret_shows_when_credentials_are_printed(tmp_path: Path) -> None:
    access = await load_from(tmp_path / "kubeconfig", "http://127.0.0.1:1", {"token": "hush"})()
    assert access.authorization == "Bearer hush"
    assert "hush" not in f"{access} {access!r}"


class Authority:
    """A CA that signs for 127.0.0.1."""

    def __init__(self, directory: Path, name: str) -> None:
        self.ca, self._key = directory / f"{name}-ca.pem", directory / f"{name}-ca.key"
        self._directory, self._name = directory, name
        self._openssl("req", "-x509", *self._new(self._key), "-subj", f"/CN={name}", "-out", self.ca)

    def sign(self, name: str) -> tuple[Path, Path]:
        base = self._directory / f"{self._name}-{name}"
        cert, key, request, extra = (base.with_suffix(each) for each in (".pem", ".key", ".csr", ".ext"))
        extra.write_text("subjectAltName=IP:127.0.0.1\n")
        self._openssl("req", *self._new(key), "-subj", f"/CN={name}", "-out", request)
        signer = ("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial")
        self._openssl("x509", "-req", "-in", request, *signer, "-extfile", extra, "-out", cert)
        return cert, key

    def context(self) -> ssl.SSLContext:
        """For a server that wants client certificates of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.sign("server"))
        context.load_verify_locations(self.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _new(self, key: Path) -> tuple[str | Path, ...]:
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)

    def _openssl(self, *args: str | Path) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True, timeout=30)


async def test_a_new_ca_and_client_certificate_are_picked_up_with_new_connections(tmp_path: Path) -> None:
    """kubernetes/kops#16400, rancher/rke2#6212: certificates that were read once at the start."""
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    ca, cert, key = tmp_path / "ca", tmp_path / "cert", tmp_path / "key"

    def install(authority: Authority) -> None:
        swap(ca, authority.ca.read_text())
        client_cert, client_key = authority.sign("client")
        swap(cert, client_cert.read_text())
        swap(key, client_key.read_text())

    install(first)
    api = FakeApiServer()
    await api.start(tls=first.context())
    try:
        config = kubeconfig(api.url, {"client-certificate": "cert", "client-key": "key"})
        config["clusters"][0]["cluster"]["certificate-authority"] = "ca"
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        source = ClusterSource(
            await ApiClient.connect(kubeconfig_loader(path)), settings=WatchSettings(**FAST)
        )
        async with running(source) as seen:
            await eventually(lambda: bool(seen.synced_after))
            await api.stop()
            await api.start(port=api.port, tls=second.context())
            api.put(service())
            await eventually(lambda: any("certificate" in line.lower() for line in source.problems()))
            install(second)
            await eventually(lambda: "web" in seen.names("services"))
            await eventually(lambda: source.problems() == [])
    finally:
        await api.stop()
