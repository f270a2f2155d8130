"""API bytes to reduced objects: list pages, watch lines, status bodies.

Typed decoding straight from bytes; an object that does not fit its type is reported by name and left out,
whatever else came with it is used.
"""

from typing import Generic, NamedTuple, TypeVar

import msgspec

from rulecast_server.kube.objects import ApiObject
from rulecast_server.kube.reduce import reduce_object
from rulecast_server.kube.selectors import Resource, selected

Key = tuple[str, str]
"""Namespace ("" for cluster-scoped) and name."""

T = TypeVar("T")


class MalformedError(Exception):
    """A body or a line is not JSON of the expected shape, so nothing in it can be trusted."""


class Seen(NamedTuple):
    """One object as a server showed it."""

    key: Key
    uid: str
    version: int
    """The resourceVersion; 0 when it is not a number, and then it is compared with nothing."""
    object: ApiObject
    """Reduced."""


class Gone(NamedTuple):
    """An object was deleted, or stopped to match the selectors."""

    key: Key
    version: int


class BadObject(NamedTuple):
    """An object that could not be decoded."""

    key: Key
    """As far as it could be read; ("", "") when not even that."""
    version: int
    detail: str


class Bookmark(NamedTuple):
    """The watch has reached this version."""

    version: int
    initial_end: bool
    """All initial events were sent (KEP-3157)."""


class ServerStatus(NamedTuple):
    """A `Status` object, as body of a failed request or in an ERROR event."""

    code: int
    reason: str
    message: str
    retry_after: float | None = None
    """Seconds."""
    causes: tuple[str, ...] = ()


WatchItem = Seen | Gone | BadObject | Bookmark | ServerStatus


class Page(NamedTuple):
    """A list, or a part of one."""

    seen: list[Seen]
    bad: list[BadObject]
    version: int
    continue_token: str
    """Empty at the end of the list."""


class _ListMeta(msgspec.Struct, rename="camel", gc=False):
    resource_version: str | None = None
    continue_: str | None = msgspec.field(default=None, name="continue")


class _List(msgspec.Struct, Generic[T], gc=False):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[T] | None = None


class _Event(msgspec.Struct, gc=False):
    type: str
    object: msgspec.Raw


class _BareMeta(msgspec.Struct, rename="camel", gc=False):
    name: str | None = None
    namespace: str | None = None
    resource_version: str | None = None
    annotations: dict[str, str] | None = None


class _Bare(msgspec.Struct, gc=False):
    metadata: _BareMeta


class _Cause(msgspec.Struct, gc=False):
    reason: str | None = None


class _Details(msgspec.Struct, rename="camel", gc=False):
    retry_after_seconds: float | None = None
    causes: list[_Cause] | None = None


class _Status(msgspec.Struct, gc=False):
    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: _Details | None = None


_events = msgspec.json.Decoder(_Event)
_raw_lists: msgspec.json.Decoder[_List[msgspec.Raw]] = msgspec.json.Decoder(_List[msgspec.Raw])
_bare = msgspec.json.Decoder(_Bare)
_statuses = msgspec.json.Decoder(_Status)


def version_number(text: str | None) -> int:
    """A resourceVersion as a number, 0 when it is none (the API calls it opaque; in fact it is etcd's)."""
    return int(text) if text and text.isascii() and text.isdigit() else 0


def decode_status(body: bytes, code: int) -> ServerStatus:
    """A failed request's body; `code` is the HTTP status. Never raises: proxies answer with HTML."""
    try:
        status = _statuses.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ServerStatus(code, "", body[:200].decode("utf-8", "replace").strip())
    details = status.details or _Details()
    return ServerStatus(
        code=status.code or code,
        reason=status.reason or "",
        message=status.message or "",
        retry_after=details.retry_after_seconds,
        causes=tuple(cause.reason or "" for cause in details.causes or ()),
    )


class Codec:
    """Decodes one resource."""

    def __init__(self, resource: Resource) -> None:
        self._objects: msgspec.json.Decoder[ApiObject] = msgspec.json.Decoder(resource.kind)
        list_type = _List[resource.kind]  # type: ignore[name-defined]
        self._lists: msgspec.json.Decoder[_List[ApiObject]] = msgspec.json.Decoder(list_type)

    def page(self, body: bytes) -> Page:
        """Decode a list page. Raises MalformedError when the page as such cannot be read."""
        bad: list[BadObject] = []
        try:
            whole = self._lists.decode(body)
            meta, items = whole.metadata, whole.items or ()
            seen = [_seen(item) for item in items if selected(item)]
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # Twice the work, and only for a page with something wrong in it.
            meta, seen = self._page_by_object(body, bad)
        return Page(seen, bad, version_number(meta.resource_version), meta.continue_ or "")

    def event(self, line: bytes) -> WatchItem:
        """Decode a watch line. Raises MalformedError when it is no event."""
        try:
            event = _events.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MalformedError(f"watch event: {error}") from None
        kind = event.type
        if kind in ("ADDED", "MODIFIED"):
            decoded = self._object(event.object)
            if isinstance(decoded, BadObject):
                return decoded
            seen = _seen(decoded)
            return seen if selected(decoded) else Gone(seen.key, seen.version)
        if kind == "ERROR":
            return decode_status(bytes(event.object), 0)
        if kind not in ("DELETED", "BOOKMARK"):
            raise MalformedError(f"watch event of unknown type {kind!r}")
        try:
            meta = _bare.decode(event.object).metadata
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MalformedError(f"{kind} event: {error}") from None
        version = version_number(meta.resource_version)
        if kind == "BOOKMARK":
            ended = (meta.annotations or {}).get("k8s.io/initial-events-end") == "true"
            return Bookmark(version, ended)
        if not meta.name:
            raise MalformedError("DELETED event without a name")
        return Gone((meta.namespace or "", meta.name), version)

    def _page_by_object(self, body: bytes, bad: list[BadObject]) -> tuple[_ListMeta, list[Seen]]:
        try:
            page = _raw_lists.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MalformedError(f"list: {error}") from None
        seen: list[Seen] = []
        for raw in page.items or ():
            decoded = self._object(raw)
            if isinstance(decoded, BadObject):
                bad.append(decoded)
            elif selected(decoded):
                seen.append(_seen(decoded))
        return page.metadata, seen

    def _object(self, raw: msgspec.Raw) -> ApiObject | BadObject:
        try:
            return self._objects.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            detail = str(error)
        try:
            meta = _bare.decode(raw).metadata
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return BadObject(("", ""), 0, detail)
        key = (meta.namespace or "", meta.name or "")
        return BadObject(key, version_number(meta.resource_version), detail)


def _seen(item: ApiObject) -> Seen:
    meta = item.metadata
    reduced = reduce_object(item)
    key = (reduced.metadata.namespace, meta.name)
    return Seen(key, meta.uid, version_number(meta.resource_version), reduced)
