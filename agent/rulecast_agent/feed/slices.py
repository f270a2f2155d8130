"""One read of a Service's EndpointSlices from an API server: the addresses of the servers.

Not a watch: addresses are needed only where a stream is to be opened. Not DNS: a cluster's DNS is behind a
ClusterIP, which works on this node only after we have had a stream.
"""

import asyncio
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import aiohttp
import msgspec

from rulecast.errors import UsageError
from rulecast.flags import HostPort
from rulecast_agent.feed.tokens import TokenFile

_PORT_NAME = "grpc"
_MAX_BYTES = 1 << 20
_MAX_SERVERS = 1000
"""As many endpoints as one slice may have."""


class LookupFailedError(Exception):
    """No address could be had. `str()` is one line, without a secret."""


class Lookup(Protocol):
    """Finds the servers' addresses."""

    async def __call__(self) -> Sequence[HostPort]:
        """At least one. Raises LookupFailedError."""
        ...


class _Conditions(msgspec.Struct):
    ready: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] | None = None
    conditions: _Conditions | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class _Slice(msgspec.Struct):
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(msgspec.Struct):
    items: list[_Slice] | None = None


class _Status(msgspec.Struct):
    message: str = ""


def addresses_in(body: bytes) -> list[HostPort]:
    """The addresses in an EndpointSliceList: those of ready endpoints, or of all when none is ready.

    A server that is not ready lets agents wait, which is better than none. A missing condition is ready
    (discovery.k8s.io/v1, EndpointConditions). Raises LookupFailedError for what is no such list.
    """
    try:
        items = msgspec.json.decode(body, type=_SliceList).items or []
    except msgspec.MsgspecError as error:
        raise LookupFailedError(f"not an EndpointSliceList: {error}") from None
    ready: dict[HostPort, None] = {}
    others: dict[HostPort, None] = {}
    for item in items:
        port = _port(item.ports or [])
        if port is None:
            continue
        for endpoint in item.endpoints or []:
            group = others if endpoint.conditions and endpoint.conditions.ready is False else ready
            for text in endpoint.addresses or []:
                if is_ip(text):
                    group[HostPort(text, port)] = None
    return list(ready or others)[:_MAX_SERVERS]


def _port(ports: Sequence[_Port]) -> int | None:
    """The gRPC port by its name, or the only one."""
    tcp = [each for each in ports if each.protocol in (None, "TCP") and each.port]
    named = [each for each in tcp if each.name == _PORT_NAME]
    (chosen,) = named[:1] or (tcp if len(tcp) == 1 else [_Port()])
    return chosen.port if chosen.port is not None and 0 < chosen.port < 65536 else None


def is_ip(text: str) -> bool:
    """Whether this is an IP address without a zone, as endpoints have them."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


class ApiServers(NamedTuple):
    """Where API servers are, and by what we are known there."""

    addresses: Sequence[HostPort]
    credentials: Path
    """Directory of `token` and `ca.crt`. Both are read anew for each request: kubelet replaces them."""


class SliceLookup:
    """Asks one API server after the other, first the one that answered last. A `Lookup`."""

    def __init__(self, api: ApiServers, namespace: str, service: str, *, patience: float = 5.0) -> None:
        """`patience`: seconds for all of them together."""
        self._servers = list(api.addresses)
        self._token = TokenFile(api.credentials / "token")
        self._ca = api.credentials / "ca.crt"
        self._namespace, self._service = namespace, service
        self._patience = patience

    async def __call__(self) -> list[HostPort]:
        """See `Lookup`."""
        reasons: dict[str, None] = {}
        for server in list(self._servers):
            try:
                async with asyncio.timeout(self._patience / len(self._servers)):
                    found = addresses_in(await self._ask(server))
            except TimeoutError:
                reasons[f"no answer from apiserver {server}"] = None
            except (aiohttp.ClientError, OSError, ssl.SSLError) as error:
                reasons[f"apiserver {server}: {_one_line(error)}"] = None
            except (LookupFailedError, UsageError) as error:
                reasons[f"apiserver {server}: {error}"] = None
            else:
                if found:
                    return found
                # Whatever the others say would be older or the same.
                raise LookupFailedError(f"Service {self._namespace}/{self._service} has no endpoints")
            self._servers.append(self._servers.pop(0))
        raise LookupFailedError("; ".join(reasons))

    async def _ask(self, server: HostPort) -> bytes:
        token = await self._token.read()
        context = await asyncio.to_thread(self._context)
        # From the API server's cache, and no connection is kept: the next question is hours away.
        query = {"labelSelector": f"kubernetes.io/service-name={self._service}", "resourceVersion": "0"}
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        connector = aiohttp.TCPConnector(ssl=context, force_close=True)
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get(
                f"https://{server}{path}", params=query, headers=headers, allow_redirects=False
            ) as answer,
        ):
            body = await _read(answer)
            if answer.status == 200:
                return body
            raise LookupFailedError(_refusal(answer.status, body))

    def _context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self._ca)
        except ssl.SSLError:
            raise UsageError(f"{self._ca}: not a certificate authority") from None
        except OSError as error:
            raise UsageError(f"{self._ca}: {error.strerror}") from None


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_chunked(64 << 10):
        body += piece
        if len(body) > _MAX_BYTES:
            raise LookupFailedError(f"an answer of more than {_MAX_BYTES} bytes")
    return bytes(body)


def _refusal(status: int, body: bytes) -> str:
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except msgspec.MsgspecError:
        message = ""
    hint = " (the ServiceAccount's token is not accepted)" if status == 401 else ""
    return f"HTTP {status}: {' '.join(message.split())[:300] or 'no reason given'}{hint}"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
