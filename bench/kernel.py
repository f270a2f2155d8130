"""The kernel part of one mode at one size, against the mode's own tool with the same rules in one text."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from bench import objects
from rulecast.model import ClusterInfo, Endpoint, Family, Revision, ServiceKey, ServicePort
from rulecast.view import ServiceView, Update
from rulecast_agent.dataplane.base import FamilyConfig, HostConfig, LocalDetector
from rulecast_agent.dataplane.iptables.dataplane import IptablesDataplane
from rulecast_agent.dataplane.iptables.render import render_script
from rulecast_agent.dataplane.ipvs.dataplane import IpvsDataplane
from rulecast_agent.dataplane.nftables.dataplane import NftablesDataplane
from rulecast_agent.dataplane.nftables.render import render_ruleset
from rulecast_agent.kernel.iptables import Backend

_CHANGES = 50
_WARM = 2
"""Changes that come first and make the pick chain of one endpoint more."""
_BURST = 1000
_FLOOR_LIMIT = {"nftables": 100_000, "iptables-nft": 1000, "iptables-legacy": 100_000, "ipvs": 100_000}
"""Services up to which one text is bearable: the time of iptables-nft-restore grows with the square."""
AnyDataplane = NftablesDataplane | IptablesDataplane | IpvsDataplane
MODES: dict[str, Callable[[], AnyDataplane]] = {
    "nftables": NftablesDataplane,
    "iptables-nft": lambda: IptablesDataplane(backend=Backend.NFT),
    "iptables-legacy": lambda: IptablesDataplane(backend=Backend.LEGACY),
    "ipvs": IpvsDataplane,
}
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


def _changes(dataplane: AnyDataplane, meant: dict[ServiceKey, ServiceView]) -> dict[str, float]:
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


def _burst(dataplane: AnyDataplane, meant: dict[ServiceKey, ServiceView]) -> dict[str, float]:
    """Milliseconds of an endpoint replaced in each of a thousand services, in one update."""
    changed = {}
    for number, (key, view) in enumerate(meant.items()):
        if number == _BURST:
            break
        new = Endpoint(f"10.65.{number >> 8}.{number & 255}", objects.BACKEND_PORT)
        changed[key] = msgspec.structs.replace(view, cluster=tuple(sorted((*view.cluster[1:], new))))
    begin = time.perf_counter()
    dataplane.apply(_update(changed, full=False), _HOST)
    found = {f"burst of {len(changed)}": (time.perf_counter() - begin) * 1000}
    dataplane.apply(_update({key: meant[key] for key in changed}, full=False), _HOST)
    return found


def measure(mode: str, services: int, *, endpoints: int) -> dict[str, float]:
    """Milliseconds of a cold load, of adopting it, of reading it all back, of changes, and of the floor."""
    meant = views(services, endpoints)
    found: dict[str, float] = {}

    def timed(name: str, begin: float) -> None:
        found[name] = (time.perf_counter() - begin) * 1000

    dataplane = MODES[mode]()
    begin = time.perf_counter()
    dataplane.apply(_update(meant), _HOST)
    timed("cold load", begin)
    found |= _changes(dataplane, meant)
    found |= _burst(dataplane, meant)
    begin = time.perf_counter()
    drift = dataplane.verify()
    timed("verify", begin)
    assert not drift.count, drift
    dataplane.close()
    second = MODES[mode]()
    begin = time.perf_counter()
    second.apply(_update(meant), _HOST)
    timed("adopt", begin)
    begin = time.perf_counter()
    second.cleanup()
    timed("cleanup", begin)
    second.close()
    if services <= _FLOOR_LIMIT[mode]:
        found["floor"] = _floor(mode, meant, endpoints)
        found["cold load / floor"] = found["cold load"] / found["floor"]
    return found


def _floor(mode: str, meant: dict[ServiceKey, ServiceView], endpoints: int) -> float:
    """Milliseconds of the tool with all rules in one text; for IPVS, of the same requests, packed before."""
    if mode == "ipvs":
        argv = [sys.executable, "-m", "bench.ipvs_floor", str(len(meant)), str(endpoints)]
        return float(subprocess.run(["unshare", "-n", *argv], check=True, stdout=subprocess.PIPE).stdout)
    if mode == "nftables":
        text, command = render_ruleset(meant, _HOST, Family.IPV4), ["nft", "-f", "-"]
    else:
        text, command = render_script(meant, _HOST, Family.IPV4), [f"{mode}-restore", "--noflush"]
    begin = time.perf_counter()
    subprocess.run(command, input=text, text=True, check=True)
    spent = (time.perf_counter() - begin) * 1000
    if mode == "nftables":
        subprocess.run(["nft", "delete", "table", "ip", "rulecast"], check=True)
    else:
        MODES[mode]().cleanup()
    return spent
