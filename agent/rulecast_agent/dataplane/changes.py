"""What a dataplane makes of an update before it compiles anything. Pure."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView, Update

V = TypeVar("V")
Changes = dict[ServiceKey, ServiceView | None]
"""None: gone."""


def with_owed(
    update: Update, *, owed: Mapping[ServiceKey, ServiceView | None], held: Iterable[ServiceKey]
) -> Changes:
    """The update's changes over those that are still `owed`; a full one takes away what else is `held`."""
    changes: Changes = {**owed, **update.services}
    if update.full:
        changes = dict.fromkeys((*held, *owed))
        changes.update(update.services)
    return changes


def of_family(changes: Mapping[ServiceKey, V], family: Family) -> dict[ServiceKey, V]:
    """Those of one family's services."""
    ending = f"/ipv{int(family)}"
    return {key: view for key, view in changes.items() if key.endswith(ending)}
