"""What the feed delivered and the kernel does not have yet, merged to the latest value of each service."""

from rulecast.model import ClusterInfo, NodeInfo, Revision, ServiceKey
from rulecast.view import ServiceView, Update


class Pending:
    """Merges updates until they are taken; what could not be applied is put back under what came since.

    A full update in it stays full until it is taken. Memory is bounded by the number of services.
    """

    _services: dict[ServiceKey, ServiceView | None]
    _triggers: dict[ServiceKey, float]
    _full: bool
    _last: tuple[Revision, NodeInfo | None, ClusterInfo] | None

    def __init__(self) -> None:
        self._clear()

    def __bool__(self) -> bool:
        return self._last is not None

    def __len__(self) -> int:
        return len(self._services)

    @property
    def full(self) -> bool:
        """A full update is in it."""
        return self._full

    def add(self, update: Update) -> None:
        """Merge an update that is newer than all in here; costs what the update has."""
        if update.full:
            self._services = {key: view for key, view in update.services.items() if view is not None}
            self._full = True
        elif self._full:
            for key, view in update.services.items():
                if view is None:
                    self._services.pop(key, None)
                else:
                    self._services[key] = view
        else:
            self._services.update(update.services)
        # The latency of a service counts from its earliest change that is not in the kernel.
        for key, trigger in update.trigger_times.items():
            self._triggers.setdefault(key, trigger)
        self._last = (update.revision, update.node, update.cluster)

    def take(self) -> Update | None:
        """Everything as one update; None when there is nothing."""
        if self._last is None:
            return None
        revision, node, cluster = self._last
        update = Update(
            revision=revision,
            full=self._full,
            services=self._services,
            node=node,
            cluster=cluster,
            trigger_times=self._triggers,
        )
        self._clear()
        return update

    def restore(self, update: Update) -> None:
        """Put back an update that was taken and not applied, as older than all in here."""
        newer = self.take()
        self.add(update)
        if newer is not None:
            self.add(newer)

    def _clear(self) -> None:
        self._services = {}
        self._triggers = {}
        self._full = False
        self._last = None
