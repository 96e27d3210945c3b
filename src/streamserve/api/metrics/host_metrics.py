"""Workers and the machines that they run on, as Prometheus metrics.

A scrape has one line for each present worker and machine. Both numbers are bounded: by --max-workers, and by
the number of agents that can join.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamserve.api.metrics.worker_metrics import LABEL, PREFIX
from streamserve.fleet.view import MachineView, RouterView

HOST = "host"
_MACHINES: Mapping[str, tuple[str, Callable[[MachineView], float | None]]] = {
    "machine_slots": ("Workers that a joined machine can run.", lambda machine: machine.slots),
    "machine_workers": ("Workers that a machine runs.", lambda machine: len(machine.workers)),
    "machine_joined_seconds": ("Seconds since a machine joined.", lambda machine: machine.joined_seconds),
    "machine_silence_seconds": (
        "Seconds since the last message from a machine.",
        lambda machine: machine.silence,
    ),
}


class HostMetrics(Collector):
    """The readiness of each worker and its machine, read at each scrape."""

    def __init__(self, model_name: str, routing: Callable[[], RouterView]) -> None:
        self._model_name = model_name
        self._routing = routing

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of all present workers and machines."""
        view = self._routing()
        ready = GaugeMetricFamily(
            f"{PREFIX}worker_ready",
            "Whether a worker can compute requests; host is empty if the worker is not running.",
            labels=(LABEL, "worker", HOST),
        )
        for worker in view.workers:
            ready.add_metric((self._model_name, worker.name, worker.host), float(worker.ready))
        yield ready
        for name, (text, value) in _MACHINES.items():
            family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=(LABEL, HOST))
            for machine in view.machines:
                amount = value(machine)
                if amount is not None:
                    family.add_metric((self._model_name, machine.name), amount)
            yield family
