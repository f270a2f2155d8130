"""Projected changes to frames: the delta log, sessions, and the fan-out to many of them."""

from rulecast_server.feed.hub import Hub, HubSettings, Stream
from rulecast_server.feed.local import LocalSession
from rulecast_server.feed.log import DeltaLog, LogLimits
from rulecast_server.feed.registry import AgentState
from rulecast_server.feed.session import Session

__all__ = [
    "AgentState",
    "DeltaLog",
    "Hub",
    "HubSettings",
    "LocalSession",
    "LogLimits",
    "Session",
    "Stream",
]
