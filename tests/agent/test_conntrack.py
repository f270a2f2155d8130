"""When stale flows are removed, and that nothing is forgotten."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_address

import pytest

from rulecast.model import Family
from rulecast_agent.kernel.conntrack import ConntrackCleaner
from rulecast_agent.kernel.ctnetlink import ConntrackError, Removed
from rulecast_agent.kernel.udp_flows import Targets
from tests.agent.fakes import ManualClock, quiet, running, until
from tests.agent.udp import ALL, STAT, A, B, C, packed, stat
from tests.agent.values import key, view

pytestmark = pytest.mark.asyncio


class Cleaning:
    """A cleaner over a kernel that only takes notes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.runs: list[Targets] = []
        self.ips: list[Mapping[Family, Collection[bytes]]] = []
        self.errors: list[ConntrackError] = []
        self.observed: list[tuple[int, bool]] = []
        self.cleaner = ConntrackCleaner(
            local_ips=lambda: ["127.0.0.1", "192.0.2.11", "192.0.2.12", "::1", "2001:db8::11"],
            observe=lambda deleted, _seconds, failed: self.observed.append((deleted, failed)),
            remove=self._remove,
            clock=self.clock,
        )

    def _remove(self, targets: Targets, node_port_ips: Mapping[Family, Collection[bytes]]) -> Removed:
        self.runs.append(targets)
        self.ips.append(node_port_ips)
        if self.errors:
            raise self.errors.pop(0)
        return Removed(10, 2)


@asynccontextmanager
async def cleaning() -> AsyncIterator[Cleaning]:
    """A cleaner that has seen `stat` with endpoint A and is at rest."""
    c = Cleaning()
    async with running(c.cleaner.run()):
        c.cleaner.settled({STAT: stat(A)})
        await until(lambda: len(c.observed) == 1)
        c.clock.advance(60)
        await quiet()
        yield c


async def test_a_start_looks_at_every_udp_frontend_once() -> None:
    async with cleaning() as c:
        assert [set(targets) for targets in c.runs] == [ALL]


async def test_a_change_of_udp_is_followed_at_once() -> None:
    async with cleaning() as c:
        c.cleaner.settled({STAT: stat(B)})
        await until(lambda: len(c.observed) == 2)
        assert c.runs[-1] == dict.fromkeys(ALL, frozenset([packed(B)]))
        assert c.observed[-1] == (2, False)


async def test_changes_of_tcp_never_look_at_flows() -> None:
    async with cleaning() as c:
        c.cleaner.settled({key("web"): view(key("web"), "10.0.0.1:80")})
        c.cleaner.settled({key("web"): None})
        c.clock.advance(60)
        await quiet()
        assert len(c.runs) == 1


async def test_changes_close_to_each_other_share_a_run() -> None:
    async with cleaning() as c:
        c.cleaner.settled({STAT: stat(B)})
        await until(lambda: len(c.observed) == 2)
        for _ in range(10):
            c.cleaner.settled({STAT: stat(A)})
            c.cleaner.settled({STAT: stat(C)})
        await quiet()
        assert len(c.runs) == 2
        c.clock.advance(30)
        await until(lambda: len(c.observed) == 3)
        assert c.runs[-1] == dict.fromkeys(ALL, frozenset([packed(C)]))


async def test_what_failed_is_done_again_until_it_works() -> None:
    async with cleaning() as c:
        c.errors = [ConntrackError("conntrack: no buffer space")] * 3
        c.cleaner.settled({STAT: stat(B)})
        await until(lambda: c.observed[-1] == (0, True))
        for _ in range(10):
            c.clock.advance(10)
            await asyncio.sleep(0.005)
        await until(lambda: c.observed[-1] == (2, False))
        assert [set(targets) for targets in c.runs[1:]] == [ALL] * 4


async def test_node_ports_are_looked_for_where_they_answer() -> None:
    async with cleaning() as c:
        assert c.ips[-1] == {Family.IPV4: set(), Family.IPV6: set()}
        c.cleaner.nodeport_addresses({Family.IPV4: ("192.0.2.11",), Family.IPV6: None})
        c.cleaner.settled({STAT: stat(B)})
        await until(lambda: len(c.observed) == 2)
        assert c.ips[-1] == {
            Family.IPV4: {ip_address("192.0.2.11").packed},
            Family.IPV6: {ip_address("2001:db8::11").packed},
        }
