"""The Nodes service: what every node's kernel has, a stream of changes of that, and waiting for it."""

import asyncio
import re
from collections.abc import AsyncIterator, Collection
from typing import Any, NoReturn

import grpc

from rulecast.v1 import rules_pb2 as pb
from rulecast_server.feed import Hub
from rulecast_server.feed.nodes import (
    Applied,
    NodeState,
    node_state,
    registered_nodes,
    service_ports,
    streams_by_node,
)
from rulecast_server.rpc.guard import InspectionGuard
from rulecast_server.rpc.peers import AnyContext
from rulecast_server.rpc.statuses import node_status

SERVICE_NAME = "rulecast.v1.Nodes"
_SERVICE = re.compile(r"[^/:\s]+/[^/:\s]+")
_LISTED_ERRORS = 10
"""Of each agent in a list; `Get` names all."""
_MISSING = 100
_AT_A_TIME = 200
"""Nodes that are looked at before other streams get their turn, about 3 ms."""
_MESSAGE = 1_000
"""Nodes in one message of a stream: below the 4 MiB that clients take."""
_POLL = 0.05
_MAX_WAIT_MS = 600_000


class NodesService:
    """Serves one hub."""

    def __init__(self, hub: Hub, guard: InspectionGuard) -> None:
        self._hub = hub
        self._guard = guard

    def handler(self) -> grpc.GenericRpcHandler:
        """What to add to a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "List": _unary(self._list, pb.ListNodesRequest, pb.ListNodesResponse),
                "Get": _unary(self._get, pb.GetNodeRequest, pb.NodeStatus),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self._watch,
                    request_deserializer=pb.WatchNodesRequest.FromString,
                    response_serializer=pb.NodeChanges.SerializeToString,
                ),
                "WaitApplied": _unary(self._wait_applied, pb.WaitAppliedRequest, pb.WaitAppliedResponse),
            },
        )

    async def _list(self, request: pb.ListNodesRequest, _context: AnyContext) -> pb.ListNodesResponse:
        states = await self._states()
        wanted = set(request.names)
        now = self._hub.clock()
        answer = pb.ListNodesResponse(
            revision=self._hub.log.revision,
            resource_versions=self._hub.log.resource_versions,
            total=len(states),
            current=sum(state.current for state in states),
        )
        for index, state in enumerate(states):
            if index % _AT_A_TIME == 0:
                await asyncio.sleep(0)
            if (not wanted or state.name in wanted) and not (request.behind and state.current):
                answer.nodes.append(node_status(state, now, errors=_LISTED_ERRORS))
        return answer

    async def _get(self, request: pb.GetNodeRequest, context: AnyContext) -> pb.NodeStatus:
        streams = [each for each in self._hub.open_streams() if each.hello.node_name == request.name]
        if not streams and not self._hub.log.knows(request.name):
            await _abort(context, grpc.StatusCode.NOT_FOUND, f"no Node and no agent {request.name!r}")
        return node_status(node_state(self._hub, request.name, streams), self._hub.clock())

    async def _watch(
        self, request: pb.WatchNodesRequest, context: AnyContext
    ) -> AsyncIterator[pb.NodeChanges]:
        if 0 < request.interval_ms < 100:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "interval_ms is below 100")
        interval = (request.interval_ms or 1000) / 1000
        wanted = set(request.names)
        told: dict[str, object] = {}
        first = True
        while True:
            seen: set[str] = set()
            changed: list[NodeState] = []
            for state in await self._states(wanted):
                seen.add(state.name)
                facts = _facts(state)
                if told.get(state.name) != facts:
                    told[state.name] = facts
                    changed.append(state)
            removed = told.keys() - seen
            for name in removed:
                del told[name]
            if first or changed or removed:
                for message in self._messages(changed, sorted(removed)):
                    yield message
            first = False
            await asyncio.sleep(interval)
            await self._guard.admit(context, f"/{SERVICE_NAME}/Watch")

    def _messages(self, changed: list[NodeState], removed: list[str]) -> list[pb.NodeChanges]:
        now = self._hub.clock()
        messages = [
            pb.NodeChanges(
                revision=self._hub.log.revision,
                nodes=[
                    node_status(state, now, errors=_LISTED_ERRORS)
                    for state in changed[start : start + _MESSAGE]
                ],
            )
            for start in range(0, max(1, len(changed)), _MESSAGE)
        ]
        messages[0].removed.extend(removed)
        return messages

    async def _states(self, names: Collection[str] = ()) -> list[NodeState]:
        """Of these nodes, or of all; by name."""
        streams = streams_by_node(self._hub)
        every = names or streams.keys() | set(registered_nodes(self._hub.log))
        found = []
        for index, name in enumerate(sorted(every)):
            if index % _AT_A_TIME == 0:
                await asyncio.sleep(0)
            its = streams.get(name, ())
            if its or self._hub.log.knows(name):
                found.append(node_state(self._hub, name, its))
        return found

    async def _wait_applied(
        self, request: pb.WaitAppliedRequest, context: AnyContext
    ) -> pb.WaitAppliedResponse:
        wrong = _mistake(request)
        if wrong:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, wrong)
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = began + (request.timeout_ms or 30_000) / 1000
        reason = await self._there(request, end)
        applied = Applied(self._hub, request.service, connected_only=request.connected_only)
        percent = request.percent or 100
        if not reason:
            applied.look()
        while not reason and not applied.reached(percent) and loop.time() < end:
            await asyncio.sleep(_POLL)
            applied.look()
        have = applied.nodes - len(applied.missing)
        if not reason and not applied.reached(percent):
            reason = f"{have} of {applied.nodes} nodes have it"
        streams = streams_by_node(self._hub)
        now = self._hub.clock()
        return pb.WaitAppliedResponse(
            applied=not reason,
            reason=reason,
            revision=applied.revision,
            ports=service_ports(self._hub.log, request.service),
            nodes=applied.nodes,
            nodes_applied=have,
            missing=[
                node_status(node_state(self._hub, name, streams.get(name, ())), now, errors=_LISTED_ERRORS)
                for name in sorted(applied.missing)[:_MISSING]
            ],
            waited_ms=int((loop.time() - began) * 1000),
        )

    async def _there(self, request: pb.WaitAppliedRequest, end: float) -> str:
        """Wait for the head to be what is waited for; why it is not, empty when it is."""
        loop = asyncio.get_running_loop()
        looked: object = None
        reason = "the time is up"
        while True:
            # What has been seen is projected in the turn after.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            moment = (self._hub.log.revision, dict(self._hub.seen()))
            if moment != looked:
                looked = moment
                reason = self._not_there(request)
            if not reason or loop.time() >= end:
                return reason
            await asyncio.sleep(_POLL)

    def _not_there(self, request: pb.WaitAppliedRequest) -> str:
        """Why the head is not yet what is waited for; empty when it is."""
        if not self._hub.log.synced:
            return "the server is not synchronized with the cluster yet"
        seen = self._hub.seen()
        for plural, version in request.resource_versions.items():
            if seen.get(plural, 0) < version:
                return f"the server has seen {plural} up to version {seen.get(plural, 0)} only"
        ports = service_ports(self._hub.log, request.service)
        if request.gone and ports:
            return f"there still is a Service {request.service}"
        if not request.gone and not ports:
            return f"there is no Service {request.service} that has a cluster IP"
        return ""


def _unary(behavior: Any, request: Any, response: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_unary_rpc_method_handler(
        behavior,
        request_deserializer=request.FromString,
        response_serializer=response.SerializeToString,
    )


def _mistake(request: pb.WaitAppliedRequest) -> str:
    if not _SERVICE.fullmatch(request.service):
        return f"service is not NAMESPACE/NAME: {request.service!r}"
    if request.percent > 100:
        return "percent is above 100"
    if request.timeout_ms > _MAX_WAIT_MS:
        return f"timeout_ms is above {_MAX_WAIT_MS}"
    return ""


def _facts(state: NodeState) -> object:
    """What of a node's state is worth a message when it changes."""
    return (
        state.registered,
        state.current,
        state.zone,
        tuple(
            (each.peer, each.agent_version, each.mode, each.acked_revision, each.ack) for each in state.agents
        ),
    )


async def _abort(context: AnyContext, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError
