"""What the tests of changes share: services, other versions of them, and asking at once."""

import dataclasses

import pytest

from rulecast.model import Family, Protocol
from tests.netns.cluster import Cluster
from tests.netns.expect import (
    Expected,
    Row,
    judge,
)
from tests.netns.objects import BOTH, Ep, Svc
from tests.netns.world import A, B, C

TCP, UDP = Protocol.TCP, Protocol.UDP
WEB = Svc("web", 70, [A, B])
UNRELATED = Svc("unrelated", 71, [C])
families = pytest.mark.parametrize("family", BOTH, ids=lambda family: f"IPv{int(family)}")


def check(
    cluster: Cluster,
    service: Svc,
    client: str,
    target: str,
    expected: Expected,
    *,
    port: int | None = None,
    only_families: tuple[Family, ...] = BOTH,
    protocols: tuple[Protocol, ...] = (TCP, UDP),
    node: str = "n1",
) -> None:
    """Ask at once in every family and protocol."""
    row = Row("", service.name, client, target, expected, port=port, node=node)
    for family in only_families:
        for protocol in protocols:
            judge(cluster, row, service, family, protocol)


def with_spec(service: Svc, **spec: object) -> Svc:
    return dataclasses.replace(service, spec={**service.spec, **spec})


def with_endpoints(service: Svc, *endpoints: Ep) -> Svc:
    return dataclasses.replace(service, endpoints=endpoints)
