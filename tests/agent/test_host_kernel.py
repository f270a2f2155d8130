"""The lock, the sysctls and the interface addresses."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyroute2 import netns

from rulecast.errors import UsageError
from rulecast.model import Family
from rulecast_agent.kernel import lock, sysctl
from rulecast_agent.kernel.addresses import InterfaceAddresses, list_addresses, supported_families
from rulecast_agent.settings import ConntrackSettings
from tests.agent.fakes import running, until


def test_a_second_agent_is_refused_with_one_line_that_names_the_first() -> None:
    name = b"\0rulecast-test-%d" % os.getpid()
    words = rf"another rulecast agent \(process {os.getpid()}\)"
    with lock.acquire(name), pytest.raises(UsageError, match=words):
        lock.acquire(name)
    lock.acquire(name).close()


def test_the_lock_goes_with_its_process_however_that_ends() -> None:
    name = f"rulecast-test-dead-{os.getpid()}"
    code = (
        f"from rulecast_agent.kernel import lock; held = lock.acquire(b'\\0{name}'); "
        "print('held', flush=True); input()"
    )
    paths = os.pathsep.join(str(Path(path).resolve()) for path in ("core", "agent"))
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match=f"process {holder.pid}"):
        lock.acquire(f"\0{name}".encode())
    holder.kill()
    holder.communicate()
    lock.acquire(f"\0{name}".encode()).close()


@pytest.mark.netns
def test_the_lock_is_one_a_network_namespace(namespace: str) -> None:
    name = b"\0rulecast-test-netns-%d" % os.getpid()
    with lock.acquire(name):
        netns.popns()
        try:
            lock.acquire(name).close()
        finally:
            netns.pushns(namespace)


class Proc:
    """A /proc/sys of plain files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.net = path / "net/netfilter"
        self.hash_size = path / "hashsize"

    def fill(self, **values: int) -> None:
        self.net.mkdir(parents=True, exist_ok=True)
        defaults = {
            "nf_conntrack_max": 1000,
            "nf_conntrack_tcp_timeout_established": 432000,
            "nf_conntrack_tcp_timeout_close_wait": 60,
            "nf_conntrack_tcp_be_liberal": 0,
            "nf_conntrack_udp_timeout": 30,
            "nf_conntrack_udp_timeout_stream": 120,
        }
        for name, value in (defaults | values).items():
            (self.net / name).write_text(f"{value}\n")
        self.hash_size.write_text("250\n")

    def apply(self, limits: ConntrackSettings, cpus: int = 2) -> tuple[list[str], bool]:
        return sysctl.apply(limits, proc=self.path, hash_size=self.hash_size, cpus=cpus)

    def read(self, name: str) -> int:
        return int((self.net / f"nf_conntrack_{name}").read_text())


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize(("cpus", "limit"), [(2, 131072), (16, 524288)])
def test_limits_and_timeouts_are_set_as_kube_proxy_does(proc: Proc, cpus: int, limit: int) -> None:
    proc.fill()
    assert proc.apply(ConntrackSettings(), cpus) == ([], True)
    assert proc.read("max") == limit
    assert int(proc.hash_size.read_text()) == limit // 4
    assert proc.read("tcp_timeout_established") == 86400
    assert proc.read("tcp_timeout_close_wait") == 3600
    assert proc.read("tcp_be_liberal") == 0
    assert proc.read("udp_timeout") == 30


def test_zero_leaves_what_the_host_has(proc: Proc) -> None:
    proc.fill()
    limits = ConntrackSettings(max_per_core=0, tcp_timeout_established=0, tcp_timeout_close_wait=0)
    assert proc.apply(limits) == ([], True)
    assert (proc.read("max"), proc.read("tcp_timeout_established")) == (1000, 432000)


def test_a_higher_limit_is_never_lowered(proc: Proc) -> None:
    proc.fill(nf_conntrack_max=999_999)
    proc.apply(ConntrackSettings())
    assert proc.read("max") == 999_999
    assert int(proc.hash_size.read_text()) == 250


def test_what_was_asked_for_is_set(proc: Proc) -> None:
    proc.fill()
    proc.apply(ConntrackSettings(tcp_be_liberal=True, udp_timeout=40, udp_timeout_stream=200))
    assert [proc.read(name) for name in ("tcp_be_liberal", "udp_timeout", "udp_timeout_stream")] == [
        1,
        40,
        200,
    ]


def test_what_cannot_be_set_is_told_and_the_rest_is_set(proc: Proc) -> None:
    proc.fill()
    (proc.net / "nf_conntrack_max").unlink()
    (proc.net / "nf_conntrack_max").mkdir()
    problems, present = proc.apply(ConntrackSettings())
    assert present
    (line,) = problems
    assert "nf_conntrack_max" in line
    assert "131072" in line
    assert proc.read("tcp_timeout_established") == 86400


def test_without_conntrack_there_is_nothing_to_set_yet(proc: Proc) -> None:
    assert proc.apply(ConntrackSettings()) == ([], False)


def ip(namespace: str, command: str) -> None:
    subprocess.run(["ip", "-n", namespace, *command.split()], check=True)


@pytest.mark.netns
def test_addresses_are_all_local_ones_but_those_of_ignored_interfaces(namespace: str) -> None:
    for command in (
        "link add d0 type veth peer name d0p",
        "link set d0 up",
        "addr add 192.0.2.11/24 dev d0",
        "addr add 192.0.2.12/32 peer 192.0.2.99/32 dev d0",
        "addr add 2001:db8::11/64 dev d0 nodad",
        "link add svc0 type veth peer name svc0p",
        "addr add 10.96.0.1/32 dev svc0",
    ):
        ip(namespace, command)
    found = {ip for ip in list_addresses(("svc0", "absent0")) if not ip.startswith("fe80")}
    assert found == {"127.0.0.1", "::1", "192.0.2.11", "192.0.2.12", "2001:db8::11"}


@pytest.mark.netns
@pytest.mark.asyncio
async def test_a_new_and_a_removed_address_are_noticed(namespace: str) -> None:
    changes: list[frozenset[str]] = []
    addresses = InterfaceAddresses()
    try:
        async with running(addresses.run(lambda: changes.append(frozenset(addresses.current)))):
            await asyncio.sleep(0)
            for command, present in (("add", True), ("del", False)):
                await asyncio.to_thread(ip, namespace, f"addr {command} 192.0.2.50/32 dev lo")
                await until(lambda p=present: bool(changes) and ("192.0.2.50" in changes[-1]) is p)
    finally:
        addresses.close()


def test_ipv4_is_always_supported() -> None:
    assert Family.IPV4 in supported_families()
