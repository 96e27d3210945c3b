"""The fleet's incidents as Prometheus metrics. They are available even if no worker runs."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamserve.api.metrics.worker_metrics import LABEL, PREFIX
from streamserve.protocol.reports import IncidentReport

_COUNTERS = {
    "worker_deaths": ("deaths", "Worker processes that crashed, including failed starts."),
    "requests_suspected": ("suspects", "Requests that were in a step during which the worker crashed."),
    "requests_given_up": (
        "convicted",
        "Requests refused because their worker crashed repeatedly while it computed no other request.",
    ),
    "crash_reports": ("crash_reports", "Crash reports written by workers."),
    "workers_adopted": ("adopted", "Workers taken over from another head, with their weights and caches."),
    "resumed_outputs": (
        "resumed_outputs",
        "Repeated requests that began with output tokens kept by workers of another head.",
    ),
    "resumed_output_tokens": (
        "resumed_tokens",
        "Output tokens kept by workers of another head, which were not computed again.",
    ),
    "observer_failures": ("observer_failures", "Timelines and traces that failed and were disabled."),
}


class IncidentMetrics(Collector):
    """The fleet's incident counts, read at each scrape."""

    def __init__(self, model_name: str, incidents: Callable[[], IncidentReport]) -> None:
        self._model_name = model_name
        self._incidents = incidents

    def collect(self) -> Iterable[Metric]:
        """Yield the fleet's counts."""
        report = self._incidents()
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}{name}", text, labels=(LABEL,))
            counter.add_metric((self._model_name,), getattr(report, field))
            yield counter
        gauge = GaugeMetricFamily(
            f"{PREFIX}num_requests_quarantined",
            "Requests suspected of crashing a worker and not yet cleared.",
            labels=(LABEL,),
        )
        gauge.add_metric((self._model_name,), report.quarantined)
        yield gauge
