"""Asking the API server who holds a token and what they may do: TokenReview and SubjectAccessReview."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Protocol, TypeVar

import aiohttp
import msgspec

_TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

_Answer = TypeVar("_Answer")


class ReviewError(Exception):
    """The API server did not answer, or not with a review. One line without any credential."""


class User(msgspec.Struct, frozen=True):
    """Whom a token belongs to, as `TokenReview.status.user` has it."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = {}


class Posts(Protocol):
    """The part of `ApiClient` that is used here."""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; returns status and body. Raises aiohttp.ClientError and OSError."""
        ...


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: User = User()
    audiences: tuple[str, ...] = ()


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


class _Failure(msgspec.Struct):
    message: str = ""


class Reviews:
    """Reviews through one client."""

    def __init__(self, client: Posts, *, timeout: float = 5.0) -> None:
        self._client = client
        self._timeout = timeout

    async def token(self, token: str, audience: str) -> User | None:
        """Who holds the token; None when it is not good, or not for this audience.

        An API server whose authenticator knows nothing of audiences answers without any; such an answer
        says that the token is good for the API server, not for us. Raises ReviewError.
        """
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        status = (await self._ask("TokenReview", _TOKENS, body, _TokenReview)).status
        return status.user if status.authenticated and audience in status.audiences else None

    async def access(self, user: User, path: str) -> bool:
        """May the user `get` this non-resource URL? Raises ReviewError."""
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user.username,
                "uid": user.uid,
                "groups": user.groups,
                "extra": user.extra,
                "nonResourceAttributes": {"path": path, "verb": "get"},
            },
        }
        return (await self._ask("SubjectAccessReview", _ACCESS, body, _AccessReview)).status.allowed

    async def _ask(self, kind: str, path: str, body: object, answer: type[_Answer]) -> _Answer:
        try:
            async with asyncio.timeout(self._timeout):
                status, content = await self._client.post(path, msgspec.json.encode(body))
        except TimeoutError:
            raise ReviewError(f"{kind}: no answer within {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReviewError(f"{kind}: {type(error).__name__}: {' '.join(str(error).split())}") from None
        try:
            if status not in (HTTPStatus.OK, HTTPStatus.CREATED):
                message = msgspec.json.decode(content, type=_Failure).message
                raise ReviewError(f"{kind}: the API server answered {status}: {message}")
            return msgspec.json.decode(content, type=answer)
        except msgspec.DecodeError:
            raise ReviewError(f"{kind}: the API server answered {status} with what is no {kind}") from None
