"""A chain that leads to one of many rules in a constant number of steps: a tree over the bits of a key. Pure.

A chain with more than `LEAF` keys is one over their next two bits that differ, and so on; so a packet passes
some 8 rules in a leaf and 2 or 3 a level, and the number of levels grows with the logarithm of the number of
keys. What the chains hold depends on the keys alone, not on how they came, so that a restart finds the same.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rulecast_agent.dataplane.iptables import names

LEAF = 16
"""The most keys that a chain holds itself."""
_STEP = 2
"""Bits that a level tells apart."""
_FEW = 200
"""Changes up to this many cost less by themselves than sorting everything."""
Rules = tuple[str, ...]


class Delta(NamedTuple):
    """What a change of keys means for the chains."""

    writes: dict[str, Rules]
    """Chains with new contents; those that are gone to come before those that go to them."""
    deletes: list[str]
    """Chains that nothing goes to any more; those that go to others come first."""


class _Content(NamedTuple):
    rules: Rules
    children: tuple[str, ...]


class Dispatch:
    """One tree."""

    def __init__(self, *, root: str, code: str, width: int, match: Callable[[int, int], str]) -> None:
        """`width`: bits of a key, an even number. `match(prefix, length)` selects what begins so."""
        self._root, self._code, self._width, self._match = root, code, width, match
        self._keys: list[int] = []
        self._actions: dict[int, Rules] = {}
        self._contents: dict[str, _Content] = {}

    @property
    def chains(self) -> Mapping[str, Rules]:
        """Every chain of the tree, those that are gone to first; the root's too once there was a change."""
        found: dict[str, Rules] = {}

        def visit(name: str) -> None:
            content = self._contents[name]
            for child in content.children:
                visit(child)
            found[name] = content.rules

        if self._contents:
            visit(self._root)
        return found

    @property
    def root(self) -> tuple[str, Rules]:
        """The chain at which every packet begins: its name and rules."""
        return self._root, self._contents[self._root].rules

    def __len__(self) -> int:
        return len(self._keys)

    def action(self, key: int) -> Rules:
        """What is done with a key; empty when it is not there."""
        return self._actions.get(key, ())

    def change(self, changes: Mapping[int, Rules]) -> Delta:
        """Take other actions for some keys (empty: none), and tell what that means for the chains."""
        self._take(changes)
        visit = _Visit(self, self._contents, sorted(changes))
        visit.node(self._root, 0, len(self._keys), 0, 0, len(changes))
        deletes = visit.gone()
        for name in deletes:
            del self._contents[name]
        self._contents.update(visit.written)
        return Delta({name: content.rules for name, content in visit.written.items()}, deletes)

    def _take(self, changes: Mapping[int, Rules]) -> None:
        added = [key for key, action in changes.items() if action and key not in self._actions]
        gone = [key for key, action in changes.items() if not action and key in self._actions]
        for key, action in changes.items():
            if action:
                self._actions[key] = action
        for key in gone:
            del self._actions[key]
        if len(added) + len(gone) > _FEW:
            self._keys = sorted(self._actions)
            return
        for key in gone:
            del self._keys[bisect_left(self._keys, key)]
        for key in added:
            insort(self._keys, key)

    def _content(self, low: int, high: int, depth: int) -> tuple[_Content, list[tuple[str, int, int, int]]]:
        """What a chain for the keys from `low` to `high` holds, and its children: name, low, high, depth."""
        keys = self._keys
        if high - low <= LEAF or depth >= self._width:
            rules = [
                f"{self._match(key, self._width)} {action}".lstrip()
                for key in keys[low:high]
                for action in self._actions[key]
            ]
            return _Content(tuple(rules), ()), []
        children = []
        lines = []
        length = self._common(keys[low], keys[high - 1]) + _STEP
        shift = self._width - length
        at = low
        while at < high:
            prefix = keys[at] >> shift
            end = bisect_left(keys, (prefix + 1) << shift, at, high)
            name = names.dispatch_chain(self._code, prefix, length)
            children.append((name, at, end, length))
            lines.append(f"{self._match(prefix, length)} -j {name}".lstrip())
            at = end
        return _Content(tuple(lines), tuple(name for name, *_ in children)), children

    def _common(self, first: int, last: int) -> int:
        """How many bits are the same, in whole steps."""
        return (self._width - (first ^ last).bit_length()) // _STEP * _STEP


class _Visit:
    """One walk over the part of the tree that a change may concern."""

    def __init__(self, tree: Dispatch, before: Mapping[str, _Content], changed: Sequence[int]) -> None:
        self._tree, self._before, self._changed = tree, before, changed
        self.written: dict[str, _Content] = {}
        self._seen: set[str] = set()

    def node(self, name: str, low: int, high: int, depth: int, first: int, last: int) -> None:
        """Look at a chain; `first` to `last` are the changed keys in its range."""
        tree = self._tree
        content, children = tree._content(low, high, depth)
        self._seen.add(name)
        same = self._before.get(name) == content
        if same and first == last:
            return
        for child, child_low, child_high, length in children:
            shift = tree._width - length
            prefix = tree._keys[child_low] >> shift
            begin = bisect_left(self._changed, prefix << shift, first, last)
            end = bisect_left(self._changed, (prefix + 1) << shift, begin, last)
            self.node(child, child_low, child_high, length, begin, end)
        if not same:
            self.written[name] = content

    def gone(self) -> list[str]:
        """The chains that are left behind."""
        found: dict[str, None] = {}
        stack = [child for name in self.written for child in self._children(name)]
        while stack:
            name = stack.pop()
            if name not in self._seen and name not in found:
                found[name] = None
                stack.extend(self._children(name))
        return list(found)

    def _children(self, name: str) -> Iterable[str]:
        content = self._before.get(name)
        return content.children if content else ()
