"""The node's own packets through the rules."""

import contextlib
import re
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.nftables.conftest import Make, listing
from tests.nftables.values import HOST, VIEWS, key, update, view

pytestmark = pytest.mark.netns


@pytest.fixture
def local_backends(namespace: str) -> None:
    """Backends and routes inside the one namespace: traffic of the node itself."""
    for command in (
        "link set lo up",
        "addr add 192.168.0.2/32 dev lo",
        "link add out type veth peer name peer",
        "link set peer up",
        "addr add 192.168.9.1/24 dev out",
        "link set out up",
        "route add default dev out",
        *(f"addr add 10.180.0.{i}/32 dev lo" for i in (1, 2, 3)),
    ):
        subprocess.run(["ip", *command.split()], check=True)


Listen = Callable[[int], list[socket.socket]]


@pytest.fixture
def listen(local_backends: None) -> Iterator[Listen]:
    """Opens the three backends' sockets; they are closed at the end."""
    made: list[socket.socket] = []

    def build(kind: int) -> list[socket.socket]:
        for i in (1, 2, 3):
            made.append(socket.socket(socket.AF_INET, kind))
            made[-1].bind((f"10.180.0.{i}", 8080))
            if kind == socket.SOCK_STREAM:
                made[-1].listen(64)
        return made

    yield build
    for server in made:
        server.close()


def connect(address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=2):
        pass


def accepted(servers: list[socket.socket]) -> list[int]:
    counts = []
    for server in servers:
        server.setblocking(False)
        count = 0
        while True:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                break
            count += 1
        counts.append(count)
    return counts


def test_tcp_reaches_every_endpoint(make: Make, listen: Listen) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    servers = listen(socket.SOCK_STREAM)
    for _ in range(60):
        connect("172.30.0.41", 80)
    counts = accepted(servers)
    assert sum(counts) == 60
    assert min(counts) > 4


def test_udp_reaches_an_endpoint(make: Make, listen: Listen) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    servers = listen(socket.SOCK_DGRAM)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", ("172.30.0.41", 80))
    got = 0
    for server in servers:
        server.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            got += len(server.recv(10))
        server.close()
    assert got == 1


@pytest.mark.usefixtures("local_backends")
@pytest.mark.parametrize(
    ("address", "port"), [("172.30.0.44", 80), ("172.30.0.41", 81), ("192.168.0.2", 30082)]
)
def test_no_endpoints_and_wrong_ports_are_refused(make: Make, address: str, port: int) -> None:
    make().apply(update(VIEWS, full=True), HOST)
    with pytest.raises(ConnectionRefusedError):
        connect(address, port)


def test_clients_stay_with_their_endpoint_over_changes_and_restarts(make: Make, listen: Listen) -> None:
    dataplane = make()
    dataplane.apply(update(VIEWS, full=True), HOST)
    servers = listen(socket.SOCK_STREAM)
    for _ in range(20):
        connect("172.30.0.46", 80)
    first = accepted(servers)
    assert sorted(first) == [0, 0, 20]
    dataplane.apply(update({key(): view(key(), 1)}), HOST)
    grown = view(
        key("sticky"),
        1,
        2,
        3,
        local=(2,),
        cluster_ip="172.30.0.46",
        node_port=30083,
        external_local=True,
        affinity_seconds=300,
    )
    dataplane.apply(update({key("sticky"): grown}), HOST)
    second = make()
    second.apply(update({**VIEWS, key("sticky"): grown}, full=True), HOST)
    for _ in range(20):
        connect("172.30.0.46", 80)
    assert accepted(servers) == first
    assert re.search(r"timeout 5m\b.* expires (5m|4m)", listing()) or re.search(
        r"elements = .* expires (5m|4m5)", listing()
    )
    held = first.index(20) + 1
    without = view(key("sticky"), *({1, 2, 3} - {held}), cluster_ip="172.30.0.46", affinity_seconds=300)
    second.apply(update({key("sticky"): without}), HOST)
    for _ in range(5):
        connect("172.30.0.46", 80)
    assert accepted(servers)[held - 1] == 0
