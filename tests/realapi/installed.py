"""deploy/ on a real API server, and its containers as processes with the tokens that kubelet gives."""

import base64
import json
import os
import re
import subprocess
import time
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.deploy import sandbox
from tests.deploy.manifests import KUBECTL, Object, arguments, find, pods, render
from tests.deploy.sandbox import Container, Mount
from tests.realapi.control_plane import ApiServer, ControlPlane

SPACE = "/api/v1/namespaces/rulecast"
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_NOBODY = 65532


class Installation:
    """A control plane with the default choice of deploy/ in it."""

    def __init__(self, plane: ControlPlane, api: ApiServer, ca: Path) -> None:
        """`ca`: of the API server, whose certificate is for 127.0.0.1."""
        self.plane, self.api, self.ca = plane, api, ca
        self.objects = render()
        self.templates = dict(pods(self.objects))
        self.processes: list[Process] = []

    @property
    def port(self) -> str:
        return self.api.url.rpartition(":")[2]

    def kubectl(self, *argv: str, objects: tuple[Object, ...] = ()) -> str:
        """Run kubectl as the administrator, with objects on its standard input. Fails with what it says."""
        assert KUBECTL is not None
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}) if objects else ""
        command = [KUBECTL, "--kubeconfig", str(self.plane.kubeconfig(self.api)), *argv]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def token(self, account: str, *, pod: str = "", audience: str = "") -> str:
        """As the TokenRequest API gives it to kubelet."""
        spec: Object = {"audiences": [audience]} if audience else {}
        if pod:
            spec["boundObjectRef"] = {"kind": "Pod", "apiVersion": "v1", "name": pod}
        answer = self.api.request("POST", f"{SPACE}/serviceaccounts/{account}/token", {"spec": spec})
        return str(answer["status"]["token"])

    def add_pod(self, workload: str, node: str) -> str:
        """A pod of a template, as its controller and the scheduler would make it; returns its name."""
        template = json.loads(json.dumps(self.templates[workload]))
        template["spec"]["nodeName"] = node
        name = f"{workload.partition('/')[2]}-{node}"
        template["metadata"]["name"] = name
        self.api.request("POST", f"{SPACE}/pods", template)
        return name

    def account_files(self, directory: Path, account: str, **bound: str) -> Path:
        """What kubelet mounts of a ServiceAccount."""
        directory.mkdir()
        (directory / "token").write_text(self.token(account, **bound))
        (directory / "ca.crt").write_bytes(self.ca.read_bytes())
        (directory / "namespace").write_text("rulecast")
        return directory

    def secret_files(self, directory: Path, name: str) -> Path:
        """What kubelet mounts of a Secret."""
        directory.mkdir()
        data = self.api.request("GET", f"{SPACE}/secrets/{name}")["data"]
        for file, content in data.items():
            path = directory / file
            path.write_bytes(base64.b64decode(content))
            os.chown(path, 0, _NOBODY)
            path.chmod(0o440)
        return directory

    def start(self, workload: str, directory: Path, *more: str, **mounts: Path) -> "Process":
        """The container of a workload, as its manifest has it; `mounts`: volumes by their names."""
        spec = self.templates[workload]["spec"]
        (container,) = spec["containers"]
        account = self.account_files(directory / "account", spec["serviceAccountName"])
        points = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        found = [Mount(str(path), points[name], read_only=True) for name, path in mounts.items()]
        if "tmp" in points:
            temporary = directory / "tmp"
            temporary.mkdir()
            temporary.chmod(0o777)
            found.append(Mount(str(temporary), points["tmp"]))
        log = directory / "log"
        process = sandbox.start(
            Container(
                argv=[*arguments(container, {}), *more],
                user=spec["securityContext"]["runAsUser"],
                mounts=[*found, Mount(str(account), _ACCOUNT, read_only=True)],
                environment={"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": self.port},
            ),
            "",
            log,
        )
        self.processes.append(Process(process, log))
        return self.processes[-1]

    def role(self, kind: str, name: str) -> Object:
        """A copy of a role as deploy/ has it."""
        found: Object = json.loads(json.dumps(find(self.objects, kind, name)))
        return found

    def put_role(self, role: Object) -> None:
        """Replace a role, and wait until the authorizer has heard of it."""
        where = "" if role["kind"] == "ClusterRole" else "/namespaces/rulecast"
        path = f"/apis/rbac.authorization.k8s.io/v1{where}/{role['kind'].lower()}s/{role['metadata']['name']}"
        self.api.request("PUT", path, role)

    def allowed(self, account: str, **attributes: str) -> bool:
        """What the authorizer says of a ServiceAccount."""
        user = f"system:serviceaccount:rulecast:{account}"
        groups = ["system:serviceaccounts", "system:authenticated"]
        review = {"spec": {"user": user, "groups": groups, "resourceAttributes": attributes}}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(self.api.request("POST", path, review)["status"]["allowed"])

    def close(self) -> None:
        for process in self.processes:
            process.stop()


class Process:
    """One container's process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def until(self, pattern: str) -> "re.Match[str]":
        """Wait for words in the log."""
        found: list[re.Match[str]] = []

        def there() -> bool:
            match = re.search(pattern, self.log)
            found.extend([match] if match else [])
            return match is not None or self._process.poll() is not None

        wait(there, lambda: self.log)
        assert found, self.log
        return found[0]

    def ended(self) -> int:
        """Wait for the end; the exit code."""
        self._process.communicate(timeout=60)
        assert self._process.returncode is not None
        return self._process.returncode

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate(timeout=30)


def wait(condition: Callable[[], object], what: Callable[[], object], within: float = 60.0) -> None:
    """Return once the condition holds."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.1)


def refused(api: ApiServer, method: str, path: str, token: str, body: Mapping[str, Any] | None = None) -> int:
    """The status of a request with somebody's token; 0 for one that is not refused."""
    try:
        api.request(method, path, body, token=token)
    except urllib.error.HTTPError as error:
        return error.code
    return 0
