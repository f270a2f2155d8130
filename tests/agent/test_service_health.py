"""Health-check node ports: what a load balancer hears, and when a port is open."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.health.listeners import ServiceHealthServers
from rulecast_agent.health.services import Checked, HealthChecks
from tests.agent.fakes import ManualClock, quiet, running, until
from tests.agent.values import key, view

WEB = key("web")
CHECKED = Checked("ns", "web", Family.IPV4)


def free_port(address: str = "127.0.0.1") -> int:
    with socket.create_server(
        (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
    ) as probe:
        port: int = probe.getsockname()[1]
        return port


def checked(port: int, *local: str, service: ServiceKey = WEB, **fields: Any) -> ServiceView:
    return view(
        service,
        "10.0.9.9:80",
        *local,
        local=local,
        external_local=True,
        health_check_node_port=port,
        **fields,
    )


@pytest.mark.parametrize(
    ("states", "count"),
    [
        ([checked(1, "10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80")], 3),
        ([checked(1, "10.0.0.1:80", "10.0.0.1:81")], 1),
        ([checked(1)], 0),
        ([checked(1, "10.0.0.1:80", "10.0.0.2:80", local_ready=0)], 0),
        ([checked(1, "10.0.0.1:80"), checked(1, "10.0.0.1:443", "10.0.0.2:443", service=key(port="tls"))], 2),
        ([checked(1, "10.0.0.1:80"), view(key("other"), local=("10.0.0.7:80",))], 1),
    ],
    ids=[
        "distinct ready addresses",
        "an address counts once",
        "only remote endpoints",
        "only terminating endpoints, which still get traffic",
        "two ports of one service share the check",
        "other services do not count",
    ],
)
def test_the_count(states: list[ServiceView], count: int) -> None:
    checks = HealthChecks()
    checks.settled({state.service.key: state for state in states})
    assert checks.count(CHECKED) == count


def test_listeners_follow_services_and_families_are_separate() -> None:
    checks = HealthChecks()
    v6 = key("web", family=6)
    assert checks.settled({WEB: checked(32000, "10.0.0.1:80"), v6: checked(32000, service=v6)})
    assert checks.listeners()[0].keys() == {(Family.IPV4, 32000), (Family.IPV6, 32000)}
    assert not checks.settled({WEB: checked(32000)}), "a new count needs no new listener"
    assert checks.settled({WEB: checked(32001), v6: None})
    assert checks.listeners()[0] == {(Family.IPV4, 32001): CHECKED}
    assert checks.settled({WEB: view(WEB)}), "no longer a LoadBalancer with a Local policy"
    assert checks.listeners()[0] == {}


def test_two_services_with_one_port_are_told_and_the_first_has_it() -> None:
    checks = HealthChecks()
    other = key("zeta")
    checks.settled({other: checked(32000, service=other), WEB: checked(32000)})
    wanted, clashes = checks.listeners()
    assert wanted == {(Family.IPV4, 32000): CHECKED}
    assert clashes == ["ns/zeta: health-check node port 32000 belongs to ns/web"]
    checks.settled({WEB: None})
    assert checks.listeners()[0][Family.IPV4, 32000].name == "zeta"


class Listening:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.healthy = True
        self.failing = -1
        self.servers = ServiceHealthServers(
            healthy=lambda: self.healthy, failing=self._set_failing, clock=self.clock
        )
        self.servers.nodeport_addresses({Family.IPV4: ("127.0.0.1",), Family.IPV6: ("::1",)})

    def _set_failing(self, count: int) -> None:
        self.failing = count


@asynccontextmanager
async def listening() -> AsyncIterator[Listening]:
    made = Listening()
    async with running(made.servers.run()):
        yield made


async def ask(
    port: int, *, address: str = "127.0.0.1", request: bytes = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        writer.write(request)
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body
    finally:
        writer.close()
        await writer.wait_closed()


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    await writer.wait_closed()
    return False


async def opened(agent: Listening, failing: int = 0) -> None:
    await quiet()
    await until(lambda: agent.failing == failing)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("local", "healthy", "status"),
    [((), True, 503), (("10.0.0.1:80", "10.0.0.2:80"), True, 200), (("10.0.0.1:80",), False, 503)],
)
async def test_the_answer_is_kube_proxys(local: tuple[str, ...], healthy: bool, status: int) -> None:
    async with listening() as agent:
        port = free_port()
        agent.healthy = healthy
        agent.servers.settled({WEB: checked(port, *local)})
        await opened(agent)
        code, headers, body = await ask(port)
        assert code == status
        assert headers["Content-Type"] == "application/json"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Load-Balancing-Endpoint-Weight"] == str(len(local))
        assert json.loads(body) == {
            "service": {"namespace": "ns", "name": "web"},
            "localEndpoints": len(local),
            "serviceProxyHealthy": healthy,
        }


@pytest.mark.asyncio
async def test_the_last_local_endpoint_leaves_and_another_comes() -> None:
    async with listening() as agent:
        port = free_port()
        agent.servers.settled({WEB: checked(port, "10.0.0.1:80")})
        await opened(agent)
        assert (await ask(port))[0] == 200
        agent.servers.settled({WEB: checked(port)})
        assert (await ask(port))[0] == 503
        agent.servers.settled({WEB: checked(port, "10.0.0.2:80")})
        assert (await ask(port))[0] == 200


@pytest.mark.asyncio
async def test_each_family_answers_for_its_own_endpoints() -> None:
    async with listening() as agent:
        port, v6 = free_port("::1"), key("web", family=6)
        agent.servers.settled({WEB: checked(port, "10.0.0.1:80"), v6: checked(port, service=v6)})
        await opened(agent)
        assert (await ask(port))[0] == 200
        assert (await ask(port, address="::1"))[0] == 503


@pytest.mark.asyncio
async def test_every_address_is_listened_on_in_both_families_without_clash() -> None:
    async with listening() as agent:
        agent.servers.nodeport_addresses({Family.IPV4: None, Family.IPV6: None})
        port, v6 = free_port("::1"), key("web", family=6)
        agent.servers.settled(
            {WEB: checked(port, "10.0.0.1:80"), v6: checked(port, "fd00::1:80", service=v6)}
        )
        await opened(agent)
        assert [(await ask(port, address=ip))[0] for ip in ("127.0.0.1", "::1")] == [200, 200]


@pytest.mark.asyncio
async def test_the_port_closes_with_the_service() -> None:
    async with listening() as agent:
        port = free_port()
        agent.servers.settled({WEB: checked(port, "10.0.0.1:80")})
        await opened(agent)
        assert not await refused(port)
        agent.servers.settled({WEB: None})
        await quiet()
        assert await refused(port)


@pytest.mark.asyncio
async def test_all_ports_close_at_the_end() -> None:
    async with listening() as agent:
        port = free_port()
        agent.servers.settled({WEB: checked(port, "10.0.0.1:80")})
        await opened(agent)
    assert await refused(port)


@pytest.mark.asyncio
async def test_a_port_in_use_is_reported_and_taken_when_it_is_free() -> None:
    async with listening() as agent:
        other, port = key("other"), free_port()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            in_use = taken.getsockname()[1]
            agent.servers.settled(
                {WEB: checked(in_use, "10.0.0.1:80"), other: checked(port, "10.0.0.2:80", service=other)}
            )
            await opened(agent, failing=1)
            assert (await ask(port))[0] == 200
        agent.clock.advance(5)
        await opened(agent)
        assert (await ask(in_use))[0] == 200


@pytest.mark.asyncio
async def test_new_node_addresses_move_the_listeners() -> None:
    async with listening() as agent:
        port = free_port()
        agent.servers.settled({WEB: checked(port, "10.0.0.1:80")})
        await opened(agent)
        agent.servers.nodeport_addresses({Family.IPV4: ("127.0.0.2",)})
        await opened(agent)
        assert await refused(port)
        assert (await ask(port, address="127.0.0.2"))[0] == 200


@pytest.mark.asyncio
async def test_odd_requests_are_answered_or_cut_off() -> None:
    async with listening() as agent:
        port = free_port()
        agent.servers.settled({WEB: checked(port, "10.0.0.1:80")})
        await opened(agent)
        status, headers, body = await ask(port, request=b"HEAD /healthz HTTP/1.0\r\n\r\n")
        assert status == 200
        assert int(headers["Content-Length"]) > 0
        assert body == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * 9000)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


@pytest.mark.asyncio
async def test_hundreds_of_ports_are_opened_and_answered() -> None:
    async with listening() as agent:
        services = {}
        for number in range(300):
            service = key(f"s{number}")
            services[service] = checked(21000 + number, "10.0.0.1:80", service=service)
        agent.servers.nodeport_addresses({Family.IPV4: ("127.0.0.3",)})
        agent.servers.settled(services)
        await opened(agent)
        answers = [await ask(21000 + number, address="127.0.0.3") for number in range(0, 300, 50)]
        assert {status for status, _, _ in answers} == {200}
