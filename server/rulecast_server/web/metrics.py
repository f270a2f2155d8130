"""The server's metrics, read from live counters when they are scraped. No label names an object or a node."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rulecast_server.feed import Hub
from rulecast_server.kube.status import Source
from rulecast_server.pipeline import Pipeline

_PREFIX = "rulecast_server_"
_RESOURCE_COUNTERS = (
    "lists",
    "streamed_lists",
    "relists",
    "watches",
    "bookmarks",
    "received",
    "delivered",
    "stale",
    "bad_objects",
)


class ServerCollector(Collector):
    """Renders the source, the pipeline and the hub."""

    def __init__(self, *, source: Source, pipeline: Pipeline, hub: Hub) -> None:
        self._source = source
        self._pipeline = pipeline
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment."""
        yield from self._of_source()
        yield from self._of_pipeline()
        yield from self._of_hub()

    def _of_source(self) -> Iterator[Metric]:
        statuses = list(self._source.status.values())
        for name in _RESOURCE_COUNTERS:
            family = CounterMetricFamily(
                f"{_PREFIX}watch_{name}", f"{name} by resource.", labels=["resource"]
            )
            for status in statuses:
                family.add_metric([status.resource], getattr(status, name))
            yield family
        errors = CounterMetricFamily(
            f"{_PREFIX}watch_errors", "Failed lists and watches.", labels=["resource", "reason"]
        )
        connected = GaugeMetricFamily(f"{_PREFIX}watch_connected", "1 while connected.", labels=["resource"])
        objects = GaugeMetricFamily(f"{_PREFIX}objects", "Objects held.", labels=["resource"])
        contact = GaugeMetricFamily(
            f"{_PREFIX}watch_last_contact_timestamp_seconds", "The last byte.", labels=["resource"]
        )
        for status in statuses:
            connected.add_metric([status.resource], status.connected)
            objects.add_metric([status.resource], status.objects)
            contact.add_metric([status.resource], status.last_contact or 0.0)
            for reason, count in status.errors.items():
                errors.add_metric([status.resource, reason], count)
        yield from (errors, connected, objects, contact)

    def _of_pipeline(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(f"{_PREFIX}synced", "1 once all is listed.", value=self._pipeline.ready)
        yield CounterMetricFamily(f"{_PREFIX}events", "Object events taken.", value=self._pipeline.received)
        yield CounterMetricFamily(
            f"{_PREFIX}projections", "Projections that changed a rule.", value=self._pipeline.projections
        )
        yield CounterMetricFamily(
            f"{_PREFIX}event_failures", "Events that could not be processed.", value=self._source.failures
        )
        problems = GaugeMetricFamily(
            f"{_PREFIX}object_problems", "Objects in part unused.", labels=["reason"]
        )
        for reason, count in Counter(str(each.reason) for each in self._pipeline.projector.problems).items():
            problems.add_metric([reason], count)
        yield problems

    def _of_hub(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            f"{_PREFIX}revision", "This replica's count of changes.", value=self._hub.log.revision
        )
        counters = msgspec.structs.asdict(self._hub.counters)
        yield GaugeMetricFamily(f"{_PREFIX}streams", "Open streams.", value=counters.pop("streams"))
        for name, value in counters.items():
            yield CounterMetricFamily(f"{_PREFIX}feed_{name}", f"The feed's {name}.", value=value)
        agents = self._hub.agents()
        behind = [agent.lag for agent in agents]
        yield GaugeMetricFamily(
            f"{_PREFIX}agent_lag_max_seconds",
            "The longest wait of an agent's mark.",
            value=max(behind, default=0),
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}agents_in_error",
            "Agents whose kernel refused something.",
            value=sum(1 for agent in agents if agent.ack and (agent.ack.error_count or agent.ack.node_error)),
        )


def registry(*, source: Source, pipeline: Pipeline, hub: Hub) -> CollectorRegistry:
    """A registry with all of the server's metrics and the process's own."""
    made = CollectorRegistry()
    made.register(ServerCollector(source=source, pipeline=pipeline, hub=hub))
    made.register(_Started())
    return made


class _Started(Collector):
    def __init__(self) -> None:
        self._at = time.time()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("process_start_time_seconds", "Start of the process.", value=self._at)
