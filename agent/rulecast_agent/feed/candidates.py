"""Which server to try next."""

import random
from collections.abc import Iterable


class Candidates:
    """The servers known at this moment, the one to use first.

    Each agent begins somewhere else and stays there for as long as that works, so that a fleet spreads
    over its servers without anybody telling it to.
    """

    def __init__(self, servers: Iterable[str] = (), *, draw: random.Random | None = None) -> None:
        self._draw = draw or random.Random()  # noqa: S311  (spreads load, guards no secret)
        self._servers: list[str] = []
        self.update(servers)

    def __len__(self) -> int:
        return len(self._servers)

    @property
    def first(self) -> str | None:
        """The one to use; None when none is known."""
        return self._servers[0] if self._servers else None

    def failed(self) -> None:
        """The first one did not serve: it is tried again after all others."""
        if self._servers:
            self._servers.append(self._servers.pop(0))

    def update(self, servers: Iterable[str]) -> list[str]:
        """These are the servers now; returns those that no longer are.

        The first one stays first. When it is gone, all others are drawn anew: else whoever outlives a
        rolling update of the servers would have the whole fleet, and the last one to come nobody.
        """
        new = list(dict.fromkeys(servers))
        known, wanted = set(self._servers), set(new)
        if wanted == known:
            return []
        gone = [server for server in self._servers if server not in wanted]
        kept = [server for server in self._servers if server in wanted]
        added = [server for server in new if server not in known]
        if kept and kept[0] == self._servers[0]:
            self._draw.shuffle(added)
            self._servers = kept + added
        else:
            self._servers = kept + added
            self._draw.shuffle(self._servers)
        return gone
