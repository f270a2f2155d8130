"""Agents that are who their bound ServiceAccount token says, as an apiserver confirms it."""

import asyncio
import gc
import logging

import grpc
import pytest

from rulecast.errors import UsageError
from rulecast.v1 import rules_pb2 as pb
from rulecast.v1 import rules_pb2_grpc
from rulecast_agent.feed.tokens import TokenFile
from tests.security.conftest import Fleet, StartAgent, StartFleet
from tests.wire.test_rpc import hello, read_step
from tests.wire.waiting import eventually

pytestmark = pytest.mark.asyncio
Code = grpc.StatusCode


async def watch(fleet: Fleet, token: str | None, node: str = "n1") -> tuple[Code, str]:
    """How a stream with this token ends; OK when its first step comes."""
    metadata = (("authorization", f"Bearer {token}"),) if token is not None else None
    async with fleet.dial() as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch(metadata=metadata)
        try:
            await call.write(hello(node))
            await read_step(call)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        call.cancel()
        return Code.OK, ""


async def test_a_token_that_is_bound_to_the_node_is_let_in(
    start_fleet: StartFleet, start_agent: StartAgent
) -> None:
    fleet = await start_fleet()
    token = fleet.token_file(fleet.api.issue(node="n1") + "\n")
    agent = start_agent(fleet.server.address, channel=fleet.channel, token=token)
    await eventually(lambda: agent.holds(fleet.server))
    fleet.server.set(0, "10.0.0.1:80")
    await eventually(lambda: agent.holds(fleet.server))


@pytest.mark.parametrize(
    ("claims", "code", "words"),
    [
        ({"node": "n2"}, Code.PERMISSION_DENIED, "is bound to node 'n2', not to 'n1'"),
        ({}, Code.PERMISSION_DENIED, "is bound to no node"),
        ({"node": "n1", "account": "default/web"}, Code.PERMISSION_DENIED, "is not the agents' account"),
        (
            {"node": "n1", "account": "other/rulecast-agent"},
            Code.PERMISSION_DENIED,
            "is not the agents' account",
        ),
        ({"node": "n1", "audience": "vault"}, Code.UNAUTHENTICATED, "does not accept the token"),
        ({"node": "n1", "seconds": -1}, Code.UNAUTHENTICATED, "the token expired"),
    ],
    ids=["another-node", "unbound", "another-account", "another-namespace", "another-audience", "expired"],
)
async def test_any_other_token_is_refused_in_one_clear_line(
    start_fleet: StartFleet, caplog: pytest.LogCaptureFixture, claims: dict, code: Code, words: str
) -> None:
    fleet = await start_fleet()
    token = fleet.api.issue(**claims)
    found, why = await watch(fleet, token)
    assert found is code
    assert words in why
    assert not fleet.server.hub.counters.connects
    assert fleet.server.rpc.counters.refused == {code.name.lower(): 1}
    assert words in caplog.text
    assert token not in caplog.text


@pytest.mark.parametrize("token", [None, "", "nonsense", "a.b.c", "x" * 4000, "e30.e30.e30"])
async def test_what_is_no_token_is_refused(start_fleet: StartFleet, token: str | None) -> None:
    fleet = await start_fleet()
    code, _ = await watch(fleet, token)
    assert code is Code.UNAUTHENTICATED


async def test_an_answer_without_our_audience_is_not_believed(start_fleet: StartFleet) -> None:
    """What authenticators that know nothing of audiences answer (TokenReview's API documentation)."""
    fleet = await start_fleet()
    fleet.api.knows_audiences = False
    code, _ = await watch(fleet, fleet.api.issue(node="n1", audience="somebody-else"))
    assert code is Code.UNAUTHENTICATED


async def test_a_token_is_reviewed_once_for_many_streams(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    token = fleet.api.issue(node="n1")
    for _ in range(5):
        assert (await watch(fleet, token))[0] is Code.OK
    bad = fleet.api.issue(node="n1", audience="vault")
    for _ in range(5):
        assert (await watch(fleet, bad))[0] is Code.UNAUTHENTICATED
    assert fleet.api.reviewed == [token, bad]


async def test_a_revoked_token_ends_the_stream(start_fleet: StartFleet, start_agent: StartAgent) -> None:
    fleet = await start_fleet(fresh=0.2)
    issued = fleet.api.issue(node="n1")
    agent = start_agent(fleet.server.address, channel=fleet.channel, token=fleet.token_file(issued))
    await eventually(lambda: agent.holds(fleet.server))
    fleet.api.revoke(issued)
    await eventually(lambda: "does not accept the token" in agent.feed.status.last_error)
    assert not fleet.server.hub.streams
    assert fleet.server.rpc.counters.revoked == 1
    # Fail static: nothing was taken back from the agent, and it comes in again with a good one.
    assert len(agent.updates) == 1
    fleet.token_file(fleet.api.issue(node="n1"))
    await eventually(lambda: agent.holds(fleet.server))
    assert len(agent.updates) == 1


async def test_a_token_that_runs_out_ends_the_stream(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(fresh=3600.0)
    metadata = (("authorization", f"Bearer {fleet.api.issue(node='n1', seconds=1.0)}"),)
    async with fleet.dial() as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch(metadata=metadata)
        await call.write(hello())
        await read_step(call)
        with pytest.raises(grpc.aio.AioRpcError, match="the token expired") as caught:
            await call.read()
        assert caught.value.code() is Code.UNAUTHENTICATED


async def test_a_replaced_token_is_used_before_the_old_one_runs_out(
    start_fleet: StartFleet, start_agent: StartAgent
) -> None:
    fleet = await start_fleet()
    first, second = fleet.api.issue(node="n1"), fleet.api.issue(node="n1")
    agent = start_agent(
        fleet.server.address, channel=fleet.channel, token=fleet.token_file(first), token_check=0.05
    )
    await eventually(lambda: agent.holds(fleet.server))
    fleet.token_file(second)
    await eventually(lambda: agent.counters["renewals"] == 1 and agent.holds(fleet.server))
    assert fleet.api.reviewed == [first, second]
    assert not fleet.server.rpc.counters.refused
    assert len(agent.updates) == 1
    assert agent.feed.status.last_error == ""


async def test_without_the_apiserver_known_agents_go_on_for_a_while_and_new_ones_wait(
    start_fleet: StartFleet, start_agent: StartAgent
) -> None:
    fleet = await start_fleet(fresh=0.1, grace=1.5)
    known, new = fleet.api.issue(node="n1"), fleet.api.issue(node="n2")
    agent = start_agent(fleet.server.address, channel=fleet.channel, token=fleet.token_file(known))
    await eventually(lambda: agent.holds(fleet.server))
    fleet.api.out_of_order = True
    await eventually(lambda: fleet.identities.counters["stale"] >= 2)
    assert agent.feed.status.connected
    assert "etcd is not reachable" in fleet.identities.problem
    code, why = await watch(fleet, new, "n2")
    assert (code, why) == (Code.UNAVAILABLE, "the token cannot be reviewed now")
    # The known one's time is over as well.
    await eventually(lambda: "cannot be reviewed now" in agent.feed.status.last_error)
    fleet.api.out_of_order = False
    await eventually(lambda: agent.holds(fleet.server))
    assert (await watch(fleet, new, "n2"))[0] is Code.OK
    assert fleet.identities.problem == ""
    assert len(agent.updates) == 1


async def test_bad_tokens_of_one_address_stop_reaching_the_apiserver(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    good = fleet.api.issue(node="n1")
    assert (await watch(fleet, good))[0] is Code.OK
    codes = {(await watch(fleet, f"garbage-{number}"))[0] for number in range(60)}
    assert codes == {Code.UNAUTHENTICATED, Code.RESOURCE_EXHAUSTED}
    assert len(fleet.api.reviewed) < 40
    # An agent that was let in before is not shut out by a neighbor on its address.
    assert (await watch(fleet, good))[0] is Code.OK


async def test_a_review_that_fails_when_nobody_waits_any_more_is_no_bug(start_fleet: StartFleet) -> None:
    """To the server, an error that nobody takes is one that ends it."""
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: told.append(context))
    try:
        fleet = await start_fleet()
        fleet.api.hold = asyncio.Event()
        fleet.api.out_of_order = True
        async with fleet.dial() as channel:
            call = rules_pb2_grpc.RulesStub(channel).Watch(metadata=(("authorization", "Bearer leaves"),))
            await call.write(hello())
            await eventually(lambda: fleet.identities.waiting == 1)
            call.cancel()
            await eventually(lambda: not fleet.server.rpc.greeting)
            assert fleet.identities.waiting == 1
            fleet.api.hold.set()
            await eventually(lambda: not fleet.identities.waiting)
        gc.collect()
        await asyncio.sleep(0)
        assert fleet.identities.counters["failed"] == 1
        assert told == []
    finally:
        loop.set_exception_handler(None)


async def test_one_address_asks_for_so_many_reviews_at_a_time(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    fleet.api.hold = asyncio.Event()
    async with fleet.dial() as channel:
        stub = rules_pb2_grpc.RulesStub(channel)
        calls = [stub.Watch(metadata=(("authorization", f"Bearer bad-{number}"),)) for number in range(90)]
        for call in calls:
            await call.write(hello())
        await eventually(lambda: fleet.server.rpc.counters.refused["resource_exhausted"] == 90 - 64)
        assert fleet.identities.waiting == 64
        for call in calls:
            call.cancel()
    fleet.api.hold.set()
    await eventually(lambda: not fleet.identities.waiting)


async def test_acknowledgments_are_for_the_own_node_only(start_fleet: StartFleet) -> None:
    """A stream is of the node that the hello names, and there is no other field that names one."""
    assert "node_name" not in pb.Ack.DESCRIPTOR.fields_by_name
    fleet = await start_fleet()
    metadata = (("authorization", f"Bearer {fleet.api.issue(node='n2')}"),)
    async with fleet.dial() as channel:
        call = rules_pb2_grpc.RulesStub(channel).Watch(metadata=metadata)
        await call.write(hello("n1"))
        await call.write(pb.WatchRequest(ack=pb.Ack(revision=1)))
        assert await call.code() is Code.PERMISSION_DENIED
    assert not fleet.server.hub.agents()
    assert not fleet.server.hub.counters.acks


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"s3cret\nsecond line", "not a token"),
        (b"s3cret\x00", "not a token"),
        ("s3cret-é".encode(), "not a token"),
        (b"s" * 20_000, "larger than"),
    ],
)
async def test_an_unusable_token_file_is_one_line_without_its_content(tmp_path, content, words) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as caught:
        TokenFile(path).check()
    assert str(path) in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_token_file_that_is_missing_for_a_moment_leaves_the_last_token(tmp_path) -> None:
    path = tmp_path / "token"
    file = TokenFile(path)
    with pytest.raises(UsageError, match="No such file"):
        await file.read()
    path.write_text("first\n")
    assert await file.read() == "first"
    path.unlink()
    assert await file.read() == "first"
    assert "No such file" in file.problem
    path.write_text("second")
    assert await file.read() == "second"
    assert file.problem == ""


async def test_no_token_is_ever_logged(
    start_fleet: StartFleet, start_agent: StartAgent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fleet = await start_fleet(fresh=0.1, grace=0.3)
    tokens = [
        fleet.api.issue(node="n1"),
        fleet.api.issue(node="n2"),
        fleet.api.issue(node="n1", audience="a"),
    ]
    for token in tokens:
        file = fleet.token_file(token)
        agent = start_agent(fleet.server.address, channel=fleet.channel, token=file)
        await eventually(lambda agent=agent: agent.feed.status.connected or agent.feed.status.last_error)
        fleet.api.out_of_order = True
        await watch(fleet, token)
        fleet.api.out_of_order = False
        assert token not in repr(file) + str(agent.feed.status)
        await agent.stop()
    await eventually(lambda: not fleet.server.hub.streams)
    assert caplog.records
    for token in [*tokens, "the-servers-own"]:
        assert token not in caplog.text
