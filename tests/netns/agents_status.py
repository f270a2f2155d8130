"""Answers each line on standard input with the server's ListAgents as one line of JSON.

A process of its own, because gRPC's sockets belong to the namespace of the process.
"""

import json
import sys

import grpc
from google.protobuf.json_format import MessageToDict

from rulecast.v1 import rules_pb2, rules_pb2_grpc


def main(address: str) -> None:
    """Serve until standard input ends."""
    options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50)]
    with grpc.insecure_channel(address, options=options) as channel:
        rules = rules_pb2_grpc.RulesStub(channel)
        for _ in sys.stdin:
            try:
                answer = rules.ListAgents(rules_pb2.ListAgentsRequest(), timeout=5)
                state = MessageToDict(answer, always_print_fields_with_no_presence=True)
                state["revision"] = int(state["revision"])
                for agent in state["agents"]:
                    agent["ackedRevision"] = int(agent["ackedRevision"])
            except grpc.RpcError as error:
                state = {"error": str(error), "revision": 0, "agents": []}
            print(json.dumps(state), flush=True)


main(sys.argv[1])
