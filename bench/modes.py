"""What is compared: our modes, and kube-proxy's where `make conformance` has built it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from bench.process import Process

NODE = "node-0"
HEALTH = "http://127.0.0.1:10256/healthz"
_JUDGE = "kube-proxy-1.37.2"
_EMPTY_LEGACY = "".join(f"*{table}\nCOMMIT\n" for table in ("nat", "filter", "mangle"))


class Mode(NamedTuple):
    """One column."""

    ours: bool
    mechanism: str
    limit: int
    """Services beyond which its minutes are not worth it; what it then takes grows with the square."""
    flags: tuple[str, ...] = ()


MODES = {
    "nftables": Mode(True, "nftables", 50_000, ("--mode", "nftables")),
    "iptables-nft": Mode(True, "iptables-nft", 10_000, ("--mode", "iptables", "--iptables-backend", "nft")),
    "iptables-legacy": Mode(
        True, "iptables-legacy", 10_000, ("--mode", "iptables", "--iptables-backend", "legacy")
    ),
    "ipvs": Mode(True, "ipvs", 50_000, ("--mode", "ipvs")),
    "kube-proxy-nftables": Mode(False, "nftables", 10_000),
    "kube-proxy-iptables-nft": Mode(False, "iptables-nft", 1000),
    "kube-proxy-iptables-legacy": Mode(False, "iptables-legacy", 10_000),
}


def kube_proxy() -> Path | None:
    """The binary, if it was built: on PATH as KUBE_PROXY says, or in build/."""
    found = Path(os.environ.get("KUBE_PROXY", f"build/{_JUDGE}"))
    return found.absolute() if found.exists() else None


def start(mode: str, work: Path, *, api: str) -> Process:
    """The agent (of a server on 127.0.0.1:9443), or a kube-proxy that watches `api`."""
    made = MODES[mode]
    if made.ours:
        flags = ["--server", "127.0.0.1:9443", "--insecure", "--node-name", NODE, *made.flags]
        flags += ["--http", "127.0.0.1:10256", "--cluster-cidr", "10.0.0.0/8"]
        return Process(["rulecast.cli", "agent", *flags], log=work / "log")
    binary = kube_proxy()
    assert binary is not None
    config = work / "kube-proxy.json"
    pauses = {"minSyncPeriod": "100ms", "syncPeriod": "1h"}
    config.write_text(
        json.dumps(
            {
                "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
                "kind": "KubeProxyConfiguration",
                "mode": made.mechanism.partition("-")[0],
                "hostnameOverride": NODE,
                "clusterCIDR": "10.0.0.0/8",
                "clientConnection": {"contentType": "application/json"},
                "conntrack": {"maxPerCore": 0, "min": 0},
                "healthzBindAddress": "127.0.0.1:10256",
                "iptables": pauses,
                "nftables": pauses,
            }
        )
    )
    argv = [str(binary), f"--config={config}", f"--master={api}"]
    environment = dict(os.environ)
    if made.mechanism == "iptables-legacy":
        environment["PATH"] = f"{_legacy_programs(work)}:{environment['PATH']}"
    return Process(argv, log=work / "log", program=True, environment=environment)


def clean(mode: str, work: Path) -> None:
    """Leave no rules of one run to the next. Only in a network namespace of our own."""
    if MODES[mode].ours:
        with (work / "log").open("ab") as log:
            subprocess.run([sys.executable, "-m", "rulecast.cli", "cleanup"], check=True, stdout=log)
    elif MODES[mode].mechanism == "iptables-legacy":
        for program in ("iptables-legacy-restore", "ip6tables-legacy-restore"):
            subprocess.run([program], input=_EMPTY_LEGACY, text=True, check=True)
    else:
        subprocess.run(["nft", "flush", "ruleset"], check=True)


def _legacy_programs(work: Path) -> Path:
    """A directory in which the iptables programs are the legacy ones."""
    made = work / "legacy"
    made.mkdir(exist_ok=True)
    for family in ("iptables", "ip6tables"):
        for name in (family, f"{family}-save", f"{family}-restore"):
            link = made / name
            if not link.is_symlink():
                link.symlink_to(shutil.which("xtables-legacy-multi") or "xtables-legacy-multi")
    return made
