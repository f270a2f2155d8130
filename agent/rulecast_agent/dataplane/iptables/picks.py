"""One of many endpoints with equal shares, in chains of which a change rewrites few rules. Pure."""

from collections.abc import Sequence

from rulecast.model import Endpoint, ServiceKey
from rulecast_agent.dataplane.iptables import names
from rulecast_agent.dataplane.iptables.dispatch import Rules
from rulecast_agent.dataplane.iptables.matches import random_share, share, translate

DIRECT = 32
"""The most endpoints of one chain."""


def pick(key: ServiceKey, kind: str, endpoints: Sequence[Endpoint]) -> tuple[Rules, dict[str, Rules]]:
    """The rules that pick, to stand at the end of a chain, and the chains that they need.

    Up to DIRECT endpoints are picked directly. More are spread over buckets by a hash of the endpoint, and a
    bucket is picked with the probability of its size: the shares stay equal, and an endpoint that comes or
    goes rewrites its bucket and the rules that pick one, about 2 * sqrt(n) rules instead of n.
    """
    protocol = f"-p {key.rpartition('/')[0].rpartition('/')[2].lower()}"
    if len(endpoints) <= DIRECT:
        return _one_of(endpoints, protocol), {}
    number = bucket_count(len(endpoints))
    buckets: list[list[Endpoint]] = [[] for _ in range(number)]
    for endpoint in endpoints:
        hashed = names.digest(endpoint.ip, str(endpoint.port))
        buckets[int.from_bytes(hashed.encode()[:4], "big") % _PRIME % number].append(endpoint)
    chains: dict[str, Rules] = {}
    rules = []
    left = len(endpoints)
    for index, members in enumerate(buckets):
        if not members:
            continue
        name = f"{names.PREFIX}{kind}{index:X}-{names.digest(key)}"
        chains[name] = _one_of(members, protocol)
        rules.append(f"-j {name}" if len(members) == left else f"{share(len(members), left)} -j {name}")
        left -= len(members)
    return tuple(rules), chains


_PRIME = 999_983
"""Spreads the letters of a digest over the buckets."""


def bucket_count(endpoints: int) -> int:
    """A power of two near the square root, so that it seldom changes."""
    return 1 << max(1, (endpoints.bit_length() + 1) // 2)


def _one_of(endpoints: Sequence[Endpoint], protocol: str) -> Rules:
    last = len(endpoints) - 1
    return tuple(
        f"{protocol} {translate(endpoint)}"
        if index == last
        else f"{protocol} {random_share(last - index + 1)} {translate(endpoint)}"
        for index, endpoint in enumerate(endpoints)
    )
