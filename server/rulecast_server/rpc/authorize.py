"""Who may ask for which node, and who may see the state of all of them."""

import enum
from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from rulecast_server.rpc.names import organizations


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """What the transport says of a caller."""

    address: str
    common_name: str = ""
    """Of the verified client certificate; empty without one."""
    subject: str = ""
    """Its whole subject, as RFC 2253 writes it."""
    alternative_names: tuple[str, ...] = ()
    """Of the verified client certificate: DNS names, URIs, addresses, without distinction."""
    metadata: Mapping[str, str] = {}
    """Request metadata; may hold credentials and must not be logged."""

    def __repr__(self) -> str:
        return f"Peer({self.address})"


class Denial(enum.Enum):
    """Why somebody is not let in; the names are gRPC's status codes."""

    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    UNAVAILABLE = "unavailable"
    """It could not be found out."""
    RESOURCE_EXHAUSTED = "resource_exhausted"


class Refused(Exception):
    """Not let in. `str()` may go to the caller and into the log: it holds no credential."""

    def __init__(self, denial: Denial, why: str) -> None:
        super().__init__(why)
        self.denial = denial


class Authorizer(Protocol):
    """Returns for how many seconds its word holds, None: as long as the connection. Raises Refused."""

    async def watch(self, peer: Peer, node_name: str) -> float | None:
        """May it have this node's view and report for it?"""
        ...

    async def inspect(self, peer: Peer, method: str) -> float | None:
        """May it call this method, `/SERVICE/METHOD`, which tells the state of all nodes or connections?"""
        ...


class AllowAll:
    """For plain text, where nobody is who they say."""

    async def watch(self, peer: Peer, node_name: str) -> float | None:  # noqa: ARG002
        """Always."""
        return None

    async def inspect(self, peer: Peer, method: str) -> float | None:  # noqa: ARG002
        """Always."""
        return None


class CertificateNames:
    """A client certificate speaks for the node that it names, and inspects when it is of the right group.

    The node's name is the CN as `system:node:NAME`, as kubelets have it, or plain; or one of the alternative
    names. The group is an organization (O) of the subject, as the API server reads groups from certificates.
    """

    def __init__(self, inspect_groups: Collection[str] = ()) -> None:
        self._groups = frozenset(inspect_groups)

    async def watch(self, peer: Peer, node_name: str) -> float | None:
        """When the certificate names the node."""
        if peer.common_name in (node_name, f"system:node:{node_name}") or node_name in peer.alternative_names:
            return None
        raise Refused(
            Denial.PERMISSION_DENIED,
            f"the certificate of {peer.common_name!r} does not name node {node_name!r}",
        )

    async def inspect(self, peer: Peer, method: str) -> float | None:  # noqa: ARG002
        """When one of its organizations is a group that may."""
        if self._groups.isdisjoint(organizations(peer.subject)):
            raise Refused(
                Denial.PERMISSION_DENIED,
                f"the certificate of {peer.common_name!r} is of no group that may inspect",
            )
        return None
