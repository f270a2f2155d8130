"""Where authority, bundle and server certificate are kept: in a directory, or in a cluster's objects."""

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from rulecast.errors import UsageError
from rulecast_server.certs.pki import Pair
from rulecast_server.certs.plan import Held, Step
from rulecast_server.kube.client import ApiClient

_MANAGER = "rulecast-certs"


class ChangedError(Exception):
    """Somebody else wrote in the meantime: read again."""


class Place(Protocol):
    """Keeps what was made."""

    async def read(self) -> Held:
        """What is there now. Raises UsageError when that cannot be told."""
        ...

    async def write(self, step: Step) -> None:
        """Replace one part. Raises ChangedError, and UsageError with one clear line."""
        ...


class DirectoryPlace:
    """Files: ca.crt for the agents, server.crt and server.key, authority.crt and authority.key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def read(self) -> Held:
        """See `Place`."""
        return Held(
            authority=self._pair("authority"), bundle=self._text("ca.crt"), server=self._pair("server")
        )

    async def write(self, step: Step) -> None:
        """See `Place`."""
        files: dict[str, str] = {}
        for name, pair in (("authority", step.authority), ("server", step.server)):
            if pair is not None:
                # The server takes a pair only when both fit, so it is never seen by halves.
                files |= {f"{name}.key": pair.key, f"{name}.crt": pair.cert}
        if step.bundle is not None:
            files["ca.crt"] = step.bundle
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                temporary = self._directory / f".{name}"
                temporary.unlink(missing_ok=True)
                mode = 0o600 if name.endswith(".key") else 0o644
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                    file.write(content)
                temporary.rename(self._directory / name)
        except OSError as error:
            raise UsageError(f"{self._directory}: {error.strerror}") from None

    def _text(self, name: str) -> str:
        try:
            return (self._directory / name).read_text(encoding="ascii")
        except (FileNotFoundError, UnicodeDecodeError):
            return ""
        except OSError as error:
            raise UsageError(f"{self._directory / name}: {error.strerror}") from None

    def _pair(self, name: str) -> Pair | None:
        pair = Pair(self._text(f"{name}.crt"), self._text(f"{name}.key"))
        return pair if all(pair) else None


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Objects, all in one namespace."""

    namespace: str
    authority: str = "rulecast-authority"
    """Secret that nobody but us needs."""
    bundle: str = "rulecast-ca"
    """ConfigMap for the agents. Not in a Secret beside the key: every node could then read that too."""
    server: str = "rulecast-server-tls"
    """Secret for the servers."""


class _Metadata(msgspec.Struct):
    resourceVersion: str = ""


class _Object(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    data: dict[str, str] | None = None


class _Status(msgspec.Struct):
    message: str = ""


class ClusterPlace:
    """Two Secrets and a ConfigMap, by server-side apply.

    Only an apply that creates is authorized with the object's name (a POST is not): so our rights can end
    at exactly these names.
    """

    def __init__(self, client: ApiClient, names: Names) -> None:
        self._client = client
        self._names = names
        self._versions: dict[str, str] = {}

    async def read(self) -> Held:
        """See `Place`."""
        names = self._names
        bundle = await self._get("configmaps", names.bundle)
        return Held(
            authority=_pair(await self._get("secrets", names.authority)),
            bundle=bundle.get("ca.crt", ""),
            server=_pair(await self._get("secrets", names.server)),
        )

    async def write(self, step: Step) -> None:
        """See `Place`."""
        names = self._names
        if step.authority is not None:
            await self._apply("secrets", names.authority, _secret(step.authority))
        if step.bundle is not None:
            await self._apply(
                "configmaps", names.bundle, {"kind": "ConfigMap", "data": {"ca.crt": step.bundle}}
            )
        if step.server is not None:
            await self._apply("secrets", names.server, _secret(step.server))

    async def _get(self, plural: str, name: str) -> Mapping[str, str]:
        path = self._path(plural, name)
        self._versions.pop(path, None)
        try:
            async with self._client.get(path, {}) as answer:
                body = await answer.read()
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None
        if status == 404:
            return {}
        if status != 200:
            raise _refused(f"{plural} {name}", status, body)
        found = msgspec.json.decode(body, type=_Object)
        self._versions[path] = found.metadata.resourceVersion
        return found.data or {}

    async def _apply(self, plural: str, name: str, content: Mapping[str, object]) -> None:
        path = self._path(plural, name)
        metadata = {
            "name": name,
            "namespace": self._names.namespace,
            "labels": {"app.kubernetes.io/part-of": "rulecast", "app.kubernetes.io/managed-by": _MANAGER},
        }
        if path in self._versions:
            # What we decided on is what is replaced, or nothing.
            metadata["resourceVersion"] = self._versions[path]
        body = msgspec.json.encode({"apiVersion": "v1", **content, "metadata": metadata})
        try:
            status, answer = await self._client.apply(path, body, manager=_MANAGER)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None
        if status == 409:
            raise ChangedError
        if status not in (200, 201):
            raise _refused(f"{plural} {name}", status, answer)

    def _path(self, plural: str, name: str) -> str:
        return f"/api/v1/namespaces/{self._names.namespace}/{plural}/{name}"

    def _unreachable(self, error: BaseException) -> UsageError:
        return UsageError(
            f"apiserver {self._client.host}: {' '.join(f'{error}'.split()) or type(error).__name__}"
        )


def _secret(pair: Pair) -> dict[str, object]:
    data = {
        name: base64.b64encode(text.encode()).decode()
        for name, text in (("tls.crt", pair.cert), ("tls.key", pair.key))
    }
    return {"kind": "Secret", "type": "kubernetes.io/tls", "data": data}


def _pair(data: Mapping[str, str]) -> Pair | None:
    try:
        cert, key = (
            base64.b64decode(data.get(name, ""), validate=True).decode("ascii")
            for name in ("tls.crt", "tls.key")
        )
    except (binascii.Error, ValueError):
        return None
    return Pair(cert, key) if cert and key else None


def _refused(what: str, status: int, body: bytes) -> UsageError:
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except msgspec.MsgspecError:
        message = ""
    return UsageError(f"{what}: HTTP {status}: {' '.join(message.split())[:300] or 'no reason given'}")
