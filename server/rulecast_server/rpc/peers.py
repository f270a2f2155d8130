"""Who calls, from what gRPC knows of the connection."""

from collections.abc import Iterable
from typing import Any

import grpc

from rulecast_server.rpc.authorize import Peer

AnyContext = grpc.aio.ServicerContext[Any, Any]


def peer_of(context: AnyContext) -> Peer:
    """The caller."""
    auth = context.auth_context()
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    return Peer(
        address=context.peer(),
        common_name=_first(auth.get("x509_common_name", ())),
        subject=_first(auth.get("x509_subject", ())),
        alternative_names=tuple(map(_text, auth.get("x509_subject_alternative_name", ()))),
        metadata={key: value for key, value in metadata if isinstance(value, str)},
    )


def _first(values: Iterable[bytes]) -> str:
    return next(map(_text, values), "")


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
