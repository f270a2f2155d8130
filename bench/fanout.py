"""Many agents on one server: all connect at once, then a hundred changes a second reach every one."""

import json
import time
from pathlib import Path

from bench import objects
from bench.line import start_server
from bench.process import Process, quantile

_PERIOD = 0.01
"""Seconds between two changes."""


def measure(agents: int, *, services: int, endpoints: int, seconds: float, work: Path) -> dict[str, float]:
    """CPU, bytes and latency an agent.

    Latency is from the input of the apiserver stand-in to the agent's stream.
    """
    log = work / "log"
    with (
        Process(["bench.apiserver", str(services), str(endpoints)], log=log, talk=True) as api,
        start_server(api, work) as server,
    ):
        before, _ = server.memory()
        with Process(["bench.load", "127.0.0.1:9443", str(agents)], log=log, talk=True) as load:
            found = _run(api, server, load, agents, services, endpoints, seconds)
    return {"server spawn to ready": server.became_ready * 1000, "server MB without agents": before, **found}


def _run(
    api: Process, server: Process, load: Process, agents: int, services: int, endpoints: int, seconds: float
) -> dict[str, float]:
    synced = json.loads(load.hear())
    found = {"all in sync": synced["seconds"] * 1000, "snapshot B an agent": synced["bytes"] / agents}
    time.sleep(2.0)
    found["server MB"], found["server peak MB"] = server.memory()
    sent: dict[str, float] = {}
    server_cpu, load_cpu, begin = server.cpu(), load.cpu(), time.monotonic()
    # Each service once: then a receipt names its change.
    for change in range(min(services, int(seconds / _PERIOD))):
        time.sleep(max(0.0, begin + change * _PERIOD - time.monotonic()))
        sent[objects.service_key(change)] = time.monotonic()
        api.say(f"{change} {change + 1}")
    elapsed = time.monotonic() - begin
    time.sleep(1.0)
    found["server CPU us an update an agent"] = (server.cpu() - server_cpu) / len(sent) / agents * 1e6
    found["server cores"] = (server.cpu() - server_cpu) / elapsed
    found["clients' cores"] = (load.cpu() - load_cpu) / elapsed
    load.say("end")
    seen = json.loads(load.hear())
    latencies = [at - sent[name] for name, at in seen["received"] if name in sent]
    found["changes/s"] = len(sent) / elapsed
    found["frames an agent"] = seen["frames"] / agents
    found["bytes an update an agent"] = seen["bytes"] / len(sent) / agents
    found["received, share of sampled"] = len(latencies) / len(sent) / sampled(agents)
    found["latency p50"] = quantile(latencies, 0.5) * 1000
    found["latency p99"] = quantile(latencies, 0.99) * 1000
    return found


def sampled(agents: int) -> int:
    """How many agents' receipts are timed (see `bench.load`)."""
    return len(range(0, agents, max(1, agents // 20)))
