"""Models that are loaded on demand, as Prometheus metrics, and the exposition of all models' metrics
together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamserve.api.metrics.worker_metrics import PREFIX, MetricFamily, family


class ModelState(Protocol):
    """What is measured of one model of a pool: its state in a word, its memory in bytes once it is loaded,
    how often it was loaded and unloaded, and the time of the last load."""

    @property
    def state(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def loads(self) -> int: ...

    @property
    def unloads(self) -> int: ...

    @property
    def load_seconds(self) -> float:
        """The seconds that the last load took."""


Values = Mapping[str, tuple[str, Callable[[ModelState], float]]]
"""Help and value of each metric of a model."""

_GAUGES: Values = {
    "model_loaded": ("Whether the model is loaded.", lambda model: model.state == "loaded"),
    "model_memory_bytes": ("Memory that the model takes while it is loaded.", lambda model: model.size),
    "model_load_seconds": (
        "Duration of the model's last load, in seconds.",
        lambda model: model.load_seconds,
    ),
}
_COUNTERS: Values = {
    "model_loads": ("Number of times that the model was loaded.", lambda model: model.loads),
    "model_unloads": ("Number of times that the model was unloaded.", lambda model: model.unloads),
}


class PoolMetrics(Collector):
    """The states of models, read at each scrape."""

    def __init__(self, models: Mapping[str, ModelState], budget: int) -> None:
        self._models = models
        self._budget = budget

    def collect(self) -> Iterable[Metric]:
        budget = "Memory limit for the models that are loaded at the same time."
        yield GaugeMetricFamily(f"{PREFIX}models_memory_limit_bytes", budget, value=self._budget)
        yield from self._families(GaugeMetricFamily, _GAUGES)
        yield from self._families(CounterMetricFamily, _COUNTERS)

    def _families(self, kind: type[MetricFamily], values: Values) -> Iterable[Metric]:
        for name, (text, value) in values.items():
            yield family(kind, name, text, {(key,): value(model) for key, model in self._models.items()})


def exposition_of_all(collectors: Sequence[Collector]) -> bytes:
    """Return the metrics of several collectors in Prometheus' text format, each family once."""
    registry = CollectorRegistry()
    registry.register(_Merged(collectors))
    return generate_latest(registry)


class _Merged(Collector):
    """The families of all collectors. Families with the same name are merged."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def describe(self) -> Iterable[Metric]:
        """Yield nothing, so that the registry neither checks names nor collects for this."""
        return ()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for metric in collector.collect():
                families.setdefault(metric.name, metric)
                if families[metric.name] is not metric:
                    families[metric.name].samples += metric.samples
        return families.values()
