"""Tokens as authority: an agent's account on its own node, and RBAC for those who inspect."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection

import msgspec

from rulecast_server.kube.reviews import ReviewError, User
from rulecast_server.rpc.authorize import Denial, Peer, Refused
from rulecast_server.rpc.connections import peer_host
from rulecast_server.rpc.tokens import Identity, Reviewer, TokenIdentities

_Question = tuple[bytes, str]
_NODE_NAME = "authentication.kubernetes.io/node-name"
_ACCOUNT = "system:serviceaccount:"
_MAX_ANSWERS = 4_096
_ALLOWED_FOR = 30.0
_REFUSED_FOR = 5.0


class TokenAuthorizer:
    """Bearer tokens in the metadata's `authorization`.

    A node's stream is for the tokens of the agents' ServiceAccounts that are bound to a Pod on that node or
    to the Node; the API server says which in the review's extra fields (KEP-4193, Kubernetes 1.30 and
    later). Inspection is for whom a SubjectAccessReview allows to `get` the method's path as a non-resource
    URL.
    """

    def __init__(
        self,
        identities: TokenIdentities,
        reviewer: Reviewer,
        *,
        accounts: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`accounts`: NAMESPACE/NAME."""
        self._identities = identities
        self._reviewer = reviewer
        self._accounts = frozenset(_ACCOUNT + account.replace("/", ":") for account in accounts)
        self._clock = clock
        self._answers: OrderedDict[_Question, tuple[bool, float]] = OrderedDict()

    async def watch(self, peer: Peer, node_name: str) -> float | None:
        """When the token is an agent's and bound to the node."""
        identity = await self._identify(peer)
        user = identity.user
        if user.username not in self._accounts:
            raise Refused(Denial.PERMISSION_DENIED, f"{user.username!r} is not the agents' account")
        nodes = user.extra.get(_NODE_NAME, ())
        if not nodes:
            raise Refused(Denial.PERMISSION_DENIED, f"the token of {user.username!r} is bound to no node")
        if nodes != (node_name,):
            bound = ", ".join(map(repr, nodes))
            why = f"the token of {user.username!r} is bound to node {bound}, not to {node_name!r}"
            raise Refused(Denial.PERMISSION_DENIED, why)
        return identity.holds

    async def inspect(self, peer: Peer, method: str) -> float | None:
        """When the API server's authorizer lets the user get the method's path."""
        identity = await self._identify(peer)
        allowed, holds = await self._access(identity.user, method)
        if not allowed:
            why = f"{identity.user.username!r} may not get {method!r}"
            raise Refused(Denial.PERMISSION_DENIED, why)
        return min(identity.holds, holds)

    async def _identify(self, peer: Peer) -> Identity:
        scheme, _, token = peer.metadata.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Refused(Denial.UNAUTHENTICATED, "no bearer token came with the call")
        return await self._identities.identify(token, peer_host(peer.address))

    async def _access(self, user: User, path: str) -> tuple[bool, float]:
        # All of it: an authorizer may go by the extra fields, such as scopes.
        key = (msgspec.json.encode(user, order="sorted"), path)
        now = self._clock()
        known = self._answers.get(key)
        if known is not None and now < known[1]:
            return known[0], known[1] - now
        try:
            allowed = await self._reviewer.access(user, path)
        except ReviewError:
            raise Refused(Denial.UNAVAILABLE, "the right to inspect cannot be reviewed now") from None
        holds = _ALLOWED_FOR if allowed else _REFUSED_FOR
        self._answers[key] = (allowed, self._clock() + holds)
        if len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)
        return allowed, holds
