"""Connection-tracking limits and timeouts, set at start as kube-proxy sets them."""

import asyncio
import logging
import os
import subprocess
from pathlib import Path
from typing import Protocol

_LOG = logging.getLogger(__name__)
# A container's own is read-only; the host's can be mounted beside it (deploy/base/agent.yaml).
_PROC = Path(os.environ.get("RULECAST_PROC_SYS", "/proc/sys"))
_HASH_SIZE = Path("/sys/module/nf_conntrack/parameters/hashsize")


class Limits(Protocol):
    """What is to be set; times in seconds; 0 leaves what the host has."""

    @property
    def max_per_core(self) -> int:
        """Tracked connections per CPU."""
        ...

    @property
    def minimum(self) -> int:
        """Least number of tracked connections, whatever the number of CPUs."""
        ...

    @property
    def tcp_timeout_established(self) -> float: ...

    @property
    def tcp_timeout_close_wait(self) -> float: ...

    @property
    def tcp_be_liberal(self) -> bool: ...

    @property
    def udp_timeout(self) -> float: ...

    @property
    def udp_timeout_stream(self) -> float: ...


def apply(
    limits: Limits, *, proc: Path = _PROC, hash_size: Path = _HASH_SIZE, cpus: int | None = None
) -> tuple[list[str], bool]:
    """Set what differs. Gives a line for each thing that could not be set, and whether conntrack is there.

    Nothing here is worth not starting for: /proc is read-only in many containers, and nf_conntrack_max can
    be set only in the host's own network namespace. The limit is raised and never lowered (kube-proxy lowers
    it): to lower it below what is in use drops connections.
    """
    net = proc / "net/netfilter"
    if not net.is_dir():
        return [], False
    problems: list[str] = []
    if limits.max_per_core > 0:
        wanted = max(limits.max_per_core * (cpus or os.cpu_count() or 1), limits.minimum)
        if _raise_to(net / "nf_conntrack_max", wanted, problems):
            # The kernel's own ratio; a longer chain a bucket makes each packet's lookup slower.
            _raise_to(hash_size, wanted // 4, problems)
    for name, value in (
        ("nf_conntrack_tcp_timeout_established", int(limits.tcp_timeout_established)),
        ("nf_conntrack_tcp_timeout_close_wait", int(limits.tcp_timeout_close_wait)),
        ("nf_conntrack_tcp_be_liberal", int(limits.tcp_be_liberal)),
        ("nf_conntrack_udp_timeout", int(limits.udp_timeout)),
        ("nf_conntrack_udp_timeout_stream", int(limits.udp_timeout_stream)),
    ):
        if value > 0:
            _write(net / name, value, problems)
    return problems, True


async def keep(limits: Limits, *, interval: float = 5.0) -> None:
    """Apply once conntrack is there; the first NAT rule loads it. Returns when done."""
    while True:
        problems, present = apply(limits)
        if present:
            break
        await asyncio.sleep(interval)
    for line in problems:
        _LOG.warning("%s", line)
    if _read(_PROC / "net/ipv4/ip_forward") == 0:
        _LOG.warning("net.ipv4.ip_forward is 0: this node forwards nothing to pods (not changed here)")


_IPVS = (
    ("net/ipv4/vs/conntrack", 1),
    ("net/ipv4/vs/expire_nodest_conn", 1),
    ("net/ipv4/vs/expire_quiescent_template", 1),
)
_STRICT_ARP = (("net/ipv4/conf/all/arp_ignore", 1), ("net/ipv4/conf/all/arp_announce", 2))


def set_ipvs(*, strict_arp: bool, proc: Path = _PROC, release: str | None = None) -> list[str]:
    """Set what the IPVS mode cannot do without, as kube-proxy does; a line for each that could not be set."""
    problems: list[str] = []
    wanted = [*_IPVS, *(_STRICT_ARP if strict_arp else ())]
    version = tuple(int(part) for part in (release or os.uname().release).split("-")[0].split(".")[:2])
    if version < (5, 9):
        # Else a client that uses its port again waits for a second (kubernetes/kubernetes#81775).
        wanted.append(("net/ipv4/vs/conn_reuse_mode", 0))
    for name, value in wanted:
        _write(proc / name, value, problems)
    return problems


def load_module(name: str) -> bool:
    """Ask for a kernel module; whether it is there then."""
    try:
        done = subprocess.run(["modprobe", name], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def tcp_be_liberal(*, proc: Path = _PROC) -> bool:
    """Whether conntrack lets pass TCP segments that it cannot follow."""
    return bool(_read(proc / "net/netfilter/nf_conntrack_tcp_be_liberal"))


def allow_route_localnet(*, proc: Path = _PROC) -> None:
    """Let translated packets leave with a loopback source, as node ports on 127.0.0.1 need."""
    problems: list[str] = []
    _write(proc / "net/ipv4/conf/all/route_localnet", 1, problems)
    for line in problems:
        _LOG.warning("%s", line)


def route_localnet(*, proc: Path = _PROC) -> bool:
    """Whether packets for loopback addresses are taken from the wire."""
    return bool(_read(proc / "net/ipv4/conf/all/route_localnet"))


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _write(path: Path, value: int, problems: list[str]) -> None:
    current = _read(path)
    if current == value:
        return
    try:
        path.write_text(str(value))
    except OSError as error:
        problems.append(f"{path} stays {current}, wanted {value}: {error.strerror}")


def _raise_to(path: Path, value: int, problems: list[str]) -> bool:
    """Whether it had to be raised."""
    current = _read(path)
    if current is not None and current >= value:
        return False
    _write(path, value, problems)
    return True
