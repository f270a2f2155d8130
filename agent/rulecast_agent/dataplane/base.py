"""The seam between the agent and a kernel mechanism (nftables, iptables, IPVS).

A dataplane is synchronous and is driven from one thread only: netlink and subprocess calls block.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rulecast.model import Family
from rulecast.view import Receipt, Update


class LocalDetector(msgspec.Struct, frozen=True, kw_only=True):
    """How "sent by a pod of this node" is told (kube-proxy's detectLocalMode), resolved for one family.

    At most one field is set. None set: no detector, and kube-proxy's no-detector behaviour.
    """

    source_cidr: str = ""
    """ClusterCIDR and NodeCIDR modes."""
    interface: str = ""
    """BridgeInterface mode: the exact name of the input interface."""
    interface_prefix: str = ""
    """InterfaceNamePrefix mode."""


class FamilyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Node facts that shape the rules of one family."""

    detector: LocalDetector = LocalDetector()
    node_ips: tuple[str, ...] = ()
    """The node's own addresses as its Node object has them."""
    nodeport_addresses: tuple[str, ...] | None = ()
    """Addresses on which node ports answer; None: every local address (loopback excluded)."""
    service_cidrs: tuple[str, ...] = ()


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the rules need and that no Service says."""

    families: dict[Family, FamilyConfig]
    """Only families present here are programmed."""
    masquerade_all: bool = False
    masquerade_mark: int = 0x4000
    """The one packet-mark bit that the rules use, kube-proxy's default."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """What a read-back found that was not as meant (and has mended)."""

    differences: Sequence[str] = ()
    """One line each, at most a bounded number of them."""
    count: int = 0


class DataplaneError(Exception):
    """The kernel mechanism cannot be used at all; `str()` is one clear line."""


class Dataplane(Protocol):
    """One mechanism. The first `apply` is full; nothing touches the kernel before it."""

    def probe(self) -> None:
        """Look whether the mechanism can be used here: its program, the kernel's part, our rights.

        Writes nothing. Raises DataplaneError, which at start is the operator's to mend.
        """
        ...

    def apply(self, update: Update, host: HostConfig) -> Receipt:
        """Bring the kernel to `update`; only differences are written.

        On the first call what is in the kernel is read back and adopted. A service that the kernel refuses
        is left out, named in the receipt, and tried again by `retry`. Raises DataplaneError when nothing
        could be written; the kernel then holds what it held.
        """
        ...

    def retry(self) -> Receipt | None:
        """Try again what was refused; None when nothing was pending."""
        ...

    def check(self) -> Drift | None:
        """Cheap look whether someone else changed our rules; a full read-back and repair only if so.

        None when nothing was foreign. Called every second or so.
        """
        ...

    def verify(self) -> Drift:
        """Full read-back against what is meant, and repair."""
        ...

    def cleanup(self) -> bool:
        """Remove every object of ours; True when there was something. Needs no earlier apply."""
        ...
