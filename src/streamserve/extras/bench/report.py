"""Reports a run's statistics: as text in the layout of `vllm bench serve`, as JSON, and as plots."""

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamserve.extras.bench.load import Run
from streamserve.extras.bench.statistics import (
    METRICS,
    PERCENTILE,
    Outcome,
    Summary,
    running_over_time,
    tokens_by_second,
    values,
)

_WIDTH = 50


def as_text(
    summary: Summary, metrics: Sequence[str], max_concurrency: int | None = None, rate: float | None = None
) -> str:
    """Return the text to print at the end."""
    lines = [_heading(" Serving Benchmark Result ", "=")]
    lines += [
        _line(label, value)
        for label, value in _summary_lines(summary, max_concurrency, rate)
        if value is not None
    ]
    for metric in metrics:
        stats, name = summary.latency_stats[metric], metric.upper()
        lines.append(_heading(METRICS[metric], "-"))
        lines.append(_line(f"Mean {name} (ms):", stats.mean))
        lines.append(_line(f"Median {name} (ms):", stats.median))
        lines.append(_line(f"P{PERCENTILE} {name} (ms):", stats.p99))
    return "\n".join([*lines, "=" * _WIDTH])


def _summary_lines(
    summary: Summary, max_concurrency: int | None, rate: float | None
) -> Iterable[tuple[str, int | float | None]]:
    return (
        ("Successful requests:", summary.completed),
        ("Failed requests:", summary.failed),
        ("Interrupted requests:", summary.interrupted or None),
        ("Maximum request concurrency:", max_concurrency),
        ("Request rate configured (RPS):", rate),
        ("Benchmark duration (s):", summary.duration),
        ("Total input tokens:", summary.input_tokens),
        ("Total generated tokens:", summary.output_tokens),
        ("Request throughput (req/s):", summary.request_throughput),
        ("Request goodput (req/s):", summary.goodput),
        ("Output token throughput (tok/s):", summary.output_throughput),
        ("Peak output token throughput (tok/s):", summary.peak_output_throughput),
        ("Peak concurrent requests:", float(summary.peak_concurrency)),
        ("Total token throughput (tok/s):", summary.total_throughput),
    )


def _heading(text: str, fill: str) -> str:
    return f"{text:{fill}^{_WIDTH}}"


def _line(label: str, value: int | float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def remarks(summary: Summary, outcomes: Sequence[Outcome]) -> list[str]:
    """Return remarks needed to interpret the statistics."""
    remark_lines = []
    if summary.counted:
        remark_lines.append(
            f"The server reported no usage for {summary.counted} requests: their output tokens were "
            "counted as events with text, and may be more."
        )
    if summary.input_tokens is None:
        remark_lines.append(
            "Input tokens are not known for all requests, so their number and the total are omitted."
        )
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    for error, count in sorted(errors.items(), key=lambda item: -item[1])[:3]:
        remark_lines.append(f"{count} failed with: {error}")
    return remark_lines


def save(path: Path, settings: Mapping[str, Any], summary: Summary, run: Run) -> list[Path]:
    """Write settings, statistics and all requests to `path` as JSON. If matplotlib is installed, write plots
    to a PNG file next to it. Return the paths of the written files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "settings": dict(settings),
        "summary": asdict(summary),
        "requests": [asdict(outcome) for outcome in run.outcomes],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        return [path]
    plot_path = path.with_suffix(".png")
    plot(plot_path, run)
    return [path, plot_path]


def plot(path: Path, run: Run) -> None:
    """Plot the distribution of each latency, and the tokens and open requests over time."""
    from matplotlib.figure import Figure

    done = [outcome for outcome in run.outcomes if outcome.error is None]
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    for axis, (metric, name) in zip(axes, METRICS.items(), strict=False):
        samples = sorted(values(done, metric))
        shares = [100 * (rank + 1) / len(samples) for rank in range(len(samples))]
        axis.step(samples, shares, where="post")
        axis.set(title=name, xlabel=f"{metric.upper()} (ms)", ylabel="share below (%)", ylim=(0, 101))
    tokens = tokens_by_second(done)
    axes[4].stairs(tokens)
    axes[4].set(title="Output tokens", xlabel="time (s)", ylabel="tokens per second")
    steps = running_over_time(done)
    axes[5].step([time for time, _ in steps], [running for _, running in steps], where="post")
    axes[5].set(title="Open requests", xlabel="time (s)", ylabel="requests")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
