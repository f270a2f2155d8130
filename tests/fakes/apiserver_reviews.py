"""TokenReview and SubjectAccessReview at the apiserver stand-in, in the words of kube-apiserver 1.37."""

import asyncio
import base64
import json
import time
import uuid
from typing import Any

from aiohttp import web

from tests.fakes.apiserver import FakeApiServer
from tests.fakes.apiserver_refusals import Refusal
from tests.fakes.apiserver_state import Object

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_EXTRA = "authentication.kubernetes.io/"


class ReviewingApiServer(FakeApiServer):
    """An API server that also signs tokens and reviews them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.out_of_order = False
        """Reviews are answered with 500."""
        self.hold: asyncio.Event | None = None
        """Reviews wait for it to be set."""
        self.knows_audiences = True
        """False: an authenticator that ignores audiences, and answers without any."""
        self.allowed: set[tuple[str, str]] = set()
        """User and non-resource path, `*` at the end stands for any rest."""
        self.reviewed: list[str] = []
        """Tokens, in the order of their reviews."""
        self._tokens: dict[str, tuple[Object, list[str], float]] = {}

    def issue(
        self,
        account: str = "rulecast/rulecast-agent",
        *,
        node: str = "",
        audience: str = "rulecast",
        seconds: float = 3600.0,
    ) -> str:
        """A token of a ServiceAccount NAMESPACE/NAME, bound to a Pod on `node` if that is given."""
        namespace, _, name = account.partition("/")
        identity = str(uuid.uuid4())
        extra = {f"{_EXTRA}credential-id": [f"JTI={identity}"]}
        if node:
            extra |= {
                f"{_EXTRA}node-name": [node],
                f"{_EXTRA}node-uid": [f"uid-of-{node}"],
                f"{_EXTRA}pod-name": [f"agent-{node}"],
                f"{_EXTRA}pod-uid": [f"uid-of-agent-{node}"],
            }
        user = {
            "username": f"system:serviceaccount:{namespace}:{name}",
            "uid": f"uid-of-{name}",
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
                "system:authenticated",
            ],
            "extra": extra,
        }
        claims = {"aud": [audience], "exp": time.time() + seconds, "jti": identity, "sub": user["username"]}
        token = ".".join(map(_part, ({"alg": "RS256"}, claims, {"signature": identity})))
        self._tokens[token] = (user, [audience], time.time() + seconds)
        return token

    def revoke(self, token: str) -> None:
        """As when the Pod that it is bound to is gone."""
        del self._tokens[token]

    async def _route(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST" or request.path not in (TOKEN_REVIEWS, ACCESS_REVIEWS):
            return await super()._route(request)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise Refusal(401, "Unauthorized", "Unauthorized")
        if self.hold is not None:
            await self.hold.wait()
        if self.out_of_order:
            raise Refusal(500, "InternalError", "Internal error occurred: etcd is not reachable")
        review = await request.json()
        answer = self._of_token if request.path == TOKEN_REVIEWS else self._of_access
        status = answer(review["spec"])
        return web.json_response(review | {"metadata": {}, "status": status}, status=201)

    def _of_token(self, spec: Object) -> Object:
        self.reviewed.append(spec["token"])
        user, audiences, expires = self._tokens.get(spec["token"], ({}, [], 0.0))
        if time.time() >= expires:
            return {"user": {}, "error": "invalid bearer token"}
        if not self.knows_audiences:
            return {"authenticated": True, "user": user}
        common = [each for each in spec.get("audiences") or audiences if each in audiences]
        if not common:
            wanted = spec["audiences"]
            error = f"[invalid bearer token, token audiences {audiences} is invalid for the target {wanted}]"
            return {"user": {}, "error": error}
        return {"authenticated": True, "user": user, "audiences": common}

    def _of_access(self, spec: Object) -> Object:
        attributes = spec["nonResourceAttributes"]
        for user, path in self.allowed:
            if user == spec["user"] and attributes["verb"] == "get" and _matches(path, attributes["path"]):
                return {"allowed": True, "reason": f"RBAC: allowed to {user}"}
        return {"allowed": False}


def _matches(rule: str, path: str) -> bool:
    return path.startswith(rule[:-1]) if rule.endswith("*") else path == rule


def _part(content: Object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
