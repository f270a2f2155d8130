"""Who of many is refused is found by halving. Pure."""

from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def halves(many: Mapping[K, V]) -> tuple[dict[K, V], dict[K, V]]:
    """The first half and the second; of two or more, neither is empty."""
    items = iter(many.items())
    return dict(islice(items, len(many) // 2)), dict(items)
