"""What one resource's objects are now; every change to it says what changed. Pure and synchronous."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from rulecast_server.kube.decode import Gone, Key, Seen
from rulecast_server.kube.objects import ApiObject, ObjectEvent
from rulecast_server.kube.reduce import same_rules


class Entry(NamedTuple):
    """One object and where it stands."""

    object: ApiObject
    uid: str
    version: int


class Store:
    """The reduced objects of one resource.

    **Which state is newer.** `version` is the point up to which the store is complete: the newest list's,
    event's or bookmark's resourceVersion. Versions of one resource are ordered (etcd's revisions; KEP-5504).

    - A list older than `version` holds nothing that is not known better: what it lacks was added since,
      what it has more was deleted since. It comes from an API server that lags
      (kubernetes/kubernetes#97294) and is ignored as a whole.
    - Unless the history itself went back (etcd restored from a backup). A server that lags answers a
      *consistent* list (one without resourceVersion) from etcd, so an older consistent list means that.
      To be safe against a proxy that serves stale answers, it is the second such list in a row that is
      taken: it replaces everything, and `version` goes back.
    - A list that is not older is the truth, also where an object in it is older than ours.
    - A watch event never replaces an object by an older one, and never brings back what was deleted before.

    Versions that are not numbers (0 here) are compared with nothing and always taken.
    """

    def __init__(self, resource: str) -> None:
        self._resource = resource
        self._entries: dict[Key, Entry] = {}
        self._older: int | None = None
        self.version = 0
        self.changed = 0
        """The version of the newest object or deletion."""
        self.stale = 0
        """How many lists and events were ignored because newer state was known."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: Key) -> Entry | None:
        """What is held under a key."""
        return self._entries.get(key)

    def replace(
        self, seen: Collection[Seen], version: int, *, consistent: bool = True, keep: Collection[Key] = ()
    ) -> list[ObjectEvent] | None:
        """Take a whole list and return what differs from what was held; None: the list was ignored as older.

        `consistent`: the list was asked for without a resourceVersion. `keep` names objects that the list has
        but that could not be decoded; the last good ones stay.
        """
        if version and version < self.version:
            confirmed = self._older is not None
            self._older = version if consistent else None
            if not (consistent and confirmed):
                self.stale += 1
                return None
        if version < self.version:
            self.changed = 0
        self.changed = max((self.changed, *(item.version for item in seen)))
        self._older = None
        old, self._entries = self._entries, {}
        for key in keep:
            if key in old:
                self._entries[key] = old[key]
        events: list[ObjectEvent] = []
        for item in seen:
            event = self._put(item, old.get(item.key))
            if event is not None:
                events.append(event)
        gone = [key for key in old if key not in self._entries]
        # Deletions first: what is added may claim an address that a deleted object held.
        deletions = [ObjectEvent(self._resource, namespace, name, None) for namespace, name in gone]
        self.version = version
        return deletions + events

    def upsert(self, item: Seen) -> ObjectEvent | None:
        """Take an object from a watch; None: nothing that matters changed."""
        held = self._entries.get(item.key)
        known = self.version if held is None else held.version - 1
        if item.version and item.version <= known:
            self.stale += 1
            return None
        self._change(item.version)
        return self._put(item, held)

    def delete(self, gone: Gone) -> ObjectEvent | None:
        """Take a deletion from a watch; None: there was nothing to delete, or a newer object is held."""
        held = self._entries.get(gone.key)
        if held is not None and gone.version and gone.version < held.version:
            self.stale += 1
            return None
        self._change(gone.version)
        if held is None:
            return None
        del self._entries[gone.key]
        return ObjectEvent(self._resource, *gone.key, None)

    def reach(self, version: int) -> None:
        """Everything up to this version was seen."""
        self.version = max(self.version, version)

    def _change(self, version: int) -> None:
        self.reach(version)
        self.changed = max(self.changed, version)

    def _put(self, item: Seen, held: Entry | None) -> ObjectEvent | None:
        if held is not None and same_rules(held.object, item.object):
            self._entries[item.key] = Entry(held.object, item.uid, item.version)
            return None
        self._entries[item.key] = Entry(item.object, item.uid, item.version)
        return ObjectEvent(self._resource, *item.key, item.object)
