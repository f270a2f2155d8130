"""Virtual servers in the kernel: bringing them to what is meant, and letting endpoints that go drain."""

import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from rulecast.model import Endpoint
from rulecast_agent.dataplane.ipvs.planner import Served
from rulecast_agent.kernel.ipvs import PROTOCOLS, Ipvs, Table, VirtualServer, words
from rulecast_agent.kernel.netlink_batch import Request

_UDP = PROTOCOLS["UDP"]
_FEW = 20
"""Virtual servers of which one at a time is asked; for more, all are read at once."""
_HARMLESS = {errno.EEXIST, errno.ESRCH}
"""Someone made or deleted it meanwhile; a read-back tells what is there."""


class Servers:
    """All families' virtual servers, as we believe the kernel has them.

    An endpoint that goes has no weight until its connections end, and a virtual server without endpoints
    stays as long, so that open connections go on; UDP endpoints go at once (kube-proxy's graceful
    termination).
    """

    def __init__(self, ipvs: Ipvs) -> None:
        self._ipvs = ipvs
        self.held: dict[VirtualServer, Served] = {}
        """With the endpoints that are draining."""
        self.draining: dict[VirtualServer, set[Endpoint]] = {}
        """Without weight. A server all of whose endpoints are here is to go with the last one."""
        self._odd: set[tuple[VirtualServer, Endpoint]] = set()
        """Whose weight someone else set."""

    def serve(self, wanted: Mapping[VirtualServer, Served]) -> dict[VirtualServer, str]:
        """Make servers and endpoints that are missing; what was refused, in words."""
        requests: list[Request] = []
        about: list[VirtualServer] = []

        def ask(server: VirtualServer, request: Request) -> None:
            requests.append(request)
            about.append(server)

        for server, served in wanted.items():
            held = self.held.get(server)
            if held is None:
                ask(server, self._ipvs.add(server, served.how))
            elif held.how != served.how:
                ask(server, self._ipvs.edit(server, served.how))
            there = held.endpoints if held else frozenset()
            draining = self.draining.get(server, set())
            for endpoint in sorted(served.endpoints):
                if endpoint in draining or (server, endpoint) in self._odd:
                    ask(server, self._ipvs.weigh_destination(server, endpoint, 1))
                elif endpoint not in there:
                    ask(server, self._ipvs.add_destination(server, endpoint))
        refused = self._commit(requests, about)
        if self._odd:
            self._odd -= {(server, one) for server, served in wanted.items() for one in served.endpoints}
        for server, served in wanted.items():
            if server not in refused:
                draining = self.draining.get(server, set()) - served.endpoints
                before = self.held.get(server)
                if before is None or before.endpoints <= served.endpoints:
                    self.held[server] = served
                else:
                    self.held[server] = Served(served.how, before.endpoints | served.endpoints)
                self._set_draining(server, draining)
        return refused

    def retire(
        self, wanted: Mapping[VirtualServer, Served | None], *, is_udp: Callable[[VirtualServer], bool]
    ) -> None:
        """Take the weight from endpoints that are not wanted, and delete servers to which nothing is open."""
        requests: list[Request] = []
        about: list[VirtualServer] = []
        leaving: list[VirtualServer] = []
        for server, served in wanted.items():
            held = self.held.get(server)
            if held is None:
                continue
            gone = held.endpoints - (served.endpoints if served else frozenset())
            if is_udp(server):
                if served is None:
                    requests.append(self._ipvs.delete(server))
                    self._forget(server)
                else:
                    requests += [self._ipvs.delete_destination(server, endpoint) for endpoint in sorted(gone)]
                    self._drop(server, gone)
            else:
                if served is None:
                    leaving.append(server)
                draining = self.draining.get(server, set())
                requests += [
                    self._ipvs.weigh_destination(server, endpoint, 0) for endpoint in sorted(gone - draining)
                ]
                self._set_draining(server, draining | gone)
            about += [server] * (len(requests) - len(about))
        self._commit(requests, about)
        if leaving:
            # After they have lost their weight: nothing can come any more.
            self._delete_ended(leaving)

    def sweep_leaving(self) -> None:
        """Delete servers that have drained, when they are few enough to be asked one by one."""
        leaving = [
            one
            for one, left in self.draining.items()
            if one in self.held and left >= self.held[one].endpoints
        ]
        if len(leaving) <= _FEW:
            self._delete_ended(leaving)

    def sweep(self) -> None:
        """Delete what has drained."""
        table = self._table(self.draining)
        requests: list[Request] = []
        about: list[VirtualServer] = []
        leaving = []
        for server, draining in list(self.draining.items()):
            if server not in self.held:
                self._set_draining(server, set())
            elif draining >= self.held[server].endpoints:
                leaving.append(server)
            else:
                there = table[server]
                done = {one for one in draining if one not in there or not any(there[one][1:])}
                requests += [
                    self._ipvs.delete_destination(server, one) for one in sorted(done) if one in there
                ]
                self._drop(server, done)
                self._set_draining(server, draining - done)
                about += [server] * (len(requests) - len(about))
        self._commit(requests, about)
        self._delete_ended(leaving)

    def _delete_ended(self, leaving: Sequence[VirtualServer]) -> None:
        """Delete those of `leaving` to which nothing is open. One that only remembers closed ones goes too:

        it would answer new clients in place of who has its port now.
        """
        ended: list[VirtualServer] = []
        doubtful: list[VirtualServer] = []
        for server, destinations in self._table(leaving).items():
            there = destinations.values()
            if not any(one.active for one in there):
                (doubtful if any(one.inactive for one in there) else ended).append(server)
        if any(not server.mark for server in doubtful):
            half_open = self._ipvs.unfinished()
            ended += [one for one in doubtful if not one.mark and (one.address, one.port) not in half_open]
        self.delete(ended)

    def _table(self, servers: Collection[VirtualServer]) -> Table:
        """The destinations of these, as they are in the kernel."""
        table: Table = {}
        if len(servers) > _FEW:
            table = self._ipvs.table({server.mark: server.family for server in servers if server.mark})
        # Where other network namespaces have virtual servers too, /proc leaves out some of ours: from one
        # read to the next the kernel counts on with theirs (ip_vs_info_seq_next, seen in 6.1).
        return {
            server: table[server] if server in table else self._ipvs.destinations(server)
            for server in servers
        }

    def read(self, ours: Callable[[VirtualServer], bool]) -> None:
        """Believe what the kernel has."""
        services = self._ipvs.services()
        # A dump of many messages counts on, too: a change in another namespace may hide one of ours.
        for server in self.held.keys() - services.keys():
            if self._ipvs.destinations(server):
                services[server] = self.held[server].how
        found = {server: how for server, how in services.items() if ours(server)}
        table = self._table(found)
        self.held = {server: Served(how, frozenset(table[server])) for server, how in found.items()}
        self._odd = set()
        for server in self.held:
            there = table[server]
            self._set_draining(server, {one for one, state in there.items() if state.weight == 0})
            self._odd |= {(server, one) for one, state in there.items() if state.weight > 1}
        self.draining = {server: left for server, left in self.draining.items() if server in self.held}

    def delete(self, servers: Iterable[VirtualServer]) -> None:
        """Delete servers with all that is open."""
        gone = list(servers)
        self._commit([self._ipvs.delete(server) for server in gone], gone)
        for server in gone:
            self._forget(server)

    def right(self, server: VirtualServer, served: Served) -> bool:
        """The kernel has it as it is meant."""
        held = self.held.get(server)
        if held is None or held.how != served.how:
            return False
        live = held.endpoints - self.draining.get(server, set())
        return live == served.endpoints and not (
            self._odd and any((server, one) in self._odd for one in live)
        )

    def _drop(self, server: VirtualServer, endpoints: AbstractSet[Endpoint]) -> None:
        held = self.held[server]
        self.held[server] = Served(held.how, held.endpoints - endpoints)

    def _forget(self, server: VirtualServer) -> None:
        self.held.pop(server, None)
        self.draining.pop(server, None)

    def _set_draining(self, server: VirtualServer, endpoints: set[Endpoint]) -> None:
        if endpoints:
            self.draining[server] = endpoints
        else:
            self.draining.pop(server, None)

    def _commit(self, requests: list[Request], about: list[VirtualServer]) -> dict[VirtualServer, str]:
        failed = self._ipvs.commit(requests)
        return {about[at]: words(code) for at, code in failed.items() if code not in _HARMLESS}


def is_udp(server: VirtualServer) -> bool:
    """Of an address; marks need their service's word."""
    return server.protocol == _UDP
