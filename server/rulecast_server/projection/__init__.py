"""API objects to resources: kube-proxy's decision table, computed once for all nodes."""

from rulecast_server.projection.problems import ObjectRef, Problem, Reason
from rulecast_server.projection.projector import Projection, Projector

__all__ = ["ObjectRef", "Problem", "Projection", "Projector", "Reason"]
