"""What is known of agents and nodes, as messages."""

from rulecast.v1 import rules_pb2 as pb
from rulecast_server.feed import AgentState
from rulecast_server.feed.nodes import NodeState


def agent_status(state: AgentState, now: float, *, errors: int | None = None) -> pb.AgentStatus:
    """`errors`: how many of them to name; None: all."""
    ack = state.ack
    status = pb.AgentStatus(
        node_name=state.node,
        zone=state.zone,
        peer=state.peer,
        agent_version=state.agent_version,
        mode=state.mode,
        sent_revision=state.sent_revision,
        acked_revision=state.acked_revision,
        lag_ms=int(state.lag * 1000),
        connected_seconds=max(0, int(now - state.connected_since)),
    )
    if ack is not None:
        status.apply_ms = ack.apply_ms
        status.errors.extend(pb.ServiceError(key=key, message=text) for key, text in ack.errors[:errors])
        status.error_count = ack.error_count
        status.node_error = ack.node_error
    return status


def node_status(state: NodeState, now: float, *, errors: int | None = None) -> pb.NodeStatus:
    """Likewise."""
    return pb.NodeStatus(
        name=state.name,
        registered=state.registered,
        connected=bool(state.agents),
        current=state.current,
        zone=state.zone,
        agents=[agent_status(agent, now, errors=errors) for agent in state.agents],
    )
