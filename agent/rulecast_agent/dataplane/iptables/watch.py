"""Notices that someone else changed the rules, without reading them."""

from collections.abc import Callable, Sequence

from rulecast_agent.kernel.iptables import Backend, Iptables, IptablesMissing
from rulecast_agent.kernel.nft_netlink import NetlinkError, NftSocket

_PAUSE = 10
"""Pause after a full read-back, in lengths of it."""
_LONGEST_PAUSE = 30.0
_TABLES = ("nat", "filter")


class Watch:
    """Compares a number that every change moves with the one after our own last write.

    With the nft backend that is the generation of the kernel's ruleset, with legacy the size of each table
    (IPT_SO_GET_INFO). Kubernetes/kubernetes#129128: a canary in one table does not see a flush of another.
    """

    def __init__(self, *, backend: Backend, iptables: Sequence[Iptables], clock: Callable[[], float]) -> None:
        self._iptables, self._clock = iptables, clock
        try:
            self._socket = NftSocket() if backend is Backend.NFT else None
        except OSError as error:
            raise IptablesMissing(f"nf_tables netlink socket: {error.strerror}") from None
        self._seen: object = None
        self._before: object = None
        self._commits = 0
        self._looked = True
        """Whether the cheap look was had since the last foreign change."""
        self._foreign = False
        self._not_before = 0.0

    def close(self) -> None:
        """Close the netlink socket."""
        if self._socket is not None:
            self._socket.close()

    def begin(self) -> None:
        """We are about to write or to compare. What others changed until now is remembered."""
        self._before = self._state()
        self._commits = self._count()
        if self._seen is not None and self._before != self._seen:
            self._foreign, self._looked = True, False

    def wrote(self) -> None:
        """We have written. Changes by others meanwhile show in the generation; legacy cannot tell."""
        if isinstance(self._before, int):
            self._seen = (self._before + self._count() - self._commits) & 0xFFFFFFFF
        else:
            self._seen = self._state()

    def compared(self, seconds: float) -> None:
        """After `begin`, all was read back, which took so long, and mended."""
        self._foreign, self._looked = False, True
        self._not_before = self._clock() + min(_LONGEST_PAUSE, _PAUSE * seconds)
        self.wrote()

    def due(self, hooked: Callable[[], bool]) -> bool:
        """Whether a full read-back is called for: at once if the cheap look `hooked` says so, else paced."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            self._foreign, self._looked = True, False
        if not self._looked:
            self._looked = True
            if not hooked():
                return True
        return self._foreign and self._clock() >= self._not_before

    def _count(self) -> int:
        return sum(iptables.commits for iptables in self._iptables)

    def _state(self) -> object:
        try:
            if self._socket is not None:
                return self._socket.generation()
            return [iptables.sizes(table) for iptables in self._iptables for table in _TABLES]
        except (NetlinkError, OSError) as error:
            raise IptablesMissing(f"cannot look for changes: {error}") from None
