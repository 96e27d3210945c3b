"""Prometheus metrics of one server: requests as clients see them, and the workers' reports.

All names begin with `streamserve:`. Metrics that also exist in vLLM (VLLM_NAMES) are exported under `vllm:`,
too, so that vLLM's dashboards and autoscalers work unchanged.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from streamserve.api.metrics.fleet_metrics import FleetMetrics
from streamserve.api.metrics.slo_classes import strictness
from streamserve.api.metrics.worker_metrics import LABEL, PREFIX, WorkerMetrics, family
from streamserve.fleet.view import RouterView
from streamserve.protocol.errors import PromptChanged, RequestError
from streamserve.protocol.reports import IncidentReport, Report
from streamserve.protocol.sampling import NO_SLO, Slo
from streamserve.text.output import ChoiceDelta, Usage

VLLM_PREFIX = "vllm:"

VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "corrupted_requests",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
}
"""Families that vLLM has with the same name and meaning (in its v1/metrics/loggers.py and
v1/spec_decode/metrics.py). Their labels differ."""

SUCCESSES = ("stop", "length", "abort")
"""Finish reasons that vLLM counts as success. vLLM's label for the finish reason is finished_reason."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_COUNTS = tuple(2**power for power in range(0, 18))

_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _SECONDS),
    "stream_time_to_first_token_seconds": (
        "Time from a prompt stream's creation to its first token.",
        _SECONDS,
    ),
    "inter_token_latency_seconds": ("Time between two tokens of a choice.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": (
        "Mean time per output token of a request, after the first.",
        _TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", _SECONDS),
    "request_queue_time_seconds": ("Time from a request's arrival to its first step.", _SECONDS),
    "request_prefill_time_seconds": ("Time from a request's first step to its first token.", _SECONDS),
    "request_decode_time_seconds": ("Time from a request's first token to its last.", _SECONDS),
    "request_inference_time_seconds": ("Time from a request's first step to its last token.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _COUNTS),
    "request_generation_tokens": ("Generated tokens of a request.", _COUNTS),
    "request_params_n": ("Choices requested (n).", (1, 2, 5, 10, 20)),
    "event_loop_lag_seconds": (
        "Delay of the API server's event loop, measured ten times a second.",
        _LAG_SECONDS,
    ),
    "request_params_max_tokens": ("Maximum output tokens of a choice, requested or by default.", _COUNTS),
}


class Metrics:
    """The metrics of one server in a separate registry, labelled with the model's name."""

    def __init__(
        self,
        model_name: str,
        report: Callable[[], Report | None],
        incidents: Callable[[], IncidentReport],
        routing: Callable[[], RouterView],
    ) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._registry.register(WorkerMetrics(model_name, report))
        self._registry.register(FleetMetrics(model_name, incidents, routing))
        self._finished = Counter(
            f"{PREFIX}requests",
            "Finished choices, by reason.",
            (LABEL, "finish_reason"),
            registry=self._registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of served requests.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.memory = self._gauge(
            "memory_held_bytes", "Bytes of max_memory_bytes that are charged to open requests."
        )
        self.streams = self._gauge("streams", "Open prompt streams.")
        self.stream_chunks = self._counter("stream_chunks", "Chunks added to prompt streams.")
        self._ignored_fields = Counter(
            f"{PREFIX}ignored_fields",
            "Request fields that were accepted without effect, by kind; unknown fields are counted "
            "without their names.",
            (LABEL, "kind", "field"),
            registry=self._registry,
        )
        self._attainment = Counter(
            f"{PREFIX}slo_requests",
            "Finished requests with latency targets, by SLO class and whether the targets were met.",
            (LABEL, "slo_class", "met"),
            registry=self._registry,
        )
        self._goodput = Counter(
            f"{PREFIX}slo_goodput_tokens",
            "Generated tokens of requests that met their latency targets.",
            (LABEL, "slo_class"),
            registry=self._registry,
        )
        self._histograms = {name: self._histogram(name, *buckets) for name, buckets in _HISTOGRAMS.items()}
        self._registry.register(_Successes(self._finished))
        self.collector: Collector = _WithVllmNames(self._registry)

    def finished(self, reason: str) -> None:
        """Count a finished choice."""
        self._finished.labels(self._model_name, reason).inc()

    def ignored_fields(self, kind: str, field: str, count: int) -> None:
        """Count fields of requests that had no effect."""
        self._ignored_fields.labels(self._model_name, kind, field).inc(count)

    def count_slo(self, slo: Slo, met: bool, tokens: int) -> None:
        """Count a request with latency targets; if it met them, also count its `tokens` as goodput."""
        labels = (self._model_name, strictness(slo))
        self._attainment.labels(*labels, str(met).lower()).inc()
        self._goodput.labels(*labels).inc(tokens if met else 0)

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram of this name."""
        self._histograms[name].observe(value)

    @contextmanager
    def request(
        self, prompt_tokens: int, choices: int, max_tokens: int, created: float | None = None
    ) -> Iterator["RequestRecorder"]:
        """Record the metrics of one request. `created` is the creation time of its prompt stream, if it has
        one.

        Choices that are still open when the request ends count as aborted, or as failed if an error ended it.
        A refused request is not counted.
        """
        recorder = RequestRecorder(self, prompt_tokens, choices, max_tokens, created)
        try:
            yield recorder
        except RequestError as error:
            if recorder.begun or error.status >= 500:
                recorder.close("error")
            raise
        except asyncio.CancelledError:
            recorder.close("abort")
            raise
        except PromptChanged:
            recorder.close("abort")
            raise
        except Exception:
            recorder.close("error")
            raise
        recorder.close("abort")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{PREFIX}{name}", text, (LABEL,), registry=self._registry).labels(self._model_name)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{PREFIX}{name}", text, (LABEL,), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"{PREFIX}{name}", text, (LABEL,), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model_name)


class RequestRecorder:
    """Records the metrics of one request."""

    def __init__(
        self,
        metrics: Metrics,
        prompt_tokens: int,
        choices: int,
        max_tokens: int,
        created: float | None = None,
    ) -> None:
        self.begun = False
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._created = created
        self._choices = choices
        self._max_tokens = max_tokens
        self._open = set(range(choices))
        self._start = time.perf_counter()
        self._stream_seconds = 0.0 if created is None else self._start - created
        self._first_token = 0.0
        self._last_token: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def delta(self, delta: ChoiceDelta) -> None:
        now = time.perf_counter()
        if not self.begun:
            self.begun = True
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
        if delta.tokens:
            self._count_tokens(delta.choice, len(delta.tokens), now)
        if delta.finish is not None:
            self._open.discard(delta.choice)
            self._metrics.finished(delta.finish)

    def usage(self, usage: Usage, slo: Slo = NO_SLO) -> None:
        """Record the latencies and token counts of a completed request."""
        observe = self._metrics.observe
        if usage.slo is not None:
            self._metrics.count_slo(slo, usage.slo.met, usage.completion_tokens)
        queued = max(0.0, usage.queued_seconds - self._stream_seconds)
        observe("request_queue_time_seconds", queued)
        observe("request_prompt_tokens", usage.prompt_tokens)
        observe("request_generation_tokens", usage.completion_tokens)
        observe("request_params_n", self._choices)
        observe("request_params_max_tokens", self._max_tokens)
        if not self._last_token:
            return
        last, tokens = max(self._last_token.values()), max(self._tokens.values())
        inference_start = self._start + queued
        observe("request_prefill_time_seconds", max(0.0, self._first_token - inference_start))
        observe("request_decode_time_seconds", last - self._first_token)
        observe("request_inference_time_seconds", max(0.0, last - inference_start))
        if tokens > 1:
            observe("request_time_per_output_token_seconds", (last - self._first_token) / (tokens - 1))

    def close(self, reason: str) -> None:
        """End the request. Choices that are still open are counted under `reason`."""
        for _ in self._open:
            self._metrics.finished(reason)
        self._metrics.observe("e2e_request_latency_seconds", time.perf_counter() - self._start)

    def _count_tokens(self, choice: int, count: int, now: float) -> None:
        self._metrics.generation_tokens.inc(count)
        if not self._last_token:
            self._first_token = now
            self._metrics.observe("time_to_first_token_seconds", now - self._start)
            if self._created is not None:
                self._metrics.observe("stream_time_to_first_token_seconds", now - self._created)
        if choice in self._last_token:
            gap = (now - self._last_token[choice]) / count
            for _ in range(count):
                self._metrics.observe("inter_token_latency_seconds", gap)
        self._last_token[choice] = now
        self._tokens[choice] = self._tokens.get(choice, 0) + count


class _Successes(Collector):
    """The successful choices, as vLLM counts and labels them."""

    def __init__(self, finished: Counter) -> None:
        self._finished = finished

    def collect(self) -> Iterable[Metric]:
        counts = {}
        for sample in next(iter(self._finished.collect())).samples:
            reason = sample.labels["finish_reason"]
            if sample.name.endswith("_total") and reason in SUCCESSES:
                counts[sample.labels[LABEL], reason] = sample.value
        text = "Choices that finished successfully."
        yield family(CounterMetricFamily, "request_success", text, counts, "finished_reason")


class _WithVllmNames(Collector):
    """All families of a registry. Families that also exist in vLLM are copied under its names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            yield metric
            if metric.name.removeprefix(PREFIX) in VLLM_NAMES:
                yield _renamed(metric)


def _renamed(metric: Metric) -> Metric:
    copy = Metric(metric.name.replace(PREFIX, VLLM_PREFIX, 1), metric.documentation, metric.type, metric.unit)
    copy.samples = [
        Sample(sample.name.replace(PREFIX, VLLM_PREFIX, 1), *sample[1:]) for sample in metric.samples
    ]
    return copy
