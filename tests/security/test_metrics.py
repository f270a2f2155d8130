"""What is said loudly, and counted."""

import pytest
from prometheus_client import CollectorRegistry

from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from rulecast_server.rpc.metrics import RpcCollector
from tests.security.conftest import CONTENTS, StartFleet
from tests.wire.conftest import Server


def samples(server: Server, tokens: object = None) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RpcCollector(server.rpc, tokens=tokens))
    return registry


@pytest.mark.asyncio
async def test_metrics_tell_plain_text(start_server) -> None:
    server = await start_server(contents=CONTENTS)
    assert samples(server).get_sample_value("rulecast_server_insecure") == 1.0


@pytest.mark.asyncio
async def test_metrics_tell_refusals_and_reviews(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    async with fleet.dial() as channel:
        for token in ("bad", fleet.api.issue("ops/viewer")):
            call = rules_pb2_grpc.RulesStub(channel).ListAgents(
                pb.ListAgentsRequest(), metadata=(("authorization", f"Bearer {token}"),)
            )
            await call.code()
    read = samples(fleet.server, fleet.identities).get_sample_value
    assert read("rulecast_server_insecure") == 0.0
    assert read("rulecast_server_rpc_refused_total", {"code": "unauthenticated"}) == 1.0
    assert read("rulecast_server_rpc_refused_total", {"code": "permission_denied"}) == 1.0
    assert read("rulecast_server_token_reviews_total", {"result": "good"}) == 1.0
    assert read("rulecast_server_token_reviews_total", {"result": "bad"}) == 1.0
    assert read("rulecast_server_token_reviews_failing") == 0.0
    fleet.api.out_of_order = True
    async with fleet.dial() as channel:
        call = rules_pb2_grpc.RulesStub(channel).ListAgents(
            pb.ListAgentsRequest(), metadata=(("authorization", "Bearer new"),)
        )
        await call.code()
    assert read("rulecast_server_token_reviews_failing") == 1.0
