"""Prometheus metrics of one server: what requests saw, and what the worker reports of itself."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Report
from streamserve.text.output import Delta

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_LABEL = "model_name"


class Metrics:
    """The metrics of one server, in a registry of their own, labelled with the model's name."""

    def __init__(self, model_name: str, report: Callable[[], Report | None]) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._registry.register(_WorkerReport(model_name, report))
        self._finished = Counter(
            "streamserve:requests",
            "Choices that ended, by why.",
            (_LABEL, "finish_reason"),
            registry=self._registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests served.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.first_token = self._histogram("time_to_first_token_seconds", _SECONDS)
        self.inter_token = self._histogram("inter_token_latency_seconds", _TOKEN_SECONDS)
        self.whole_request = self._histogram("e2e_request_latency_seconds", _SECONDS)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def finished(self, reason: str) -> None:
        """Count a choice that ended."""
        self._finished.labels(self._model_name, reason).inc()

    @contextmanager
    def request(self, prompt_tokens: int, choices: int) -> Iterator["RequestWatch"]:
        """Watch one request. Choices that are open when it ends count as aborted, or failed if an error
        ended it; a request that was refused isn't counted at all."""
        watch = RequestWatch(self, prompt_tokens, choices)
        try:
            yield watch
        except RequestError as error:
            if watch.begun or error.status >= 500:
                watch.close("error")
            raise
        except asyncio.CancelledError:
            watch.close("abort")
            raise
        except Exception:
            watch.close("error")
            raise
        watch.close("abort")

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"streamserve:{name}", text, (_LABEL,), registry=self._registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        histogram = Histogram(
            f"streamserve:{name}", text, (_LABEL,), registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model_name)


class RequestWatch:
    """What one request brings to the metrics."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, choices: int) -> None:
        self.begun = False
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._open = set(range(choices))
        self._start = time.perf_counter()
        self._latest: dict[int, float] = {}

    def delta(self, delta: Delta) -> None:
        """Take note of what a choice brought."""
        now = time.perf_counter()
        if not self.begun:
            self.begun = True
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
        if delta.tokens:
            self._tokens(delta, now)
        if delta.finish is not None:
            self._open.discard(delta.choice)
            self._metrics.finished(delta.finish)

    def _tokens(self, delta: Delta, now: float) -> None:
        self._metrics.generation_tokens.inc(len(delta.tokens))
        if not self._latest:
            self._metrics.first_token.observe(now - self._start)
        if delta.choice in self._latest:
            gap = now - self._latest[delta.choice]
            self._metrics.inter_token.observe(gap / len(delta.tokens))
        self._latest[delta.choice] = now

    def close(self, reason: str) -> None:
        """The request is over, and with it, for `reason`, the choices that are still open."""
        for _ in self._open:
            self._metrics.finished(reason)
        self._metrics.whole_request.observe(time.perf_counter() - self._start)


class _WorkerReport(Collector):
    """The worker's own numbers, read from its latest report whenever they are asked for."""

    def __init__(self, model_name: str, report: Callable[[], Report | None]) -> None:
        self._model_name = model_name
        self._report = report

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        if report is None:
            return
        usage = report.blocks_live / report.blocks_total if report.blocks_total else 0.0
        yield self._gauge("num_requests_running", "Sequences in the running batch.", report.running)
        yield self._gauge("num_requests_waiting", "Sequences waiting for room.", report.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the cache.", report.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the cache.", report.prefix_hits)
        yield self._counter("num_preemptions", "Sequences that lost their place.", report.preemptions)
        yield self._counter("steps", "Steps of the engine.", report.steps)
        yield self._counter("step_seconds", "Time spent in steps.", report.step_seconds)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"streamserve:{name}", text, labels=(_LABEL,))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"streamserve:{name}", text, labels=(_LABEL,))
        family.add_metric((self._model_name,), value)
        return family
