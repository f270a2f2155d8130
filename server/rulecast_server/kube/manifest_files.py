"""Manifest files to objects: YAML or JSON, several documents a file, lists of kinds."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import msgspec
import yaml

from rulecast.errors import UsageError
from rulecast_server.kube.objects import ApiObject, Meta
from rulecast_server.kube.reduce import reduce_object
from rulecast_server.kube.selectors import RESOURCES, Resource, selected

ObjectKey = tuple[str, str, str]
"""Resource (plural), namespace, name."""

SUFFIXES = (".yaml", ".yml", ".json")

_log = logging.getLogger(__name__)

_BY_KIND = {each.kind.__name__: each for each in RESOURCES}
_LISTS = {"List": None, **{f"{kind}List": kind for kind in _BY_KIND}}
_SEPARATOR = re.compile(r"^---(?:[ \t].*)?$", re.MULTILINE)


class ManifestError(UsageError):
    """A file cannot be used; one line: path, line number where known, and the reason."""


class FileObject(NamedTuple):
    """One object and the line of its document's first line."""

    key: ObjectKey
    object: ApiObject
    """Reduced."""
    line: int


class _Loader(yaml.CSafeLoader):
    """YAML as Kubernetes reads it: timestamps stay text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def parse_file(path: Path) -> list[FileObject]:
    """The objects of a file that pass the selectors, in order. Other kinds are skipped.

    Raises ManifestError when anything in it cannot be read: half a file must not pass for a whole one.
    """
    try:
        # Opening a FIFO would wait for its writer for ever.
        if not S_ISREG(path.stat().st_mode):
            raise ManifestError(f"{path}: not a regular file")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not UTF-8 text (byte {error.start})") from None
    found: list[FileObject] = []
    skipped: Counter[str] = Counter()
    for line, document in _documents(text):
        content = _load(path, line, document)
        if content is not None:
            found.extend(_objects(path, _first_line(line, document), content, None, skipped))
    if skipped:
        # A kind that is misspelled would otherwise be missed by nobody.
        _log.info("%s: not used: %s", path, ", ".join(f"{count} {kind}" for kind, count in skipped.items()))
    return found


def _documents(text: str) -> Iterator[tuple[int, str]]:
    """Split at the document marks, as kubectl does; with the number of the first line of each."""
    line, start = 1, 0
    for mark in _SEPARATOR.finditer(text):
        document = text[start : mark.start()]
        yield line, document
        line += document.count("\n")
        # What follows the dashes on their line belongs to the next document.
        start = mark.start() + 3
    yield line, text[start:]


def _load(path: Path, line: int, document: str) -> object:
    stripped = document.lstrip()
    if not stripped:
        return None
    if stripped[0] in "{[":
        # Fifty times as fast as YAML, and most generated files are JSON; where it fails, YAML says why.
        try:
            return msgspec.json.decode(stripped)
        except msgspec.MsgspecError:
            pass
    try:
        # A subclass of CSafeLoader.
        return yaml.load(document, _Loader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = line + (mark.line if mark else 0)
        raise ManifestError(f"{path}:{at}: {error.problem or error.context or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ManifestError(f"{path}:{line}: {' '.join(str(error).split())}") from None


def _first_line(line: int, document: str) -> int:
    return line + document[: len(document) - len(document.lstrip())].count("\n")


def _objects(
    path: Path, line: int, content: object, kind: str | None, skipped: Counter[str]
) -> Iterator[FileObject]:
    if not isinstance(content, dict):
        raise ManifestError(f"{path}:{line}: not an object but a {type(content).__name__}")
    kind = content.get("kind", kind)
    if not isinstance(kind, str):
        raise ManifestError(f"{path}:{line}: an object without kind")
    if kind in _LISTS:
        items = content.get("items") or ()
        if not isinstance(items, list):
            raise ManifestError(f"{path}:{line}: {kind}: items is no list")
        for item in items:
            yield from _objects(path, line, item, _LISTS[kind], skipped)
        return
    resource = _BY_KIND.get(kind)
    # Items of a typed list may leave out both kind and apiVersion.
    if resource is None or content.get("apiVersion", resource.api_version) != resource.api_version:
        skipped[f"{content.get('apiVersion')} {kind}"] += 1
        return
    item = _convert(path, line, content, resource)
    if selected(item):
        reduced = reduce_object(item)
        meta = reduced.metadata
        yield FileObject((resource.plural, meta.namespace, meta.name), reduced, line)


def _convert(path: Path, line: int, content: dict[object, object], resource: Resource) -> ApiObject:
    try:
        item: ApiObject = msgspec.convert(content, resource.kind)
    except msgspec.ValidationError as error:
        metadata = content.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        raise ManifestError(f"{path}:{line}: {resource.kind.__name__} {name or '?'}: {error}") from None
    meta = item.metadata
    if not meta.name:
        raise ManifestError(f"{path}:{line}: {resource.kind.__name__} without a name")
    namespace = (meta.namespace or "default") if resource.namespaced else ""
    if namespace == meta.namespace:
        return item
    placed: Meta = msgspec.structs.replace(meta, namespace=namespace)
    return msgspec.structs.replace(item, metadata=placed)
