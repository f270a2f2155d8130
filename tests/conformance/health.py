"""What the health-check node ports of both sides say."""

import functools
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from rulecast.lab import Host
from rulecast.model import Protocol
from tests.conformance.cases import Case
from tests.conformance.compare import Difference, Seen
from tests.conformance.generate import State
from tests.conformance.places import FAMILIES, NODES
from tests.conformance.twins import Side, Twins
from tests.netns.cluster import SLOWNESS

PATIENCE = 5.0 * SLOWNESS
_TIMEOUT = 1.0
_CLIENTS = {"n1": "outside", "n2": "outside2"}
_THREADS = 32


def questions(states: Iterable[State]) -> list[Case]:
    """Each health-check node port that is or was, on each node.

    Each node is asked by the client behind it: an answer that takes the way through the other node is dropped
    there in iptables mode, as one that belongs to no connection.
    """
    ports = {(each.number, each.health_port) for state in states for each in state.services}
    return [
        Case(number, client, NODES[node].addresses[family], port, Protocol.TCP)
        for number, port in sorted(ports)
        for node, client in _CLIENTS.items()
        for family in FAMILIES
        if port
    ]


def differences(
    twins: Twins, asked: Iterable[Case], explains: Callable[[Difference], str | None]
) -> list[Difference]:
    """The ports that do not come to say the same; what has an explanation is not waited for."""
    end = time.monotonic() + PATIENCE
    left = list(asked)
    told: list[Difference] = []
    while True:
        with ThreadPoolExecutor(_THREADS) as pool:
            ours = pool.map(functools.partial(_say, twins.ours), left)
            theirs = pool.map(functools.partial(_say, twins.theirs), left)
            found = [Difference(*each) for each in zip(left, ours, theirs, strict=True)]
        found = [each for each in found if each.ours != each.theirs]
        told += [each for each in found if explains(each)]
        found = [each for each in found if not explains(each)]
        if not found or time.monotonic() > end:
            return told + found
        left = [each.case for each in found]
        time.sleep(0.1)


def _say(side: Side, case: Case) -> Seen:
    try:
        status, text = _get(side.client(case.host), case.address, case.port)
    except ConnectionRefusedError:
        return Seen(frozenset({("refused", "")}))
    except OSError:
        return Seen(frozenset({("dropped", "")}))
    said = json.loads(text)
    count, healthy = said.get("localEndpoints"), said.get("serviceProxyHealthy")
    return Seen(frozenset({(f"{status}, {count} local endpoints, healthy: {healthy}", "")}))


def _get(host: Host, address: str, port: int) -> tuple[int, str]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = http.client.HTTPConnection(address, port)
    connection.sock = host.namespace.socket(family, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(_TIMEOUT)
        connection.sock.connect((address, port))
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
