"""Policy routing (fib rules, rtnetlink(7)): packets with a mark bit look into a table of ours first."""

import errno
import socket
import struct
import sys
from typing import NamedTuple

from rulecast.model import Family
from rulecast_agent.kernel.netlink_batch import (
    CREATE,
    EXCLUSIVE,
    NetlinkBatch,
    NetlinkFailed,
    Request,
    attribute,
    attributes,
)

_NEW_RULE, _DEL_RULE, _GET_RULE = 32, 33, 34
_RULE = struct.Struct("=BBBBBBBBI")
"""Family, lengths of destination and source, TOS, table, two unused, action, flags."""
_PRIORITY, _MARK, _TABLE, _MASK, _PROTOCOL = 6, 10, 15, 16, 21
_LOOK_UP = 1
_AF = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_STATIC = 4


class MarkRule(NamedTuple):
    """Packets with the bit `mark` look into `table`; rules are asked by rising `priority`."""

    priority: int
    mark: int
    table: int


class RoutingRules:
    """The rules of the network namespace in which this was made."""

    def __init__(self) -> None:
        """Raises NetlinkFailed."""
        self._netlink = NetlinkBatch(0, "routing rules")

    def close(self) -> None:
        """Close the socket; rules stay."""
        self._netlink.close()

    def of_table(self, family: Family, table: int) -> set[MarkRule]:
        """Those that send marked packets to a table. Raises NetlinkFailed."""
        found = set()
        for answer in self._netlink.dump(Request(_GET_RULE, 0, _RULE.pack(_AF[family], *(0,) * 8))):
            fields = {kind: data for kind, data in attributes(answer[_RULE.size :]).items() if len(data) == 4}
            if {_PRIORITY, _MARK, _TABLE} <= fields.keys() and _u32(fields[_TABLE]) == table:
                found.add(MarkRule(_u32(fields[_PRIORITY]), _u32(fields[_MARK]), table))
        return found

    def ensure(self, family: Family, rule: MarkRule) -> bool:
        """Make it where it is not, and delete others to its table; whether anything was written."""
        there = self.of_table(family, rule.table)
        requests = [self._request(_NEW_RULE, family, rule)] if rule not in there else []
        requests += [self._request(_DEL_RULE, family, other) for other in sorted(there - {rule})]
        self._send(requests)
        return bool(requests)

    def delete(self, family: Family, table: int) -> bool:
        """Delete every rule to a table; whether there was one."""
        there = self.of_table(family, table)
        self._send([self._request(_DEL_RULE, family, rule) for rule in sorted(there)])
        return bool(there)

    def _send(self, requests: list[Request]) -> None:
        for code in self._netlink.send(requests).values():
            if code not in (errno.EEXIST, errno.ENOENT):
                raise NetlinkFailed(code, "routing rules")

    def _request(self, kind: int, family: Family, rule: MarkRule) -> Request:
        body = _RULE.pack(_AF[family], 0, 0, 0, 0, 0, 0, _LOOK_UP, 0)
        body += attribute(_PROTOCOL, bytes((_STATIC,)))
        values = ((_PRIORITY, rule.priority), (_MARK, rule.mark), (_MASK, rule.mark), (_TABLE, rule.table))
        body += b"".join(attribute(name, struct.pack("=I", value)) for name, value in values)
        return Request(kind, CREATE | EXCLUSIVE if kind == _NEW_RULE else 0, body)


def _u32(data: memoryview) -> int:
    return int.from_bytes(data, sys.byteorder)
