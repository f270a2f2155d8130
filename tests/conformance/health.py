"""What the health-check node ports of both sides say."""

import http.client
import json
import socket
import time
from collections.abc import Iterable

from rulecast.lab import Host
from rulecast.model import Protocol
from tests.conformance.cases import Case
from tests.conformance.compare import Difference, Seen
from tests.conformance.generate import State
from tests.conformance.places import FAMILIES, NODES
from tests.conformance.twins import Side, Twins

PATIENCE = 5.0
_TIMEOUT = 1.0


def questions(states: Iterable[State]) -> list[Case]:
    """Each health-check node port that is or was, on each node."""
    ports = {(each.number, each.health_port) for state in states for each in state.services}
    return [
        Case(number, "outside", place.addresses[family], port, Protocol.TCP)
        for number, port in sorted(ports)
        for place in NODES.values()
        for family in FAMILIES
        if port
    ]


def differences(twins: Twins, asked: Iterable[Case]) -> list[Difference]:
    """The ports that do not come to say the same."""
    end = time.monotonic() + PATIENCE
    left = list(asked)
    while True:
        found = [Difference(case, _say(twins.ours, case), _say(twins.theirs, case)) for case in left]
        found = [each for each in found if each.ours != each.theirs]
        if not found or time.monotonic() > end:
            return found
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
