"""etcd and kube-apiserver as processes on loopback, and the few requests that the tests make of them."""

import json
import os
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Object = dict[str, Any]
_TOKEN = "administrator"
_ETCD = "http://127.0.0.1:23790"
_PATHS = {
    "Service": ("/api/v1", "services"),
    "Node": ("/api/v1", "nodes"),
    "Namespace": ("/api/v1", "namespaces"),
    "EndpointSlice": ("/apis/discovery.k8s.io/v1", "endpointslices"),
}
_TLS = ssl.create_default_context()
_TLS.check_hostname = False
_TLS.verify_mode = ssl.CERT_NONE


class ApiServer:
    """One kube-apiserver on the common etcd."""

    def __init__(self, plane: "ControlPlane", port: int, *flags: str) -> None:
        self._plane, self._port, self._flags = plane, port, flags
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start, and wait until it is ready. Raises TimeoutError with the end of its log."""
        directory = self._plane.directory
        flags = [
            *("--etcd-servers", _ETCD, "--bind-address", "127.0.0.1", "--advertise-address", "10.255.0.1"),
            *("--secure-port", str(self._port), "--cert-dir", str(directory / f"certs-{self._port}")),
            *("--authorization-mode=Node,RBAC", "--token-auth-file", str(directory / "tokens.csv")),
            *("--service-account-key-file", str(directory / "sa.key")),
            *("--service-account-signing-key-file", str(directory / "sa.key")),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"),
            *("--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112", *self._flags),
        ]
        with (directory / f"apiserver-{self._port}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._plane.apiserver, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end = time.monotonic() + 90
        while True:
            try:
                self.request("GET", "/readyz")
            except (urllib.error.URLError, OSError):
                assert self._process.poll() is None, f"it ended: see {log.name}"
                if time.monotonic() > end:
                    raise TimeoutError(f"not ready: see {log.name}") from None
                time.sleep(0.2)
            else:
                return

    def stop(self) -> None:
        """SIGKILL: what a watch sees of a crash."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        kind: str = "application/json",
        *,
        token: str = _TOKEN,
    ) -> Object:
        """One request, as the administrator unless a token is given. Raises URLError."""
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind},
        )
        with urllib.request.urlopen(request, context=_TLS, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text[:1] == b"{" else {}

    def apply(self, objects: Iterable[Object]) -> None:
        """Create them, or replace those that are there."""
        self._each(self._apply, objects)

    def delete(self, objects: Iterable[Object]) -> None:
        """Delete them."""
        self._each(lambda item: self.request("DELETE", _path(item, named=True)), objects)

    def _apply(self, item: Object) -> None:
        try:
            self.request("POST", _path(item), item)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise AssertionError(f"{item}: {error.read().decode()}") from None
            self.request("PATCH", _path(item, named=True), item, kind="application/merge-patch+json")

    @staticmethod
    def _each(work: Any, objects: Iterable[Object]) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, objects))


class ControlPlane:
    """etcd, and a kubeconfig for whoever asks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.apiserver = os.environ["KUBE_APISERVER"]
        (directory / "tokens.csv").write_text(f'{_TOKEN},admin,admin,"system:masters"\n')
        subprocess.run(
            ["openssl", "genrsa", "-out", str(directory / "sa.key"), "2048"], check=True, capture_output=True
        )
        peer = "http://127.0.0.1:23791"
        flags = ["--data-dir", str(directory / "etcd"), "--listen-client-urls", _ETCD]
        flags += ["--advertise-client-urls", _ETCD, "--listen-peer-urls", peer]
        flags += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        with (directory / "etcd.log").open("ab") as log:
            self._etcd = subprocess.Popen(
                [os.environ["ETCD"], *flags, "--unsafe-no-fsync"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def compact(self) -> None:
        """Forget all history in etcd: older positions are then too old."""
        head = _etcd("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        _etcd("/v3/kv/compaction", {"revision": head, "physical": True})

    def kubeconfig(self, api: ApiServer) -> Path:
        """A file with which to watch `api`."""
        path = self.directory / f"kubeconfig-{api.url.rpartition(':')[2]}"
        cluster = {"server": api.url, "insecure-skip-tls-verify": True}
        content = {
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": _TOKEN}}],
        }
        path.write_text(json.dumps(content))
        return path

    def close(self) -> None:
        """End etcd."""
        self._etcd.kill()
        self._etcd.wait()


def _etcd(path: str, body: Object) -> Object:
    request = urllib.request.Request(_ETCD + path, data=json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: Object = json.loads(answer.read())
    return found


def _path(item: Object, *, named: bool = False) -> str:
    prefix, plural = _PATHS[item["kind"]]
    meta = item["metadata"]
    if namespace := meta.get("namespace"):
        prefix += f"/namespaces/{namespace}"
    return f"{prefix}/{plural}" + (f"/{meta['name']}" if named else "")
