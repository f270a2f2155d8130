"""Answers on health-check node ports (kube-proxy's ServiceHealthServer).

Hundreds of ports, each asked every few seconds: a listener is one socket and an answer one write, without an
HTTP framework.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from rulecast.model import Family, ServiceKey
from rulecast.runner import Clock, LoopClock
from rulecast.view import ServiceView
from rulecast_agent.health.services import Checked, HealthChecks

_LOG = logging.getLogger(__name__)
_RETRY = 5.0
_REQUEST_SECONDS = 10.0
_REQUEST_BYTES = 8192
_ANY = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104  (all node port addresses, as asked for)

Place = tuple[Family, str, int]
"""Family, address and port of a listener."""


class ServiceHealthServers:
    """Keeps one listener for each health-check node port and address."""

    def __init__(
        self,
        *,
        healthy: Callable[[], bool],
        failing: Callable[[int], None],
        clock: Clock | None = None,
    ) -> None:
        """`healthy`: whether rules follow updates; `failing` is told how many listeners cannot be had."""
        self._healthy = healthy
        self._failing = failing
        self._clock = clock or LoopClock()
        self._checks = HealthChecks()
        self._addresses: Mapping[Family, tuple[str, ...] | None] = {}
        self._owners: dict[tuple[Family, int], Checked] = {}
        self._servers: dict[Place, asyncio.Server] = {}
        self._wake = asyncio.Event()

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> None:
        """See `reconcile.Follower.settled`."""
        if self._checks.settled(changes):
            self._wake.set()

    def nodeport_addresses(self, addresses: Mapping[Family, tuple[str, ...] | None]) -> None:
        """See `reconcile.Follower.nodeport_addresses`."""
        self._addresses = addresses
        self._wake.set()

    async def run(self) -> None:
        """Open and close listeners until cancelled; then close all."""
        retry_at: float | None = None
        try:
            while True:
                await self._clock.wait(self._wake, retry_at)
                self._wake.clear()
                failures = await self._sync()
                self._failing(failures)
                retry_at = self._clock.now() + _RETRY if failures else None
        finally:
            for server in self._servers.values():
                server.close()
            self._servers.clear()

    def answer(self, family: Family, port: int) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request on a port."""
        checked = self._owners.get((family, port))
        count = 0 if checked is None else self._checks.count(checked)
        healthy = self._healthy()
        body = {
            "service": {
                "namespace": checked.namespace if checked else "",
                "name": checked.name if checked else "",
            },
            "localEndpoints": count,
            "serviceProxyHealthy": healthy,
        }
        headers = {
            "Content-Type": "application/json",
            "X-Content-Type-Options": "nosniff",
            "X-Load-Balancing-Endpoint-Weight": str(count),
        }
        return 200 if count and healthy else 503, headers, msgspec.json.encode(body)

    async def _sync(self) -> int:
        """Bring the listeners to what is wanted; gives how many could not be opened."""
        self._owners, clashes = self._checks.listeners()
        for line in clashes:
            _LOG.error("%s", line)
        wanted: set[Place] = set()
        for family, port in self._owners:
            addresses = self._addresses.get(family, ())
            for address in (_ANY[family],) if addresses is None else addresses:
                wanted.add((family, address, port))
        for place in self._servers.keys() - wanted:
            self._servers.pop(place).close()
        failures = len(clashes)
        loop = asyncio.get_running_loop()
        for place in sorted(wanted - self._servers.keys()):
            family, address, port = place
            try:
                self._servers[place] = await loop.create_server(
                    lambda family=family, port=port: _Responder(self, family, port),  # type: ignore[misc]
                    address,
                    port,
                )
            except OSError as error:
                failures += 1
                checked = self._owners[family, port]
                _LOG.error(
                    "%s/%s: cannot listen on health-check node port %s port %d: %s",
                    checked.namespace,
                    checked.name,
                    address,
                    port,
                    error.strerror or error,
                )
        return failures


class _Responder(asyncio.Protocol):
    """One request, one answer, whatever its method and path."""

    def __init__(self, owner: ServiceHealthServers, family: Family, port: int) -> None:
        self._owner = owner
        self._family = family
        self._port = port
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(_REQUEST_SECONDS, transport.abort)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._received += data
        if b"\r\n\r\n" in self._received or b"\n\n" in self._received:
            self._transport.write(self._render())
            self._transport.close()
        elif len(self._received) > _REQUEST_BYTES:
            self._transport.abort()

    def _render(self) -> bytes:
        status, headers, body = self._owner.answer(self._family, self._port)
        headers |= {"Content-Length": str(len(body)), "Connection": "close"}
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Service Unavailable'}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return head.encode() + b"\r\n" + (b"" if self._received.startswith(b"HEAD ") else body)
