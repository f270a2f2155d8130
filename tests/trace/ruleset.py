"""Reads an nft script of the kind that the agent writes into chains, maps and sets.

Only the statements that the agent uses are known; any other one is an error, not a guess.
"""

import re
from typing import NamedTuple

_TOKEN = re.compile(r'"[^"]*"|[{},;]|[^\s{},;]+')


class Hook(NamedTuple):
    """Where the kernel calls a chain, and when among others."""

    type: str
    name: str
    priority: int


class Chain(NamedTuple):
    """Rules, each as the words of it."""

    hook: Hook | None
    rules: list[list[str]]


Key = tuple[str, ...]


class Ruleset(NamedTuple):
    """One table."""

    chains: dict[str, Chain]
    maps: dict[str, dict[Key, str]]
    sets: dict[str, set[Key]]


def parse(script: str) -> Ruleset:
    """Read a script of `add` commands. Raises ValueError for what it does not know."""
    found = Ruleset({}, {}, {})
    for line in script.splitlines():
        verb, kind, _family, _table, *rest = words(line)
        if verb != "add":
            raise ValueError(f"not an add: {line}")
        if kind == "chain":
            _chain(found, rest)
        elif kind == "map":
            found.maps.setdefault(rest[0], {})
        elif kind == "set":
            found.sets.setdefault(rest[0], set())
        elif kind == "rule":
            found.chains[rest[0]].rules.append(_without_comment(rest[1:]))
        elif kind == "element":
            _elements(found, rest[0], rest[2:-1])
        elif kind != "table":
            raise ValueError(f"not known: {line}")
    return found


def words(text: str) -> list[str]:
    """Split at spaces; braces, commas and semicolons stand alone, quoted text stays whole."""
    return _TOKEN.findall(text)


def split(tokens: list[str]) -> list[list[str]]:
    """Cut at commas."""
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == ",":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def key_and_value(tokens: list[str]) -> tuple[Key, str]:
    """`A . B : VALUE`, or a key alone."""
    text = " ".join(tokens)
    key, _, value = text.partition(" : ")
    return tuple(key.split(" . ")), value


def _chain(found: Ruleset, rest: list[str]) -> None:
    name, hook = rest[0], None
    if len(rest) > 1:
        match = re.fullmatch(
            r"\{ type (\w+) hook (\w+) priority (-?\d+) ; policy accept ; \}", " ".join(rest[1:])
        )
        if match is None:
            raise ValueError(f"not a base chain with policy accept: {rest}")
        hook = Hook(match[1], match[2], int(match[3]))
    if name not in found.chains:
        found.chains[name] = Chain(hook, [])


def _elements(found: Ruleset, name: str, tokens: list[str]) -> None:
    for part in split(tokens):
        key, value = key_and_value(part)
        if name in found.maps:
            found.maps[name][key] = value
        else:
            found.sets[name].add(key)


def _without_comment(tokens: list[str]) -> list[str]:
    return tokens[:-2] if tokens[-2:-1] == ["comment"] else tokens
