"""Many agents on one server: all connect at once, are cut and come back, then changes reach every one."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from bench import objects
from bench.line import start_server
from bench.process import Process, quantile

_CHANGED = 10
"""Services that change while all agents are away."""
_SETTLED = 2.0
"""Seconds until a phase has left the server's memory and buffers."""


def measure(
    agents: int, *, services: int, endpoints: int, rate: float, seconds: float, work: Path
) -> dict[str, float]:
    """CPU, bytes and latency an agent; the server has a core of its own where there are two.

    Latency is from the input of the apiserver stand-in to the agent's stream.
    """
    log = work / "log"
    cores = sorted(os.sched_getaffinity(0))
    server_core, other = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    with (
        Process(["bench.apiserver", str(services), str(endpoints)], log=log, talk=True, core=other) as api,
        start_server(api.hear(), work, core=server_core) as server,
    ):
        before, _ = server.memory()
        with Process(["bench.load", "127.0.0.1:9443", str(agents)], log=log, talk=True, core=other) as load:
            found = _connect(server, load, agents, before)
            found |= _come_back(api, load, agents)
            found |= _change(api, server, load, agents, rate=rate, services=services, seconds=seconds)
    return {"server spawn to ready": server.became_ready * 1000, "server MB without agents": before, **found}


def _connect(server: Process, load: Process, agents: int, before: float) -> dict[str, float]:
    synced = _hear(load)
    found = {"all in sync": synced["seconds"] * 1000, "snapshot B an agent": synced["bytes"] / agents}
    time.sleep(_SETTLED)
    steady, peak = server.memory()
    found |= {"server MB": steady, "server peak MB": peak, "peak / steady": peak / steady}
    found["server KB an agent"] = (steady - before) * 1024 / agents
    return found


def _come_back(api: Process, load: Process, agents: int) -> dict[str, float]:
    """All agents are cut, and come back at once with what they hold."""
    found = {}
    for name, changes in (("nothing changed", 0), (f"{_CHANGED} changed", _CHANGED)):
        load.say("cut")
        _hear(load)
        for number in range(changes):
            api.say(f"{number} {100_000 + number}")
        time.sleep(_SETTLED)
        load.say("join")
        back = _hear(load)
        found[f"all back, {name}"] = back["seconds"] * 1000
        found[f"reconnect B, {name}"] = back["bytes"] / agents
    return found


def _change(
    api: Process, server: Process, load: Process, agents: int, *, rate: float, services: int, seconds: float
) -> dict[str, float]:
    sent: dict[str, float] = {}
    server_cpu, load_cpu, begin = server.cpu(), load.cpu(), time.monotonic()
    # Each service once: then a receipt names its change.
    for change in range(min(services, max(1, int(seconds * rate)))):
        time.sleep(max(0.0, begin + change / rate - time.monotonic()))
        sent[objects.service_key(change)] = time.monotonic()
        api.say(f"{change} {change + 1}")
    elapsed = time.monotonic() - begin
    time.sleep(1.0)
    spent = server.cpu() - server_cpu
    load_spent = load.cpu() - load_cpu
    load.say("end")
    seen = json.loads(load.hear())
    latencies = [at - sent[name] for name, at in seen["received"] if name in sent]
    return {
        "server CPU us an update an agent": spent / len(sent) / agents * 1e6,
        "server CPU us a frame": spent / seen["frames"] * 1e6,
        "server cores": spent / elapsed,
        "clients' cores": load_spent / elapsed,
        "server MB after changes": server.memory()[0],
        "changes/s": len(sent) / elapsed,
        "frames an agent": seen["frames"] / agents,
        "bytes an update an agent": seen["bytes"] / len(sent) / agents,
        "received, share of sampled": len(latencies) / len(sent) / seen["sampled"],
        "digest mismatches": seen["mismatches"],
        "latency p50": quantile(latencies, 0.5) * 1000,
        "latency p99": quantile(latencies, 0.99) * 1000,
    }


def _hear(load: Process) -> dict[str, float]:
    line = load.hear()
    if not line:
        raise RuntimeError("the agents ended")
    found: dict[str, float] = json.loads(line)
    return found


def summary(row: Mapping[str, float]) -> dict[str, float]:
    """What scripts read, by names that stay."""
    return {
        "cpu_us_per_frame": row["server CPU us a frame"],
        "cpu_us_per_agent_per_change": row["server CPU us an update an agent"],
        "p50_ms": row["latency p50"],
        "p99_ms": row["latency p99"],
        "storm_s": row["all in sync"] / 1000,
        "storm_peak_ratio": row["peak / steady"],
        "resume_bytes": row["reconnect B, nothing changed"],
        "bytes_per_agent_per_change": row["bytes an update an agent"],
        "server_mb": row["server MB"],
    }
