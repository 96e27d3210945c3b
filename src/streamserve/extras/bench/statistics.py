"""Computes a report's statistics from the outcomes of requests. Pure functions; times are in seconds."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from streamserve.extras.bench.errors import BenchError

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
PERCENTILE = 99


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request.

    - `sent`: seconds since the benchmark's start; `token_times`: seconds from `sent` to each event with text.
    - `counted`: whether the server sent no usage. Then `output_tokens` is the number of events with text, and
      `prompt_tokens` is None.
    - `error`: None for a complete reply.
    """

    sent: float
    latency: float
    token_times: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None if there was none."""
        return self.token_times[0] if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds from the first text to the end, per token after the first; None if there are no such
        tokens."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between consecutive events with text."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


@dataclass(frozen=True)
class LatencyStats:
    """Mean, median and 99th percentile in milliseconds; 0 if there is no value."""

    mean: float = 0.0
    median: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True)
class Summary:
    """Statistics of a run.

    Rates are per second. `latency_stats` are in milliseconds, with one entry for each of METRICS. `goodput`
    is None if no target was set, `input_tokens` is None if the server did not report them.
    """

    completed: int
    failed: int
    interrupted: int
    duration: float
    input_tokens: int | None
    output_tokens: int
    counted: int
    request_throughput: float
    goodput: float | None
    output_throughput: float
    peak_output_throughput: float
    peak_concurrency: int
    total_throughput: float | None
    latency_stats: Mapping[str, LatencyStats] = field(default_factory=dict)


def summarize(
    outcomes: Sequence[Outcome], duration: float, targets: Mapping[str, float], interrupted: int = 0
) -> Summary:
    """Compute the statistics of `outcomes` over `duration` seconds. Failed requests are only counted as
    failed.

    `targets` maps metrics to milliseconds: goodput counts the requests that meet all of them.
    """
    done = [outcome for outcome in outcomes if outcome.error is None]
    prompts = [outcome.prompt_tokens for outcome in done]
    inputs = None if None in prompts else sum(tokens or 0 for tokens in prompts)
    outputs = sum(outcome.output_tokens for outcome in done)
    met = sum(meets(outcome, targets) for outcome in done)
    return Summary(
        completed=len(done),
        failed=len(outcomes) - len(done),
        interrupted=interrupted,
        duration=duration,
        input_tokens=inputs,
        output_tokens=outputs,
        counted=sum(outcome.counted for outcome in done),
        request_throughput=_rate(len(done), duration),
        goodput=_rate(met, duration) if targets else None,
        output_throughput=_rate(outputs, duration),
        peak_output_throughput=max(tokens_by_second(done), default=0.0),
        peak_concurrency=peak_concurrency(done),
        total_throughput=None if inputs is None else _rate(inputs + outputs, duration),
        latency_stats={name: latency_stats(values(done, name)) for name in METRICS},
    )


def values(outcomes: Iterable[Outcome], metric: str) -> list[float]:
    """Return all values of one of METRICS, in milliseconds."""
    samples: list[float] = []
    for outcome in outcomes:
        if metric == "itl":
            samples += outcome.itl
        else:
            value = outcome.latency if metric == "e2el" else getattr(outcome, metric)
            samples += [] if value is None else [value]
    return [value * 1000 for value in samples]


def latency_stats(samples: Sequence[float]) -> LatencyStats:
    """Return mean, median and 99th percentile (linear interpolation)."""
    if not samples:
        return LatencyStats()
    return LatencyStats(
        float(np.mean(samples)), float(np.median(samples)), float(np.percentile(samples, PERCENTILE))
    )


def meets(outcome: Outcome, targets: Mapping[str, float]) -> bool:
    """Return whether a request met every target. A request without a value for a metric meets its target."""
    return all(value <= limit for metric, limit in targets.items() for value in values([outcome], metric))


def tokens_by_second(outcomes: Iterable[Outcome]) -> list[float]:
    """Return the number of output tokens in each second since the start.

    A request's tokens are divided evenly among its events, since one event may contain several.
    """
    events = [
        (outcome.sent + time, outcome.output_tokens / len(outcome.token_times))
        for outcome in outcomes
        for time in outcome.token_times
    ]
    if not events:
        return []
    times, tokens = zip(*events, strict=True)
    return [float(count) for count in np.bincount(np.floor(times).astype(int), weights=tokens)]


def running_over_time(outcomes: Iterable[Outcome]) -> list[tuple[float, int]]:
    """Return (time, number of requests open from then on) for each change."""
    changes = sorted(
        change for outcome in outcomes for change in ((outcome.sent, 1), (outcome.sent + outcome.latency, -1))
    )
    steps: list[tuple[float, int]] = []
    running = 0
    for time, change in changes:
        running += change
        steps.append((time, running))
    return steps


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    """Return the maximum number of requests that were open at once."""
    return max((running for _, running in running_over_time(outcomes)), default=0)


def parse_targets(given: Iterable[str]) -> dict[str, float]:
    """Parse `ttft:500 tpot:50` to a mapping. Raises BenchError for anything else."""
    targets: dict[str, float] = {}
    for item in given:
        match = re.fullmatch(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)", item)
        if match is None:
            raise BenchError(f"goodput target {item!r}: write ttft, tpot or e2el, a colon and milliseconds")
        targets[match[1]] = float(match[2])
    return targets


def parse_metrics(given: str) -> list[str]:
    """Parse `ttft,tpot` to a list. Raises BenchError for unknown metrics."""
    metrics = [name.strip() for name in given.split(",") if name.strip()]
    for name in metrics:
        if name not in METRICS:
            raise BenchError(f"there is no metric {name!r}; there are: {', '.join(METRICS)}")
    return metrics


def _rate(count: float, duration: float) -> float:
    return count / duration if duration > 0 else 0.0
