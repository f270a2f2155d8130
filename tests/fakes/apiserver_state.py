"""What the apiserver stand-in holds: objects, their history, and who watches them."""

import copy
import json
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

Object = dict[str, Any]
Key = tuple[str, str]
Test = Callable[[Object], bool]

PLURALS = {
    "services": ("v1", "Service", True),
    "nodes": ("v1", "Node", False),
    "events": ("v1", "Event", True),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice", True),
    "servicecidrs": ("networking.k8s.io/v1", "ServiceCIDR", False),
}
_BY_KIND = {kind: plural for plural, (_, kind, _) in PLURALS.items()}


class Stored(NamedTuple):
    """One version of one object; never changed once made."""

    object: Object
    json: bytes


class Change(NamedTuple):
    """One write."""

    version: int
    plural: str
    key: Key
    old: Stored | None
    new: Stored | None


class Expired(Exception):
    """History before this version was compacted away."""


def plural_of(item: Object) -> str:
    """The collection of an object, by its kind."""
    return _BY_KIND[item["kind"]]


def key_of(item: Object) -> Key:
    """Namespace and name."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def selector(labels: str, fields: str) -> Test:
    """What a label and a field selector let through. Supports key, !key, =, ==, != for both.

    Raises ValueError for a field that the collection does not index, as the API server answers 400.
    """
    tests = [_label_test(term) for term in labels.split(",") if term]
    tests += [_field_test(term) for term in fields.split(",") if term]
    return lambda item: all(test(item) for test in tests)


def _label_test(term: str) -> Test:
    if term.startswith("!"):
        return lambda item: term[1:] not in (item["metadata"].get("labels") or {})
    if "=" not in term:
        return lambda item: term in (item["metadata"].get("labels") or {})
    name, negated, value = _split(term)
    return lambda item: ((item["metadata"].get("labels") or {}).get(name) == value) != negated


def _field_test(term: str) -> Test:
    name, negated, value = _split(term)
    if name not in ("metadata.name", "metadata.namespace", "spec.clusterIP", "spec.type"):
        raise ValueError(f'field label not supported: "{name}"')
    path = name.split(".")
    return lambda item: (_at(item, path) == value) != negated


def _split(term: str) -> tuple[str, bool, str]:
    negated = "!=" in term
    name, _, value = term.partition("!=" if negated else "==" if "==" in term else "=")
    return name, negated, value


def _at(item: Object, path: list[str]) -> str:
    found: Any = item
    for step in path:
        found = found.get(step) if isinstance(found, dict) else None
    return found or ""


class State:
    """All collections under one revision counter."""

    def __init__(self, version: int = 100, window: int = 10_000) -> None:
        self.version = version
        self.compacted = version
        """Watches and continue tokens from before this are expired."""
        self.objects: dict[str, dict[Key, Stored]] = {plural: {} for plural in PLURALS}
        self.history: list[Change] = []
        self._window = window
        self._snapshots: dict[tuple[str, int], list[Stored]] = {}

    def put(self, item: Object) -> Stored:
        """Create or replace. uid and creationTimestamp survive, as they do in the API server."""
        plural, key = plural_of(item), key_of(item)
        old = self.objects[plural].get(key)
        made = copy.deepcopy(item)
        meta = made["metadata"]
        for field, fresh in (("uid", str(uuid.uuid4())), ("creationTimestamp", "2026-01-01T00:00:00Z")):
            kept = old.object["metadata"].get(field) if old else None
            meta[field] = kept or meta.get(field) or fresh
        made.setdefault("apiVersion", PLURALS[plural][0])
        self.version += 1
        return self._record(plural, key, old, made)

    def delete(self, plural: str, namespace: str, name: str) -> Object | None:
        """Delete; None when there is no such object."""
        key = (namespace, name)
        old = self.objects[plural].pop(key, None)
        if old is None:
            return None
        self.version += 1
        self._append(Change(self.version, plural, key, old, None))
        return old.object

    def compact(self) -> None:
        """Forget all history."""
        self.history.clear()
        self._snapshots.clear()
        self.compacted = self.version

    def since(self, version: int) -> list[Change]:
        """The writes after a version. Raises Expired."""
        if version < self.compacted:
            raise Expired
        low, high = 0, len(self.history)
        while low < high:
            middle = (low + high) // 2
            if self.history[middle].version <= version:
                low = middle + 1
            else:
                high = middle
        return self.history[low:]

    def at(self, plural: str, version: int | None = None) -> list[Stored]:
        """The collection now, or as it was. Raises Expired."""
        objects = dict(self.objects[plural])
        if version is not None and version < self.version:
            for change in reversed(self.since(version)):
                if change.plural == plural:
                    if change.old is None:
                        objects.pop(change.key, None)
                    else:
                        objects[change.key] = change.old
        return [objects[key] for key in sorted(objects)]

    def snapshot(self, plural: str, version: int) -> list[Stored]:
        """The collection for the next page of a list that began at `version`. Raises Expired."""
        if version < self.compacted:
            raise Expired
        found = self._snapshots.get((plural, version))
        if found is None:
            found = self._snapshots[plural, version] = self.at(plural, version)
        return found

    def backup(self) -> "State":
        """A copy to go back to."""
        made = State(self.version, self._window)
        made.objects = {plural: dict(objects) for plural, objects in self.objects.items()}
        return made

    def _record(self, plural: str, key: Key, old: Stored | None, item: Object) -> Stored:
        item["metadata"]["resourceVersion"] = str(self.version)
        stored = Stored(item, json.dumps(item, separators=(",", ":")).encode())
        self.objects[plural][key] = stored
        self._append(Change(self.version, plural, key, old, stored))
        return stored

    def _append(self, change: Change) -> None:
        self.history.append(change)
        if len(self.history) > 2 * self._window:
            self.compacted = self.history[self._window - 1].version
            del self.history[: self._window]


def watch_event(change: Change, fits: Test) -> bytes | None:
    """The line that a watch with this selector gets for a write, None for none.

    An object that stops to match is DELETED, one that begins to is ADDED. What is deleted carries its last
    state with the version of the write.
    """
    before = change.old is not None and fits(change.old.object)
    after = change.new is not None and fits(change.new.object)
    if after:
        assert change.new is not None
        return line("MODIFIED" if before else "ADDED", change.new.json)
    if not before:
        return None
    assert change.old is not None
    meta = change.old.object["metadata"] | {"resourceVersion": str(change.version)}
    return line("DELETED", json.dumps(change.old.object | {"metadata": meta}).encode())


def line(kind: str, item: bytes) -> bytes:
    """One watch line."""
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), item)


def merge_patch(old: Any, new: Any) -> Any:
    """A JSON merge patch (RFC 7386)."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    merged = {key: value for key, value in old.items() if key not in new}
    return merged | {key: merge_patch(old.get(key), value) for key, value in new.items() if value is not None}
