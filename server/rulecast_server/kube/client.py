"""One HTTP session to the API server that follows its credentials as they change."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp

from rulecast_server.kube.auth import Access, ConfigError, Load, TlsFiles

_log = logging.getLogger(__name__)


class _Session:
    """An aiohttp session that closes when it is retired and its last request has ended."""

    def __init__(self, tls: TlsFiles, https: bool) -> None:
        self.tls = tls
        connector = aiohttp.TCPConnector(limit=0, ssl=tls.context() if https else False)
        # Timeouts are the caller's: a watch is silent for a minute at a time.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self.http = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=True)
        self._users = 0
        self._retired = False

    async def __aenter__(self) -> aiohttp.ClientSession:
        self._users += 1
        return self.http

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        await self._close_if_unused()

    async def retire(self) -> None:
        self._retired = True
        await self._close_if_unused()

    async def _close_if_unused(self) -> None:
        if self._retired and not self._users:
            await self.http.close()


class _Request(NamedTuple):
    method: str
    path: str
    params: Mapping[str, str]
    body: bytes | None
    content_type: str = "application/json"


class ApiClient:
    """Requests with whatever the credentials are at that moment.

    Files are looked at before each request, so a rotated token, certificate or CA
    counts from the next one
    on; watches that are open go on. A 401 reads everything again (exec plugins run) and the request is
    repeated if that changed anything.
    """

    def __init__(self, load: Load, access: Access) -> None:
        self._load = load
        self._access = access
        self._session = _Session(access.tls, access.host.startswith("https"))
        self._lock = asyncio.Lock()
        self.reloads = 0
        """How often the credentials were read again."""
        self.config_error: str | None = None
        """Why the last reading failed; the former credentials stay in use."""

    @classmethod
    async def connect(cls, load: Load) -> "ApiClient":
        """Read the credentials; no request yet. Raises ConfigError."""
        return cls(load, await load())

    @property
    def host(self) -> str:
        """URL of the API server."""
        return self._access.host

    @asynccontextmanager
    async def get(self, path: str, params: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and hand out the response, whatever its status.

        Raises aiohttp.ClientError and OSError.
        """
        async with self._request(_Request("GET", path, params, None)) as response:
            yield response

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send JSON; returns the status and the body of the answer.

        Raises aiohttp.ClientError and OSError.
        """
        async with self._request(_Request("POST", path, {}, body)) as response:
            return response.status, await response.read()

    async def apply(self, path: str, body: bytes, *, manager: str) -> tuple[int, bytes]:
        """Server-side apply of JSON, also of what others own; returns the status and the body of the answer.

        Raises aiohttp.ClientError and OSError.
        """
        params = {"fieldManager": manager, "force": "true"}
        request = _Request("PATCH", path, params, body, "application/apply-patch+yaml")
        async with self._request(request) as response:
            return response.status, await response.read()

    @asynccontextmanager
    async def _request(self, request: _Request) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._access.due(time.time()):
            await self._reload(self._access)
        access = self._access
        async with self._session as http:
            response = await self._send(http, access, request)
            try:
                if response.status == 401:
                    await self._reload(access)
                if response.status != 401 or self._access is access:
                    yield response
                    return
            finally:
                response.close()
        async with self._session as http:
            response = await self._send(http, self._access, request)
            try:
                yield response
            finally:
                # A watch is never read to its end; give the connection up rather than drain it.
                response.close()

    async def close(self) -> None:
        """Close the session; open watches end with an error."""
        await self._session.http.close()

    async def _send(
        self, http: aiohttp.ClientSession, access: Access, request: _Request
    ) -> aiohttp.ClientResponse:
        # Compressing a list of 30 MB costs the API server more than the network of a cluster does.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if access.authorization:
            headers["Authorization"] = access.authorization
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        return await http.request(
            request.method,
            access.host + request.path,
            params=request.params,
            data=request.body,
            headers=headers,
            proxy=access.proxy,
            server_hostname=access.server_name if access.host.startswith("https") else None,
        )

    async def _reload(self, failed: Access) -> None:
        async with self._lock:
            if self._access is not failed:
                return
            try:
                fresh = await self._load()
                session = self._session
                if (fresh.tls, fresh.host) != (failed.tls, failed.host):
                    session = _Session(fresh.tls, fresh.host.startswith("https"))
            except ConfigError as error:
                if self.config_error != str(error):
                    _log.error("credentials cannot be read again: %s", error)
                self.config_error = str(error)
                return
            self.config_error = None
            self.reloads += 1
            # Where nothing changed the object stays: `get` tells by identity whether to try again.
            if fresh != failed:
                self._access = fresh
            old, self._session = self._session, session
            if old is not session:
                await old.retire()
