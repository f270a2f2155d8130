"""Virtual servers over time: who gets new connections, who may finish, what is left of what was refused."""

import errno
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from rulecast.model import Endpoint, Family
from rulecast_agent.dataplane.ipvs.planner import Served
from rulecast_agent.dataplane.ipvs.servers import Servers, is_udp
from rulecast_agent.kernel.ipvs import Destination, Ipvs, Scheduling, Table, VirtualServer
from tests.nftables.values import endpoints

RR = Scheduling("rr")
WEB = VirtualServer(Family.IPV4, 6, "172.30.0.41", 80)
DNS = VirtualServer(Family.IPV4, 17, "172.30.0.10", 53)
OTHER = VirtualServer(Family.IPV4, 6, "172.30.0.42", 80)
A, B, C = endpoints(1, 2, 3)
Operation = tuple[str, VirtualServer, Any, int]


class FakeKernel:
    """Does what IPVS does with virtual servers and destinations, with its error numbers."""

    def __init__(self) -> None:
        self.servers: dict[VirtualServer, Scheduling] = {}
        self.weights: dict[VirtualServer, dict[Endpoint, int]] = {}
        self.open: dict[tuple[VirtualServer, Endpoint], int] = {}
        self.inactive: dict[tuple[VirtualServer, Endpoint], int] = {}
        self.left_out: set[VirtualServer] = set()
        self.half_open: set[tuple[str, int]] = set()
        self.refuses: dict[VirtualServer, int] = {}
        self.asked: list[Operation] = []

    def add(self, server: VirtualServer, how: Scheduling) -> Operation:
        return "add", server, how, 0

    def edit(self, server: VirtualServer, how: Scheduling) -> Operation:
        return "edit", server, how, 0

    def delete(self, server: VirtualServer) -> Operation:
        return "delete", server, None, 0

    def add_destination(self, server: VirtualServer, endpoint: Endpoint) -> Operation:
        return "add destination", server, endpoint, 1

    def weigh_destination(self, server: VirtualServer, endpoint: Endpoint, weight: int) -> Operation:
        return "weigh destination", server, endpoint, weight

    def delete_destination(self, server: VirtualServer, endpoint: Endpoint) -> Operation:
        return "delete destination", server, endpoint, 0

    def commit(self, requests: Sequence[Operation]) -> dict[int, int]:
        self.asked = list(requests)
        failed = {at: self._do(*request) for at, request in enumerate(requests)}
        return {at: code for at, code in failed.items() if code}

    def services(self) -> dict[VirtualServer, Scheduling]:
        return {server: how for server, how in self.servers.items() if server not in self.left_out}

    def destinations(self, server: VirtualServer) -> dict[Endpoint, Destination]:
        return {
            one: Destination(weight, self.open.get((server, one), 0), self.inactive.get((server, one), 0))
            for one, weight in self.weights.get(server, {}).items()
        }

    def table(self, marked: Mapping[int, Family]) -> Table:
        return {server: self.destinations(server) for server in self.weights if server not in self.left_out}

    def unfinished(self) -> set[tuple[str, int]]:
        return self.half_open

    def _do(self, verb: str, server: VirtualServer, what: Any, weight: int) -> int:
        if verb == "add":
            if server in self.refuses:
                return self.refuses[server]
            if server in self.servers:
                return errno.EEXIST
            self.servers[server], self.weights[server] = what, {}
        elif server not in self.servers:
            return errno.ESRCH
        elif verb == "edit":
            self.servers[server] = what
        elif verb == "delete":
            del self.servers[server], self.weights[server]
        elif (what in self.weights[server]) is (verb == "add destination"):
            return errno.EEXIST if verb == "add destination" else errno.ENOENT
        elif verb == "delete destination":
            del self.weights[server][what]
        else:
            self.weights[server][what] = weight
        return 0


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def servers(kernel: FakeKernel) -> Servers:
    return Servers(cast(Ipvs, kernel))


def served(*some: Endpoint, how: Scheduling = RR) -> Served:
    return Served(how, frozenset(some))


def bring(servers: Servers, wanted: Mapping[VirtualServer, Served | None]) -> dict[VirtualServer, str]:
    refused = servers.serve({server: each for server, each in wanted.items() if each is not None})
    servers.retire(wanted, is_udp=is_udp)
    return refused


def test_what_is_there_is_not_written_again(kernel: FakeKernel, servers: Servers) -> None:
    bring(servers, {WEB: served(A, B)})
    assert kernel.weights == {WEB: {A: 1, B: 1}}
    bring(servers, {WEB: served(A, B)})
    assert kernel.asked == []
    bring(servers, {WEB: served(A, B, C)})
    assert kernel.weights == {WEB: {A: 1, B: 1, C: 1}}


def test_another_scheduler_or_persistence_is_an_edit_that_keeps_the_endpoints(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A)})
    bring(servers, {WEB: served(A, how=Scheduling("rr", 600))})
    assert kernel.servers == {WEB: Scheduling("rr", 600)}
    assert kernel.weights == {WEB: {A: 1}}


def test_an_endpoint_that_goes_keeps_its_connections_and_gets_no_new_ones(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A, B)})
    kernel.open[WEB, B] = 2
    bring(servers, {WEB: served(A)})
    assert kernel.weights == {WEB: {A: 1, B: 0}}
    servers.sweep()
    assert kernel.weights == {WEB: {A: 1, B: 0}}
    kernel.open.clear()
    servers.sweep()
    assert kernel.weights == {WEB: {A: 1}}
    assert servers.draining == {}


def test_an_endpoint_that_returns_before_it_has_drained_is_revived(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A, B)})
    kernel.open[WEB, B] = 1
    bring(servers, {WEB: served(A)})
    bring(servers, {WEB: served(A, B)})
    assert kernel.weights == {WEB: {A: 1, B: 1}}
    kernel.open.clear()
    servers.sweep()
    assert kernel.weights == {WEB: {A: 1, B: 1}}


def test_a_udp_endpoint_goes_at_once(kernel: FakeKernel, servers: Servers) -> None:
    bring(servers, {DNS: served(A, B)})
    kernel.open[DNS, B] = 5
    bring(servers, {DNS: served(A)})
    assert kernel.weights == {DNS: {A: 1}}
    bring(servers, {DNS: None})
    assert kernel.servers == {}


def test_a_virtual_server_stays_until_the_last_of_its_connections_ends(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A, B)})
    kernel.open[WEB, A] = 1
    bring(servers, {WEB: None})
    servers.sweep()
    assert kernel.weights == {WEB: {A: 0, B: 0}}
    kernel.open.clear()
    servers.sweep()
    assert kernel.servers == {}
    assert servers.held == {}


def test_a_virtual_server_that_returns_while_it_drains_serves_again(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A)})
    kernel.open[WEB, A] = 1
    bring(servers, {WEB: None})
    bring(servers, {WEB: served(B)})
    assert kernel.weights == {WEB: {A: 0, B: 1}}
    kernel.open.clear()
    servers.sweep()
    assert kernel.weights == {WEB: {B: 1}}


@pytest.mark.parametrize("many", [1, 30])
def test_virtual_servers_to_which_nothing_is_open_go_at_once(
    kernel: FakeKernel, servers: Servers, many: int
) -> None:
    some = [WEB._replace(port=port) for port in range(1, many + 1)]
    bring(servers, {server: served(A) for server in some})
    kernel.open[some[0], A] = 1
    bring(servers, dict.fromkeys(some))
    assert kernel.weights == {some[0]: {A: 0}}


def test_connections_that_are_over_keep_no_virtual_server_and_half_open_ones_do(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A), OTHER: served(A)})
    kernel.inactive = {(WEB, A): 3, (OTHER, A): 1}
    kernel.half_open = {(WEB.address, WEB.port)}
    bring(servers, {WEB: None, OTHER: None})
    assert kernel.weights == {WEB: {A: 0}}
    kernel.half_open = set()
    servers.sweep()
    assert kernel.servers == {}


def test_a_weight_that_someone_else_set_is_not_right_and_is_mended(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A, B)})
    kernel.weights[WEB][A] = 50
    servers.read(lambda _: True)
    assert not servers.right(WEB, served(A, B))
    bring(servers, {WEB: served(A, B)})
    assert kernel.weights == {WEB: {A: 1, B: 1}}
    assert servers.right(WEB, served(A, B))


def test_a_refused_server_is_named_and_all_others_are_made(kernel: FakeKernel, servers: Servers) -> None:
    kernel.refuses[WEB] = errno.ENOENT
    refused = bring(servers, {WEB: served(A), OTHER: served(B), DNS: served(C)})
    assert refused == {WEB: "no such scheduler (is its module there?)"}
    assert kernel.weights == {OTHER: {B: 1}, DNS: {C: 1}}
    del kernel.refuses[WEB]
    assert bring(servers, {WEB: served(A)}) == {}
    assert kernel.weights[WEB] == {A: 1}


def test_what_is_read_back_is_adopted_and_no_weight_is_taken_meanwhile(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A, B), OTHER: served(C)})
    kernel.weights[WEB][B] = 0
    again = Servers(cast(Ipvs, kernel))
    again.read(lambda server: server == WEB)
    assert again.held == {WEB: served(A, B)}
    assert again.draining == {WEB: {B}}
    bring(again, {WEB: served(A)})
    assert kernel.asked == []
    assert kernel.weights == {WEB: {A: 1, B: 0}, OTHER: {C: 1}}


def test_what_someone_else_deleted_is_made_again_after_a_read_back(
    kernel: FakeKernel, servers: Servers
) -> None:
    bring(servers, {WEB: served(A), OTHER: served(B)})
    kernel.commit([kernel.delete(WEB)])
    servers.read(lambda _: True)
    bring(servers, {WEB: served(A), OTHER: served(B)})
    assert kernel.weights == {WEB: {A: 1}, OTHER: {B: 1}}


def test_only_the_servers_that_are_named_are_deleted(kernel: FakeKernel, servers: Servers) -> None:
    foreign = VirtualServer(Family.IPV4, 6, "192.0.2.200", 443)
    kernel.commit([kernel.add(foreign, RR), kernel.add_destination(foreign, A)])
    bring(servers, {WEB: served(A)})
    servers.delete(list(servers.held))
    assert kernel.weights == {foreign: {A: 1}}


def test_what_the_kernels_whole_table_leaves_out_is_asked_for(kernel: FakeKernel, servers: Servers) -> None:
    some = [WEB._replace(port=port) for port in range(1, 31)]
    bring(servers, {server: served(A) for server in some})
    kernel.left_out = {some[7]}
    servers.read(lambda _: True)
    assert servers.held == {server: served(A) for server in some}
