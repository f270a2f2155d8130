"""What happens at the gRPC port, as metrics. No label names a peer or a node."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rulecast_server.rpc.server import RpcServer
from rulecast_server.rpc.tokens import TokenIdentities

_PREFIX = "rulecast_server_"


class RpcCollector(Collector):
    """Renders live counters when they are scraped."""

    def __init__(self, rpc: RpcServer, *, tokens: TokenIdentities | None) -> None:
        """`tokens`: None where certificates or nothing tell who an agent is."""
        self._rpc = rpc
        self._tokens = tokens

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment."""
        rpc, counters = self._rpc, self._rpc.counters
        insecure = rpc.credentials is None
        yield GaugeMetricFamily(f"{_PREFIX}insecure", "1: plain text, and anyone may ask.", value=insecure)
        yield _labeled("rpc_refused", "Calls refused or ended, by status.", "code", counters.refused)
        for name, text, value in (
            ("rpc_unread_cuts", "Connections ended because their peer took nothing.", counters.unread_cuts),
            ("rpc_excess_cuts", "Connections ended: too many of one address.", counters.excess_cuts),
            ("rpc_revoked", "Streams whose identity no longer held.", counters.revoked),
            ("rpc_throttled", "Requests read later because too many came.", counters.throttled),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=value)
        yield GaugeMetricFamily(
            f"{_PREFIX}rpc_greeting", "Streams whose node is not known yet.", value=rpc.greeting
        )
        if rpc.credentials is not None:
            yield CounterMetricFamily(
                f"{_PREFIX}tls_reloads",
                "TLS files read again.",
                value=rpc.credentials.reloads,
            )
            yield GaugeMetricFamily(
                f"{_PREFIX}tls_files_unusable",
                "1 while the files on disk cannot be used and older ones are.",
                value=bool(rpc.credentials.error),
            )
        if self._tokens is not None:
            yield _labeled("token_reviews", "Token reviews by result.", "result", self._tokens.counters)
            yield GaugeMetricFamily(
                f"{_PREFIX}token_reviews_failing",
                "1 while the API server does not answer reviews.",
                value=bool(self._tokens.problem),
            )


def _labeled(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
