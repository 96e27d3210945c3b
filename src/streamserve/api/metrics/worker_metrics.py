"""The workers' reports as Prometheus metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from streamserve.protocol.reports import (
    STEP_TOKENS,
    EvictionReport,
    RemoteReport,
    Report,
    SpeculationReport,
    StepParts,
    StepTokens,
    StreamReport,
    TransferReport,
)

PREFIX, LABEL = "streamserve:", "model_name"
MetricFamily = CounterMetricFamily | GaugeMetricFamily
LabelValues = TypeVar("LabelValues", bound=tuple[str, ...])
_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
_EVICTION = {
    "swaps": "Evicted sequences whose KV was swapped to the host pool.",
    "recomputes": "Evicted sequences whose KV was dropped, to be recomputed.",
    "blocks_out": "KV blocks copied to the host pool.",
    "blocks_back": "KV blocks copied back from the host pool.",
    "swap_predicted": "Seconds that the chosen swaps were predicted to take.",
    "swap_seconds": "Seconds spent on copies to and from the host pool.",
    "recompute_predicted": "Seconds that the chosen recomputations were predicted to take.",
    "recompute_seconds": "Seconds spent on recomputing dropped KV.",
}
"""The help of each metric of evictions, by the field of EvictionReport."""
_TRANSFER = {
    "handed_over": ("kv_transfers", "Requests whose KV was sent to the worker that decodes them."),
    "failed": ("kv_transfer_failures", "KV transfers and cache copies that failed."),
    "sent_bytes": ("kv_transfer_bytes", "Bytes of KV sent to other workers, including cache copies."),
    "writeback_bytes": (
        "kv_transfer_writeback_bytes",
        "Bytes of KV sent to other workers as write-backs of finished requests.",
    ),
    "arriving_bytes": (
        "kv_transfer_arriving_bytes",
        "Bytes of KV sent to other workers while the prompt was still arriving.",
    ),
    "deferred": (
        "kv_transfer_deferred",
        "Requests whose KV transfer was deferred so that latency targets could be met.",
    ),
    "exposed_seconds": ("kv_transfer_exposed_seconds", "KV transfer time that decoding waited for."),
    "hidden_seconds": ("kv_transfer_hidden_seconds", "KV transfer time overlapped with prefill."),
    "received_tokens": ("kv_transfer_tokens", "Prompt tokens of requests received from other workers."),
    "hit_tokens": (
        "kv_transfer_hit_tokens",
        "Prompt tokens of received requests that were found in the receiver's prefix cache and not sent.",
    ),
    "refused_writes": (
        "kv_transfer_refused_writes",
        "Writes of a lost worker that were refused because their reservation was closed.",
    ),
}
"""The counters of KV transfers: name and help of each metric, by the field of TransferReport."""


class WorkerMetrics(Collector):
    """The workers' statistics, read from the latest report at each scrape."""

    def __init__(self, model_name: str, report: Callable[[], Report | None]) -> None:
        self._model_name = model_name
        self._report = report

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the latest report, if there has been one."""
        report = self._report()
        if report is None:
            return
        usage = report.blocks_live / report.blocks_total if report.blocks_total else 0.0
        yield self._gauge("num_requests_running", "Sequences in the running batch.", report.running)
        yield self._gauge("num_requests_waiting", "Sequences waiting to be admitted.", report.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        yield self._counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache when a request was first scheduled.",
            report.prefix_queries,
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.", report.prefix_hits
        )
        yield self._counter("num_preemptions", "Preempted sequences.", report.preemptions)
        yield self._counter(
            "corrupted_requests",
            "Requests aborted because the model's outputs were not finite.",
            report.corrupted_requests,
        )
        yield self._counter("steps", "Engine steps.", report.steps)
        yield self._counter("step_seconds", "Time spent in steps.", report.step_seconds)
        if report.step_tokens is not None:
            yield self._step_tokens(report.step_tokens)
        if report.step_floor_seconds is not None:
            floor, spent = report.step_floor_seconds, report.step_seconds
            yield self._counter(
                "step_floor_seconds", "Lower bound (floor) of the time spent in steps.", floor
            )
            share = floor / spent if spent else 0.0
            yield self._gauge("step_floor_share", "Lower bound / measured time of all steps so far.", share)
        if report.step_parts is not None:
            yield from self._parts(report.step_parts, report.step_seconds)
        if report.speculation is not None:
            yield from self._speculation(report.speculation)
        if report.streams is not None:
            yield from self._streams(report.streams)
        if report.evictions is not None:
            yield from self._evictions(report.evictions)
        if report.remote is not None:
            yield from self._remote(report.remote)
        if report.transfer is not None:
            yield from self._transfer(report.transfer)

    def _step_tokens(self, steps: StepTokens) -> Metric:
        histogram = HistogramMetricFamily(
            f"{PREFIX}iteration_tokens_total",
            "Tokens per engine step: prompt tokens computed and tokens generated.",
            labels=(LABEL,),
        )
        bounds = [*map(str, map(float, STEP_TOKENS)), "+Inf"]
        up_to = list(zip(bounds, map(float, accumulate(steps.counts)), strict=True))
        histogram.add_metric((self._model_name,), up_to, steps.total)
        return histogram

    def _parts(self, parts: StepParts, spent: float) -> Iterable[Metric]:
        seconds = msgspec.structs.asdict(parts)
        shares = {part: value / spent if spent else 0.0 for part, value in seconds.items()}
        text = "Time spent in the parts of steps."
        yield self._labelled(CounterMetricFamily, "step_part_seconds", text, "part", seconds)
        text = "Each part's share of the time of all steps so far."
        yield self._labelled(GaugeMetricFamily, "step_part_share", text, "part", shares)

    def _streams(self, report: StreamReport) -> Iterable[Metric]:
        yield self._counter(
            "stream_invalidated_tokens",
            "Prompt tokens that were computed and then invalidated by edits.",
            report.invalidated,
        )
        yield self._counter("stream_prompt_tokens", "Tokens of finished prompt streams.", report.tokens)
        yield self._counter(
            "stream_withdrawn_tokens",
            "Output tokens of early answers that were withdrawn because of edits.",
            report.withdrawn,
        )
        early = report.computed_before
        yield self._counter(
            "stream_early_tokens",
            "Prompt tokens of prompt streams that were computed before the client finished the prompt.",
            early,
        )
        share = early / report.tokens if report.tokens else 0.0
        yield self._gauge(
            "stream_early_share",
            "Share of prompt tokens of prompt streams that were computed before the client finished the "
            "prompt.",
            share,
        )

    def _speculation(self, report: SpeculationReport) -> Iterable[Metric]:
        yield self._counter("spec_decode_num_drafts", "Draft trees verified.", sum(report.trees_by_nodes))
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.", report.verified)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", report.accepted)
        yield self._labelled(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their depth in the tree.",
            "position",
            {str(position): count for position, count in enumerate(report.accepted_at)},
        )
        yield self._histogram(
            "spec_decode_tree_nodes", "Verified draft tokens per tree.", report.trees_by_nodes, _NODES
        )
        yield self._histogram(
            "spec_decode_tree_depth", "Depth of each verified draft tree.", report.trees_by_depth, _DEPTHS
        )
        yield self._counter(
            "spec_decode_drafted_tokens", "Draft tokens proposed, verified or not.", report.drafted
        )
        yield self._counter(
            "spec_decode_expected_tokens", "Predicted number of accepted draft tokens.", report.expected
        )
        yield self._counter("spec_decode_draft_seconds", "Time spent drafting.", report.draft_seconds)
        yield self._counter(
            "spec_decode_select_seconds",
            "Time spent selecting the draft tokens to verify.",
            report.select_seconds,
        )

    def _evictions(self, report: EvictionReport) -> Iterable[Metric]:
        for field in EvictionReport.__struct_fields__:
            yield self._counter(f"eviction_{field}", _EVICTION[field], getattr(report, field))

    def _remote(self, report: RemoteReport) -> Iterable[Metric]:
        yield self._gauge("draft_services", "Open sessions with draft services.", report.services)
        yield self._counter(
            "draft_service_late_trees",
            "Draft trees that arrived after their step and were used in a later step.",
            report.late,
        )
        yield self._counter(
            "draft_service_moves", "Sequences moved from one draft service to another.", report.moves
        )
        for name, text, from_services, fallback in (
            ("trees", "Draft trees used", report.trees, report.fallback_trees),
            ("accepted", "Draft tokens accepted", report.accepted, report.fallback_accepted),
        ):
            yield self._labelled(
                CounterMetricFamily,
                f"draft_service_{name}",
                f"{text}, by source: draft services, or the n-gram fallback.",
                "source",
                {"service": from_services, "ngram": fallback},
            )
        text = "Replies of draft services that were rejected, by fault."
        yield self._labelled(
            CounterMetricFamily, "draft_service_rejected_replies", text, "fault", report.rejected
        )
        yield self._counter(
            "draft_service_probations",
            "Number of times that a draft service was suspended because of invalid replies.",
            report.probations,
        )

    def _transfer(self, report: TransferReport) -> Iterable[Metric]:
        for field, (name, text) in _TRANSFER.items():
            yield self._counter(name, text, getattr(report, field))
        yield self._labelled(
            CounterMetricFamily,
            "kv_cache_copies",
            "KV copied to other workers' caches while no client waits for it, by kind: of prompts that are "
            "still arriving, or write-backs of finished requests.",
            "kind",
            {"arriving": report.arriving_copies, "writeback": report.writebacks},
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return family(GaugeMetricFamily, name, text, {(self._model_name,): value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return family(CounterMetricFamily, name, text, {(self._model_name,): value})

    def _labelled(
        self, kind: type[MetricFamily], name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        """Return a family with a further label. `values` are the values by this label."""
        samples = {(self._model_name, by): value for by, value in values.items()}
        return family(kind, name, text, samples, label)

    def _histogram(self, name: str, text: str, counts: Sequence[int], buckets: Sequence[int]) -> Metric:
        """Return a histogram of integers: `counts[i]` is the number of values equal to i + 1."""
        histogram = HistogramMetricFamily(f"{PREFIX}{name}", text, labels=(LABEL,))
        up_to = [(str(float(bucket)), float(sum(counts[:bucket]))) for bucket in buckets]
        total = sum(number * count for number, count in enumerate(counts, start=1))
        histogram.add_metric((self._model_name,), [*up_to, ("+Inf", float(sum(counts)))], total)
        return histogram


def family(
    kind: type[MetricFamily], name: str, text: str, samples: Mapping[LabelValues, float], *labels: str
) -> Metric:
    """Return a family of gauges or counters. `samples` are the values by the model's name and the further
    `labels`."""
    made = kind(f"{PREFIX}{name}", text, labels=(LABEL, *labels))
    for values, amount in samples.items():
        made.add_metric(values, amount)
    return made
