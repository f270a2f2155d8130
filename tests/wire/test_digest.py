"""Digests are the same everywhere and for ever, and follow content alone."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rulecast.digest import (
    FLEET_BUCKETS,
    OTHER_BUCKETS,
    ScopeDigest,
    bucket_count,
    bucket_of,
    digest_text,
    parse_digest,
)
from rulecast.model import FLEET, ClusterInfo, EndpointSet, Kind, NodeInfo, node_scope, zone_scope
from rulecast.wire.hashes import hash_difference, resource_hash
from tests.wire import values

_MASK = (1 << 64) - 1

GOLDEN = [
    (values.CLUSTER, ClusterInfo(service_cidrs=("10.96.0.0/12",)), "d04d0d50361b1df3"),
    (values.NODE, NodeInfo(name="n1", zone="x", addresses=("10.0.0.1",)), "d5954c9abb4a4b60"),
    (values.service("web"), values.port("web", node_port=30000), "ac55bb7a887fd8c4"),
    (values.cluster_set("web"), EndpointSet(), "b88774cd3432ea14"),
    (values.cluster_set("web"), values.endpoints("10.0.0.1:80", "10.0.0.2:80"), "b389034023e07c16"),
    (values.local_set("web"), values.endpoints("10.0.0.1:80", ready=1), "dd571648198731c3"),
]


@pytest.mark.parametrize(("resource", "value", "digest"), GOLDEN)
def test_a_hash_never_changes_between_versions(resource, value, digest) -> None:
    # A changed value here makes every agent of the old version fetch everything at each reconnect.
    assert digest_text(resource_hash(resource, value) & _MASK) == digest


def test_hashes_do_not_depend_on_the_process() -> None:
    script = (
        "from tests.wire.test_digest import GOLDEN, resource_hash, bucket_of\n"
        "print([resource_hash(r, v) for r, v, _ in GOLDEN], [bucket_of(str(i), 256) for i in range(9)])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


@given(st.data())
def test_the_difference_of_hashes_is_the_hash_of_the_difference(data: st.DataObject) -> None:
    _, resource = data.draw(values.slots())
    old, new = (data.draw(values.resource_values(resource)) for _ in range(2))

    def whole(value):
        return resource_hash(resource, value) if value is not None else 0

    assert hash_difference(resource, old, new) & _MASK == (whole(new) - whole(old)) & _MASK


@given(values.members, values.members)
def test_sets_that_differ_in_a_member_have_other_hashes(one, two) -> None:
    resource = values.cluster_set("web")
    hashes = {resource_hash(resource, EndpointSet(members=members)) for members in (one, two)}
    assert len(hashes) == len({one, two})


def test_equal_sets_of_other_kinds_services_and_readiness_have_other_hashes() -> None:
    value = values.endpoints("10.0.0.1:80")
    hashes = {
        resource_hash(values.cluster_set("web"), value),
        resource_hash(values.local_set("web"), value),
        resource_hash(values.cluster_set("api"), value),
        resource_hash(values.local_set("web"), values.endpoints("10.0.0.1:80", ready=1)),
        resource_hash(values.cluster_set("web"), values.endpoints("10.0.0.1:81")),
        resource_hash(values.cluster_set("web"), EndpointSet()),
    }
    assert len(hashes) == 6


def test_all_resources_of_a_service_are_in_one_bucket() -> None:
    assert bucket_count(FLEET) == FLEET_BUCKETS
    assert bucket_count(zone_scope("x")) == bucket_count(node_scope("n1")) == OTHER_BUCKETS
    assert {bucket_of(values.key("web"), 256) for _ in Kind} == {bucket_of(values.key("web"), 256)}
    used = {bucket_of(values.key(i), 256) for i in range(10_000)}
    assert used == set(range(256))


def test_a_scopes_digest_is_the_sum_of_its_buckets() -> None:
    digest = ScopeDigest(4)
    digest.shift(0, 5)
    digest.shift(1, -7)
    digest.shift(0, 1 << 70)
    assert digest.total == sum(digest.buckets) & _MASK
    digest.clear(1)
    assert digest.buckets == [5 + (1 << 70) & _MASK, 0, 0, 0]
    assert digest.total == digest.buckets[0]


@pytest.mark.parametrize("text", ["", "12", "g" * 16, "0" * 17])
def test_what_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a digest|invalid literal"):
        parse_digest(text)
    assert parse_digest(digest_text(255)) == 255
