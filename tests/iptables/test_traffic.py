"""The node's own packets through the rules."""

import re
import socket
import subprocess
from collections import Counter

import pytest

from rulecast_agent.kernel.iptables import Backend
from tests.iptables.conftest import Make
from tests.nftables.values import HOST, key, update, view

pytestmark = pytest.mark.netns
UDP = key(protocol="UDP")


@pytest.fixture
def network(namespace: str) -> None:
    """Whatever is sent leaves by a wire that nobody listens to."""
    for command in (
        "link set lo up",
        "link add out type veth peer name peer",
        "link set peer up",
        "link set out up",
        "addr add 192.168.9.1/24 dev out",
        "route add default via 192.168.9.2",
        "neigh add 192.168.9.2 lladdr 02:00:00:00:00:09 dev out",
    ):
        subprocess.run(["ip", *command.split()], check=True)


def translated(backend: Backend) -> Counter[str]:
    """New connections by endpoint, as the rules have counted them."""
    done = subprocess.run(
        [f"iptables-{backend}-save", "-c", "-t", "nat"], check=True, capture_output=True, text=True
    )
    found: Counter[str] = Counter()
    for count, target in re.findall(r"^\[(\d+):\d+\].*--to-destination (\S+)$", done.stdout, re.MULTILINE):
        found[target] += int(count)
    return found


def send(count: int, *, first_port: int = 20000) -> None:
    for port in range(first_port, first_port + count):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.bind(("", port))
            client.sendto(b"x", ("172.30.0.41", 80))


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("endpoints", [3, 32, 50], ids=["few", "one chain", "buckets"])
def test_new_connections_spread_evenly(make: Make, backend: Backend, endpoints: int) -> None:
    """Chi-square; an even spread fails it once in a million runs."""
    make().apply(update({UDP: view(UDP, *range(1, endpoints + 1))}, full=True), HOST)
    sent = 100 * endpoints
    send(sent)
    counts = translated(backend)
    assert len(counts) == endpoints
    assert counts.total() == sent
    statistic = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert statistic < limit(endpoints - 1)


def limit(freedom: int) -> float:
    """The chi-square quantile of one in a million (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + 4.7534 * part**0.5) ** 3)


@pytest.mark.usefixtures("network")
def test_a_client_with_affinity_stays_through_changes_and_restarts(make: Make, backend: Backend) -> None:
    sticky = view(UDP, *range(1, 9), affinity_seconds=60)
    first = make()
    first.apply(update({UDP: sticky}, full=True), HOST)
    send(1)
    (chosen,) = (+translated(backend)).keys()
    number = int(chosen.split(":")[0].rpartition(".")[2])
    # Others come and go, and so does the agent: a rule that is written anew counts from nothing.
    left = [each for each in range(2, 12) if each != number]
    first.apply(update({UDP: view(UDP, number, *left, affinity_seconds=60)}), HOST)
    make().apply(update({UDP: view(UDP, number, *left[1:], affinity_seconds=60)}, full=True), HOST)
    send(20, first_port=30000)
    assert +translated(backend) == {chosen: 20}
