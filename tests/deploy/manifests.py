"""What `kubectl apply -k` would send: deploy/ rendered, with one choice of components or another."""

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MODES = ("nftables", "iptables", "ipvs")
CERTS = ("self-signed", "cert-manager")
OTHERS = ("monitoring", "node-by-node")
KUBECTL = shutil.which("kubectl")
KINDS_OF_OTHERS = ("cert-manager.io", "monitoring.coreos.com")
"""Groups that a plain API server does not know."""


@functools.cache
def render(*components: str) -> tuple[Object, ...]:
    """The objects; without components, what deploy/kustomization.yaml itself chooses."""
    if not components:
        return _kustomize(DEPLOY)
    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent) / "deploy"
        shutil.copytree(DEPLOY, copy)
        path = copy / "kustomization.yaml"
        content = yaml.safe_load(path.read_text())
        content["components"] = [f"components/{name}" for name in components]
        path.write_text(yaml.safe_dump(content))
        return _kustomize(copy)


def choices() -> list[tuple[str, ...]]:
    """Every combination of one mode and one source of certificates, with all else there is."""
    return [(f"mode-{mode}", f"certs-{certs}", *OTHERS) for mode in MODES for certs in CERTS]


def find(objects: Sequence[Object], kind: str, name: str) -> Object:
    """The one object of this kind and name."""
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pods(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """`Kind/name` and the pod template of each workload."""
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        if "template" in spec:
            yield f"{each['kind']}/{each['metadata']['name']}", spec["template"]


def arguments(container: Object, environment: dict[str, str]) -> list[str]:
    """The arguments as kubelet passes them, `$(NAME)` replaced."""
    found = []
    for argument in container["args"]:
        for name, value in environment.items():
            argument = argument.replace(f"$({name})", value)
        assert "$(" not in argument
        found.append(argument)
    return found


def cluster_environment(objects: Sequence[Object]) -> dict[str, str]:
    """What cluster.env gives to every container."""
    (config,) = (
        each
        for each in objects
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith("rulecast-cluster-")
    )
    return dict(config["data"])


def _kustomize(directory: Path) -> tuple[Object, ...]:
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))
