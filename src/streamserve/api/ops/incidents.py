"""The fleet's incidents as Prometheus metrics; available even when no worker is."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamserve.api.ops.worker_metrics import LABEL, OURS
from streamserve.protocol.reports import IncidentReport

_COUNTERS = {
    "worker_deaths": ("deaths", "Worker processes that ended, failed starts too."),
    "requests_suspected": ("suspects", "Requests that were in a step that ended its worker."),
    "requests_given_up": ("convicted", "Requests that ended their worker alone again and again."),
    "crash_reports": ("crash_reports", "Crash reports that workers have written."),
    "observer_failures": ("observer_failures", "Timelines and traces that failed and were turned off."),
}


class IncidentMetrics(Collector):
    """The fleet's incident counts, read at each scrape."""

    def __init__(self, model_name: str, incidents: Callable[[], IncidentReport]) -> None:
        self._model_name = model_name
        self._incidents = incidents

    def collect(self) -> Iterable[Metric]:
        report = self._incidents()
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"{OURS}{name}", text, labels=(LABEL,))
            counter.add_metric((self._model_name,), getattr(report, field))
            yield counter
        gauge = GaugeMetricFamily(
            f"{OURS}num_requests_quarantined", "Suspects that are not cleared yet.", labels=(LABEL,)
        )
        gauge.add_metric((self._model_name,), report.quarantined)
        yield gauge
