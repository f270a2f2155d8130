"""Metrics of both sides keep to the rules of promtool check metrics, and to a bounded number of series."""

import re
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.netns.objects import Svc
from tests.netns.rig import Rig
from tests.netns.world import A, B

_NOT_BASE_UNITS = {
    *("ms", "us", "ns", "s", "sec", "secs", "msec", "milliseconds", "microseconds", "nanoseconds", "minutes"),
    *(
        "hours",
        "days",
        "kb",
        "mb",
        "gb",
        "kilobytes",
        "megabytes",
        "gigabytes",
        "bits",
        "percent",
        "percents",
    ),
}
_TYPES = {"gauge", "counter", "histogram", "summary"}
_SUFFIXES = ("_bucket", "_count", "_sum", "_info", "_total")
_AS_KUBE_PROXY_HAS_IT = {"kubeproxy_sync_proxy_rules_no_local_endpoints_total"}
"""A gauge in spite of its name; dashboards know it as that."""
SIDES = ("server", "agent")


def scrape(rig: Rig, side: str) -> str:
    where = {"host": rig.lab.fabric, "port": 9440} if side == "server" else {"port": 10256}
    answered = rig.get("/metrics", **where)
    assert answered.status == 200
    assert answered.headers["Content-Type"].startswith("text/plain")
    return answered.text


def problems(metric: Metric) -> Iterator[str]:
    words = metric.name.split("_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", metric.name) or "" in words:
        yield "its name is not lower case words joined by _"
    if not metric.documentation.strip():
        yield "it has no help"
    if metric.type in ("unknown", "untyped"):
        yield "it has no type"
    odd = metric.name in _AS_KUBE_PROXY_HAS_IT
    if metric.type != "counter" and metric.name.endswith(_SUFFIXES) and not odd:
        yield f"a {metric.type} has a suffix of another type"
    yield from (f"its name has {word!r}, which is no base unit" for word in words if word in _NOT_BASE_UNITS)
    yield from (f"its name says that it is a {word}" for word in words if word in _TYPES)
    for label in {label for sample in metric.samples for label in sample.labels}:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", label):
            yield f"label {label!r}"
        if label in ("le", "quantile") and metric.type not in ("histogram", "summary"):
            yield f"label {label!r} on a {metric.type}"


class TestMetrics:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def line(cls, rig: Rig) -> None:
        rig.write(Svc("web", 70, [A, B]))
        rig.server()
        rig.agent()
        rig.until_programmed()

    @pytest.mark.parametrize("side", SIDES)
    def test_names_types_and_units(self, rig: Rig, side: str) -> None:
        text = scrape(rig, side)
        metrics = list(text_string_to_metric_families(text))
        assert len(metrics) > 20
        found = [f"{metric.name}: {problem}" for metric in metrics for problem in problems(metric)]
        assert found == []
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        series = [line.rpartition(" ")[0] for line in text.splitlines() if line and line[0] != "#"]
        assert len(series) == len(set(series))

    @pytest.mark.parametrize("side", SIDES)
    def test_the_number_of_series_does_not_grow_with_services_and_names_none(
        self, rig: Rig, side: str
    ) -> None:
        few = len(scrape(rig, side).splitlines())
        rig.apply(*(Svc(f"grown-{number}", number, [A, B]) for number in range(100, 160)))
        rig.until_programmed()
        rig.eventually(
            lambda: rig.metric("rulecast_server_projections_total", host=rig.lab.fabric, port=9440) > 1, 5
        )
        text = scrape(rig, side)
        assert len(text.splitlines()) <= few + 5
        assert "grown-" not in text
        assert "default/" not in text
