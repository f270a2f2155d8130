"""Who may ask for which node."""

from collections.abc import Mapping
from typing import Protocol

import msgspec


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """What the transport says of a caller."""

    address: str
    common_name: str = ""
    """Of the verified client certificate; empty without TLS."""
    alternative_names: tuple[str, ...] = ()
    """Of the verified client certificate: DNS names, URIs, addresses, without distinction."""
    metadata: Mapping[str, str] = {}
    """Request metadata; may hold credentials and must not be logged."""


class Authorizer(Protocol):
    """Answers None to allow, or else says why not, in words that may go to the caller."""

    async def watch(self, peer: Peer, node_name: str) -> str | None:
        """May it have this node's view and report for it?"""
        ...

    async def list_agents(self, peer: Peer) -> str | None:
        """May it see the state of all nodes?"""
        ...


class AllowAll:
    """For plain text, where nobody is who they say."""

    async def watch(self, peer: Peer, node_name: str) -> str | None:  # noqa: ARG002
        """Always."""
        return None

    async def list_agents(self, peer: Peer) -> str | None:  # noqa: ARG002
        """Always."""
        return None


class CertificateNames:
    """A client certificate speaks for the node that it names.

    That is CN `system:node:NAME`, as kubelets have it, or NAME as the CN or one of the alternative names. A
    certificate that names nobody's node, such as an administrator's, may only list.
    """

    async def watch(self, peer: Peer, node_name: str) -> str | None:
        """When the certificate names the node."""
        if peer.common_name in (node_name, f"system:node:{node_name}") or node_name in peer.alternative_names:
            return None
        return f"the certificate of {peer.common_name!r} does not name node {node_name!r}"

    async def list_agents(self, peer: Peer) -> str | None:
        """When it is not a node's."""
        if peer.common_name.startswith("system:node:"):
            return f"{peer.common_name!r} may only watch its own node"
        return None
