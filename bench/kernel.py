"""The kernel part at one size, against `nft -f` of the same rules in one text."""

import statistics
import subprocess
import time
from collections.abc import Mapping

import msgspec

from bench import objects
from rulecast.model import ClusterInfo, Endpoint, Family, Revision, ServiceKey, ServicePort
from rulecast.view import ServiceView, Update
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector
from rulecast_agent.dataplane.nftables.dataplane import NftablesDataplane
from rulecast_agent.dataplane.nftables.render import render_ruleset

_CHANGES = 50
_WARM = 2
"""Changes that come first and make the pick chain of one endpoint more."""
_HOST = HostConfig(families={Family.IPV4: FamilyConfig(detector=LocalDetector(source_cidr="10.200.0.0/16"))})


def views(services: int, endpoints: int) -> dict[ServiceKey, ServiceView]:
    """What a node has of the cluster of `objects`."""
    found = {}
    for number in range(services):
        key = ServiceKey(objects.service_key(number))
        members = sorted(
            Endpoint(objects.endpoint_ip(number * endpoints + index), objects.BACKEND_PORT)
            for index in range(endpoints)
        )
        port = ServicePort(key=key, cluster_ip=objects.cluster_ip(number), port=80, has_endpoints=True)
        found[key] = ServiceView(service=port, cluster=tuple(members))
    return found


def _update(services: Mapping[ServiceKey, ServiceView], *, full: bool = True) -> Update:
    return Update(revision=Revision(1), full=full, services=services, node=None, cluster=ClusterInfo())


def _changes(dataplane: NftablesDataplane, meant: dict[ServiceKey, ServiceView]) -> dict[str, float]:
    """Medians of one endpoint replaced, one more, and one less; each change is another service's."""
    keys = list(meant)
    times: dict[str, list[float]] = {"replaced": [], "more": [], "less": []}
    for turn in range(_CHANGES + _WARM):
        key = keys[turn * 7919 % len(keys)]
        view = meant[key]
        new = Endpoint(f"10.64.{turn}.1", objects.BACKEND_PORT)
        replaced = tuple(sorted((*view.cluster[1:], new)))
        for name, members in (
            ("replaced", replaced),
            ("more", tuple(sorted({*replaced, view.cluster[0]}))),
            ("less", view.cluster),
        ):
            changed = msgspec.structs.replace(view, cluster=members)
            begin = time.perf_counter()
            dataplane.apply(_update({key: changed}, full=False), _HOST)
            if turn >= _WARM:
                times[name].append(time.perf_counter() - begin)
    return {f"one endpoint {name}": statistics.median(spent) * 1000 for name, spent in times.items()}


def measure(services: int, *, endpoints: int) -> dict[str, float]:
    """Milliseconds of a cold load, of adopting it, of reading it all back, and of the floor."""
    meant = views(services, endpoints)
    found: dict[str, float] = {}

    def timed(name: str, begin: float) -> None:
        found[name] = (time.perf_counter() - begin) * 1000

    dataplane = NftablesDataplane()
    begin = time.perf_counter()
    dataplane.apply(_update(meant), _HOST)
    timed("cold load", begin)
    found |= _changes(dataplane, meant)
    begin = time.perf_counter()
    drift = dataplane.verify()
    timed("verify", begin)
    assert not drift.count, drift
    dataplane.close()
    second = NftablesDataplane()
    begin = time.perf_counter()
    second.apply(_update(meant), _HOST)
    timed("adopt", begin)
    second.cleanup()
    second.close()
    text = render_ruleset(meant, _HOST, Family.IPV4)
    begin = time.perf_counter()
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
    timed("nft -f of the same", begin)
    subprocess.run(["nft", "delete", "table", "ip", "rulecast"], check=True)
    found["cold load / nft -f"] = found["cold load"] / found["nft -f of the same"]
    return found
