"""A certificate's subject, as gRPC hands it on: RFC 2253 text."""

import re
from collections.abc import Iterator

_ESCAPE = re.compile(rb"\\([0-9a-fA-F]{2}|.)", re.DOTALL)


def organizations(subject: str) -> tuple[str, ...]:
    """The values of all O attributes.

    Separators inside values are escaped (RFC 2253, 2.4), so that nobody can be given a group by what a name
    contains.
    """
    return tuple(value for kind, value in _attributes(subject) if kind == "O")


def _attributes(subject: str) -> Iterator[tuple[str, str]]:
    # A backslash takes the next character with it; values in quotes are not written by OpenSSL.
    for part in re.findall(r"(?:\\.|[^,+\\])+", subject, re.DOTALL):
        kind, equals, value = part.partition("=")
        if equals:
            yield kind.strip().upper(), _unescape(value)


def _unescape(value: str) -> str:
    def one(match: re.Match[bytes]) -> bytes:
        found = match[1]
        return bytes.fromhex(found.decode()) if len(found) == 2 else found

    return _ESCAPE.sub(one, value.encode()).decode(errors="replace")
