"""A dummy interface of our own that holds addresses, so that the kernel takes their packets as its own."""

import errno
import socket
import struct
from collections.abc import Iterable
from ipaddress import ip_address

from rulecast.model import Family
from rulecast_agent.kernel.netlink_batch import (
    CREATE,
    EXCLUSIVE,
    NetlinkBatch,
    NetlinkFailed,
    Request,
    attribute,
    attributes,
    nested,
)

_NEW_LINK, _DEL_LINK, _GET_LINK = 16, 17, 18
_NEW_ADDRESS, _DEL_ADDRESS, _GET_ADDRESS = 20, 21, 22
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_UP = 0x1
_NO_ARP = 0x80
_NO_DAD = 0x2
_AF = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_SCOPE_HOST = 254


class Dummy:
    """The interface, in the network namespace in which this was made."""

    def __init__(self, name: str) -> None:
        """Raises NetlinkFailed."""
        self._name = name
        self._netlink = NetlinkBatch(0, f"interface {name}")

    def close(self) -> None:
        """Close the socket; the interface stays."""
        self._netlink.close()

    def index(self) -> int | None:
        """None when it is not there. Raises NetlinkFailed."""
        body = _LINK.pack(0, 0, 0, 0, 0) + attribute(3, self._name.encode() + b"\0")
        try:
            return int(_LINK.unpack_from(self._netlink.ask(Request(_GET_LINK, 0, body)))[2])
        except NetlinkFailed as error:
            if error.code == errno.ENODEV:
                return None
            raise

    def ensure(self) -> int:
        """Make it and set it up, without ARP; its index. Raises NetlinkFailed."""
        index = self.index()
        if index is None:
            body = _LINK.pack(0, 0, 0, _UP | _NO_ARP, _UP | _NO_ARP)
            body += attribute(3, self._name.encode() + b"\0") + nested(18, attribute(1, b"dummy\0"))
            failed = self._netlink.send([Request(_NEW_LINK, CREATE | EXCLUSIVE, body)])
            if failed:
                raise NetlinkFailed(failed[0], f"making the interface {self._name} (module dummy)")
            index = self.index()
            assert index is not None
        return index

    def addresses(self, index: int, family: Family) -> set[str]:
        """What it holds, without link-local ones."""
        found = set()
        for answer in self._netlink.dump(Request(_GET_ADDRESS, 0, _ADDRESS.pack(_AF[family], 0, 0, 0, 0))):
            if _ADDRESS.unpack_from(answer)[4] == index:
                fields = attributes(answer[_ADDRESS.size :])
                address = ip_address(bytes(fields.get(2, fields[1])))
                if not address.is_link_local:
                    found.add(str(address))
        return found

    def change(
        self, index: int, family: Family, *, add: Iterable[str], remove: Iterable[str]
    ) -> dict[str, int]:
        """Put addresses on it and take others off; the error numbers of those that failed."""
        changes = [(address, _NEW_ADDRESS, CREATE) for address in add]
        changes += [(address, _DEL_ADDRESS, 0) for address in remove]
        requests = []
        for address, kind, flags in changes:
            packed = ip_address(address).packed
            # Host scope keeps IPv4 ones from being chosen as a source towards others.
            scope = _SCOPE_HOST if family is Family.IPV4 else 0
            body = _ADDRESS.pack(_AF[family], 8 * len(packed), _NO_DAD, scope, index)
            requests.append(Request(kind, flags, body + attribute(2, packed) + attribute(1, packed)))
        failed = self._netlink.send(requests)
        harmless = (errno.EEXIST, errno.EADDRNOTAVAIL)
        return {changes[at][0]: code for at, code in failed.items() if code not in harmless}

    def delete(self) -> bool:
        """Delete it with all its addresses; whether it was there."""
        index = self.index()
        if index is None:
            return False
        self._netlink.send([Request(_DEL_LINK, 0, _LINK.pack(0, 0, index, 0, 0))])
        return True
