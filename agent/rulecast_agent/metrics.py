"""The agent's metrics: kube-proxy's names where kube-proxy has the metric, else rulecast_agent_*.

Histograms of kube-proxy that it labels by family have no such label here: one write carries both families.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rulecast.model import ServiceKey
from rulecast.view import Receipt, ServiceView, Update
from rulecast_agent.feed.base import FeedStatus

_SYNC_BUCKETS = [0.001 * 2**exponent for exponent in range(15)]
_PROGRAMMING_BUCKETS = [
    *(0.25, 0.5),
    *(float(second) for second in range(1, 60)),
    *(float(second) for second in range(60, 120, 5)),
    *(float(second) for second in range(120, 301, 30)),
]
_FAILURES = {
    "nftables": "nftables_sync_failures",
    "iptables": "iptables_restore_failures",
    "ipvs": "iptables_restore_failures",
}


class AgentMetrics:
    """Everything counted in one agent; each has a registry of its own."""

    def __init__(self, *, mode: str = "nftables") -> None:
        self.registry = CollectorRegistry()
        self._feed = _FeedCollector()
        self.registry.register(self._feed)
        self._sync = self._histogram("kubeproxy_sync_proxy_rules_duration_seconds", "One write.")
        self._full = self._histogram("kubeproxy_sync_full_proxy_rules_duration_seconds", "One full write.")
        self._partial = self._histogram(
            "kubeproxy_sync_partial_proxy_rules_duration_seconds", "One write of changes."
        )
        self._programming = self._histogram(
            "kubeproxy_network_programming_duration_seconds",
            "From the change of an endpoint to its rules, per service port.",
            _PROGRAMMING_BUCKETS,
        )
        self._last_sync = self._gauge(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "The last successful write."
        )
        self._last_queued = self._gauge(
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "The last update that came."
        )
        self._changes = self._counter(
            "kubeproxy_sync_proxy_rules_service_changes", "Changed service ports, endpoints included."
        )
        self.pending = self._gauge(
            "kubeproxy_sync_proxy_rules_service_changes_pending", "Changed service ports not yet written."
        )
        self._failures = self._counter(
            f"kubeproxy_sync_proxy_rules_{_FAILURES[mode]}", "Writes of which nothing took effect."
        )
        self._no_local = self._gauge(
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            "Service ports with a Local policy whose endpoints are all elsewhere.",
            ["traffic_policy"],
        )
        self.healthz = self._counter("kubeproxy_proxy_healthz", "Answers of /healthz.", ["code"])
        self.livez = self._counter("kubeproxy_proxy_livez", "Answers of /livez.", ["code"])
        self._conntrack_deleted = self._counter(
            "kubeproxy_conntrack_reconciler_deleted_entries", "Stale UDP flows removed."
        )
        self._conntrack_seconds = self._histogram(
            "kubeproxy_conntrack_reconciler_sync_duration_seconds", "One removal of stale UDP flows."
        )
        own = "rulecast_agent_"
        self._conntrack_failures = self._counter(f"{own}conntrack_failures", "Removals that failed.")
        self._revision = self._gauge(f"{own}applied_revision", "The update that the kernel has.")
        self._errors = self._gauge(f"{own}services_in_error", "Service ports that the kernel refuses.")
        self._transactions = self._counter(f"{own}transactions", "Writes that changed something.")
        self._operations = self._counter(f"{own}operations", "Kernel operations done.")
        self._drift = self._counter(f"{own}drift", "Differences made by others, found and mended.")
        self.ready = self._gauge(f"{own}ready", "1 once the first whole state is in the kernel.")
        self.insecure = self._gauge(f"{own}insecure", "1: plain text, and the server is not verified.")
        self.health_check_listen_errors = self._gauge(
            f"{own}health_check_node_ports_failing", "Health-check node ports that cannot be listened on."
        )
        self._no_local_endpoints = NoLocalEndpoints()
        self.settled({})

    def queued(self, update: Update, pending: int) -> None:
        """An update came."""
        self._last_queued.set(time.time())
        self._changes.inc(len(update.services))
        self.pending.set(pending)

    def applied(self, update: Update, receipt: Receipt, *, now: float) -> None:
        """An update is in the kernel; `now` is in unix seconds."""
        (self._full if update.full else self._partial).observe(receipt.seconds)
        self._observe(receipt, now)
        for key, trigger in update.trigger_times.items():
            if key not in receipt.errors:
                self._programming.observe(max(0.0, now - trigger))

    def retried(self, receipt: Receipt, *, now: float) -> None:
        """What was refused was tried again."""
        self._observe(receipt, now)

    def failed(self) -> None:
        """Nothing could be written."""
        self._failures.inc()

    def drifted(self, count: int) -> None:
        """A read-back found this many differences."""
        self._drift.inc(count)

    def conntrack(self, deleted: int, seconds: float, failed: bool) -> None:
        """One clean-up ended."""
        self._conntrack_deleted.inc(deleted)
        self._conntrack_seconds.observe(seconds)
        if failed:
            self._conntrack_failures.inc()

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> None:
        """These services are in the kernel as given (None: gone)."""
        self._no_local_endpoints.settled(changes)
        self._no_local.labels("internal").set(len(self._no_local_endpoints.internal))
        self._no_local.labels("external").set(len(self._no_local_endpoints.external))

    def feed(self, status: FeedStatus) -> None:
        """Take the feed's state of this moment; call before rendering."""
        self._feed.status = status

    def _observe(self, receipt: Receipt, now: float) -> None:
        self._sync.observe(receipt.seconds)
        self._last_sync.set(now)
        self._revision.set(receipt.revision)
        self._errors.set(len(receipt.errors))
        if receipt.operations:
            self._transactions.inc()
            self._operations.inc(receipt.operations)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _SYNC_BUCKETS) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)

    def _gauge(self, name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)


class NoLocalEndpoints:
    """Service ports whose Local policy drops here what other nodes would serve.

    As kube-proxy counts them: none when the service has no usable endpoint anywhere, which rejects instead.
    """

    def __init__(self) -> None:
        self.internal: set[ServiceKey] = set()
        self.external: set[ServiceKey] = set()

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> None:
        """Take changed services (None: gone)."""
        for key, view in changes.items():
            self.internal.discard(key)
            self.external.discard(key)
            if view is None or view.local or not view.service.has_endpoints:
                continue
            if view.service.internal_local:
                self.internal.add(key)
            if view.service.external_local and view.service.externally_reachable:
                self.external.add(key)


class _FeedCollector(Collector):
    """Renders the last FeedStatus that was taken."""

    def __init__(self) -> None:
        self.status: FeedStatus | None = None

    def collect(self) -> Iterator[Metric]:
        """The feed's gauges, and its counters under their own names."""
        status = self.status
        if status is None:
            return
        prefix = "rulecast_agent_feed_"
        yield GaugeMetricFamily(f"{prefix}connected", "1 while a stream is open.", value=status.connected)
        stale = 0.0 if status.stale_since is None else max(0.0, time.time() - status.stale_since)
        yield GaugeMetricFamily(
            f"{prefix}staleness_seconds", "How old what we hold may be; 0 while connected.", value=stale
        )
        yield GaugeMetricFamily(
            f"{prefix}last_mark_timestamp_seconds", "The newest mark.", value=status.last_mark or 0.0
        )
        yield GaugeMetricFamily(f"{prefix}problems", "Problems of the feed now.", value=len(status.problems))
        for name, value in status.counters.items():
            yield CounterMetricFamily(f"{prefix}{name}", f"The feed's {name}.", value=value)
