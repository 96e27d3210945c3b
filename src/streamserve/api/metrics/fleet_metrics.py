"""The fleet as Prometheus metrics: its incidents, its workers, and the machines that they run on. They are
available even if no worker runs.

A scrape has one line for each present worker and machine. Both numbers are bounded: by --max-workers, and by
the number of agents that can join.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamserve.api.metrics.worker_metrics import family
from streamserve.fleet.view import MachineView, RouterView
from streamserve.protocol.reports import IncidentReport

HOST = "host"
_INCIDENTS = {
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
        "Repeated requests that began with output tokens of an earlier attempt under another head server.",
    ),
    "resumed_output_tokens": (
        "resumed_tokens",
        "Output tokens that workers had computed under another head server and that were reused.",
    ),
    "observer_failures": ("observer_failures", "Timelines and traces that failed and were disabled."),
}
_MACHINES: Mapping[str, tuple[str, Callable[[MachineView], float | None]]] = {
    "machine_slots": ("Workers that a joined machine can run.", lambda machine: machine.slots),
    "machine_workers": ("Workers that a machine runs.", lambda machine: len(machine.workers)),
    "machine_joined_seconds": ("Seconds since a machine joined.", lambda machine: machine.joined_seconds),
    "machine_silence_seconds": (
        "Seconds since the last message from a machine.",
        lambda machine: machine.silence,
    ),
}


class FleetMetrics(Collector):
    """The fleet's incident counts, and the readiness of each worker and its machine, read at each scrape."""

    def __init__(
        self, model_name: str, incidents: Callable[[], IncidentReport], routing: Callable[[], RouterView]
    ) -> None:
        self._model_name = model_name
        self._incidents = incidents
        self._routing = routing

    def collect(self) -> Iterable[Metric]:
        """Yield the fleet's counts, and the metrics of all present workers and machines."""
        report, view, model = self._incidents(), self._routing(), self._model_name
        for name, (field, text) in _INCIDENTS.items():
            yield family(CounterMetricFamily, name, text, {(model,): getattr(report, field)})
        yield family(
            GaugeMetricFamily,
            "num_requests_quarantined",
            "Requests suspected of crashing a worker and not yet cleared.",
            {(model,): report.quarantined},
        )
        yield family(
            GaugeMetricFamily,
            "worker_ready",
            "Whether a worker can compute requests; host is empty if the worker is not running.",
            {(model, worker.name, worker.host): float(worker.ready) for worker in view.workers},
            "worker", HOST,
        )  # fmt: skip
        for name, (text, value) in _MACHINES.items():
            amounts = {(model, machine.name): value(machine) for machine in view.machines}
            known = {labels: amount for labels, amount in amounts.items() if amount is not None}
            yield family(GaugeMetricFamily, name, text, known, HOST)
