"""What one side encodes is what the other decodes, in messages of bounded size."""

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from rulecast.model import FLEET, ClusterInfo, EndpointSet, node_scope
from rulecast.v1 import rules_pb2 as pb
from rulecast.wire.decode import decode_frame
from rulecast.wire.encode import MAX_MEMBERS, encode_change
from rulecast.wire.frames import CHUNK, MAX_FRAME, assemble, compress, lay_out, mark_frame, scope_body
from rulecast.wire.hashes import resource_hash
from rulecast.wire.messages import Ack, Hello, Mark, Resync, ScopePosition, Slot, Upsert, WireError, slot_of
from rulecast.wire.requests import decode_request, encode_request
from rulecast_agent.feed.store import ScopeStore
from tests.wire import values

_MASK = (1 << 64) - 1


def operations(bodies):
    """What an agent reads of a scope's bodies."""
    encoded = lay_out(Slot.FLEET, bodies)
    frames = [decode_frame(data) for data in (*encoded.large, encoded.small)]
    return [operation for frame in frames for step in frame.steps for operation in step.operations]


@given(st.data())
def test_a_change_takes_a_holder_of_the_old_value_to_the_new_one(data: st.DataObject) -> None:
    scope, resource = data.draw(values.slots())
    old, new = (data.draw(values.resource_values(resource)) for _ in range(2))
    store = ScopeStore(scope)
    for before, after in ((None, old), (old, new)):
        for operation in operations(encode_change(resource, before, after)):
            store.apply(operation)
    assert dict(store.resources()) == ({} if new is None else {resource: new})
    assert store.digest == (resource_hash(resource, new) & _MASK if new is not None else 0)


def test_the_same_change_twice_is_that_change() -> None:
    resource = values.cluster_set("web")
    old, new = values.endpoints("10.0.0.1:80", "10.0.0.2:80"), values.endpoints("10.0.0.2:80", "10.0.0.3:80")
    store = ScopeStore(FLEET)
    store.load(resource, old)
    for _ in range(2):
        for operation in operations(encode_change(resource, old, new)):
            store.apply(operation)
    assert dict(store.resources()) == {resource: new}
    assert store.digest == resource_hash(resource, new) & _MASK


@given(st.data())
def test_no_change_is_no_byte(data: st.DataObject) -> None:
    _, resource = data.draw(values.slots())
    value = data.draw(values.resource_values(resource))
    assert not list(encode_change(resource, value, value))


@pytest.mark.parametrize(("before", "after"), [(0, 20_000), (20_000, 0), (20_000, 20_000)])
def test_a_huge_set_is_sent_in_parts(before: int, after: int) -> None:
    old = values.many(before, port=8080)
    new = values.many(after, port=9090)
    resource = values.cluster_set("web")
    bodies = list(encode_change(resource, old, new))
    assert len(bodies) >= 20_000 / MAX_MEMBERS
    encoded = lay_out(Slot.FLEET, bodies)
    assert all(len(frame) <= CHUNK < MAX_FRAME for frame in encoded.large)
    store = ScopeStore(FLEET)
    store.load(resource, old)
    for operation in operations(bodies):
        store.apply(operation)
    assert dict(store.resources()) == {resource: new}


def test_one_endpoint_of_ten_thousand_is_one_endpoint_on_the_wire() -> None:
    old = values.many(10_000)
    new = EndpointSet(members=old.members[:500] + old.members[501:])
    (body,) = encode_change(values.cluster_set("web"), old, new)
    assert len(body) < 100


def test_frames_of_several_scopes_join_to_one() -> None:
    parts = [
        lay_out(Slot.FLEET, [scope_body(scope=FLEET, reset=(), digest=1)]),
        lay_out(Slot.NODE, [scope_body(scope=node_scope("n1"), digest=2)]),
        lay_out(Slot.NODE, ()),
    ]
    mark = mark_frame(revision=7, time_ms=1000, resource_versions={"services": 5}, interval_ms=10_000)
    (data,) = assemble(parts, mark, zstd=True)
    frame = decode_frame(data)
    assert [(step.slot, step.scope, step.reset, step.digest) for step in frame.steps] == [
        (Slot.FLEET, "fleet", (), 1),
        (Slot.NODE, "node/n1", None, 2),
    ]
    assert frame.mark == Mark(revision=7, time_ms=1000, resource_versions={"services": 5}, interval_ms=10_000)


def test_the_order_of_a_scopes_frames_is_kept_whatever_their_size() -> None:
    small = lay_out(Slot.FLEET, [scope_body(scope=FLEET, reset=(), digest=1)])
    large = lay_out(Slot.FLEET, encode_change(values.cluster_set("web"), None, values.many(5000)))
    end = lay_out(Slot.FLEET, [scope_body(digest=3)])
    for zstd in (True, False):
        frames = [decode_frame(data) for data in assemble([small, large, end], b"", zstd=zstd)]
        steps = [step for frame in frames for step in frame.steps]
        assert steps[0].reset == ()
        assert not steps[0].operations
        assert sum(len(step.operations) for step in steps[1:-1]) == 2
        assert steps[-1].digest == 3


def test_fields_of_a_newer_version_are_part_of_the_digest_and_do_no_harm() -> None:
    known = pb.Service(key=values.key("web"), cluster_ip="10.96.0.1", port=80)
    newer = known.SerializeToString() + b"\x92\x03\x03new"
    change = pb.Change.FromString(b"\x0a" + bytes((len(newer),)) + newer)
    frame = pb.Frame(fleet=pb.ScopeFrame(changes=[change])).SerializeToString()
    ((operation,),) = [step.operations for step in decode_frame(frame).steps]
    assert operation == Upsert(values.service("web"), values.port("web"), newer)


def test_kinds_of_change_of_a_newer_version_are_counted() -> None:
    change = pb.Change.FromString(b"\xa2\x06\x01x")
    frame = pb.Frame(fleet=pb.ScopeFrame(changes=[change, pb.Change(node_removed=True)]))
    (step,) = decode_frame(frame.SerializeToString()).steps
    assert (step.unknown, len(step.operations)) == (1, 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff", "not a Frame"),
        (pb.Frame(zstd=b"nonsense").SerializeToString(), "damaged"),
        (compress(b"\xff"), "not a Frame"),
        (compress(compress(b"")), "within a compressed frame"),
        (pb.Frame(fleet=pb.ScopeFrame(digest="xyz")).SerializeToString(), "not a digest"),
        # A zstd header that declares 2 GiB.
        (pb.Frame(zstd=bytes.fromhex("28b52ffda000000080010000")).SerializeToString(), "2147483648 bytes"),
    ],
)
def test_damaged_frames_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode_frame(data)


POSITION = {
    Slot.FLEET: ScopePosition(scope=FLEET, digest=7, buckets=tuple(range(256))),
    Slot.NODE: ScopePosition(scope=node_scope("n1"), digest=(1 << 64) - 1, buckets=()),
}


@pytest.mark.parametrize(
    "request_",
    [
        Hello(node_name="n1"),
        Hello(node_name="n1", agent_version="v", mode="ipvs", instance="i", zstd=True, position=POSITION),
        Resync(id=7, position=POSITION),
        Resync(id=1, position={}),
        Ack(revision=3),
        Ack(revision=3, apply_ms=7, errors=(("k", "refused"),), error_count=1, node_error="no nft"),
    ],
)
def test_requests_round_trip(request_) -> None:
    assert decode_request(encode_request(request_)) == request_


def test_an_ack_is_bounded() -> None:
    ack = Ack(
        revision=1,
        errors=tuple((values.key("x" * 63), "word " * 1000) for _ in range(5000)),
        error_count=5000,
    )
    data = encode_request(ack)
    assert len(data) < 64 << 10
    assert decode_request(data).error_count == 5000


def _resync(**fleet: str) -> pb.WatchRequest:
    return pb.WatchRequest(resync=pb.Resync(id=1, position=pb.Position(fleet=pb.ScopePosition(**fleet))))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.WatchRequest(hello=pb.Hello()), "without node_name"),
        (pb.WatchRequest(hello=pb.Hello(node_name="x" * 254)), "254 characters"),
        (pb.WatchRequest(hello=pb.Hello(node_name="a/b")), "not a node's name"),
        (pb.WatchRequest(hello=pb.Hello(node_name="a\nb")), "not a node's name"),
        (
            _resync(scope="node/n1", digest="0" * 16),
            "given as the fleet",
        ),
        (
            _resync(scope="fleet", digest="1"),
            "not a digest",
        ),
    ],
)
def test_bad_requests_are_refused_in_clear_words(request_: pb.WatchRequest, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode_request(request_.SerializeToString())


def test_garbage_is_refused_and_an_unknown_request_is_ignored() -> None:
    with pytest.raises(WireError, match="not a WatchRequest"):
        decode_request(b"\xff\xff")
    assert decode_request(b"\xa2\x06\x01x") is None


def test_a_frame_is_readable_as_json() -> None:
    bodies = [
        scope_body(scope=FLEET, digest=255),
        *encode_change(
            values.cluster_set("web"), values.endpoints("10.0.0.1:80"), values.endpoints("10.0.0.2:80")
        ),
    ]
    frame = pb.Frame.FromString(lay_out(slot_of(FLEET), bodies).small)
    assert MessageToDict(frame) == {
        "fleet": {
            "scope": "fleet",
            "digest": "00000000000000ff",
            "changes": [
                {
                    "clusterEndpoints": {
                        "key": "default/web:http/TCP/ipv4",
                        "add": [{"port": 80, "ips": ["10.0.0.2"]}],
                        "remove": [{"port": 80, "ips": ["10.0.0.1"]}],
                    }
                }
            ],
        }
    }


def test_cluster_facts_cannot_be_removed() -> None:
    with pytest.raises(ValueError, match="cannot be removed"):
        list(encode_change(values.CLUSTER, ClusterInfo(), None))
