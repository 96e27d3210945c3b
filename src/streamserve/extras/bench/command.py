"""Runs a benchmark of a server, from the options to the report."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from streamserve.extras.bench import report, workloads
from streamserve.extras.bench.arrivals import gamma_arrivals, trace_arrivals
from streamserve.extras.bench.client import Target, first_model, open_session
from streamserve.extras.bench.errors import BenchError
from streamserve.extras.bench.load import Run, run_load
from streamserve.extras.bench.options import (
    BenchOptions,
    Endpoint,
    LoadOptions,
    ServerOptions,
    WorkloadOptions,
)
from streamserve.extras.bench.statistics import Outcome, parse_metrics, parse_targets, summarize
from streamserve.extras.bench.workloads import WorkloadPrompt


def run(options: BenchOptions) -> None:
    """Send the requests, print the statistics, and write the results if requested.

    Raises BenchError for invalid options, SystemExit (1) if no request succeeded.
    """
    server, workload, load = options.server, options.workload, options.load
    targets, metrics = parse_targets(options.report.goodput), parse_metrics(options.report.percentile_metrics)
    rng = np.random.default_rng(workload.seed)
    prompts = _prompts(workload, server.endpoint, rng)
    arrivals = _arrivals(load, workload.num_prompts, rng)
    target = Target(
        base_url=server.base_url,
        model=server.model or uvloop.run(_first_model(server)),
        endpoint=server.endpoint,
        temperature=workload.temperature,
        ignore_eos=workload.ignore_eos,
        extra_body=_object(workload.extra_body),
    )
    result = uvloop.run(_with_progress(target, prompts, arrivals, server.api_key, load.max_concurrency))
    summary = summarize(result.outcomes, result.duration, targets, result.interrupted)
    rate = None if math.isinf(load.request_rate) or load.trace else load.request_rate
    typer.echo(report.as_text(summary, metrics, load.max_concurrency, rate))
    for remark in report.remarks(summary, result.outcomes):
        typer.echo(remark)
    if options.report.save_result:
        settings = saved_settings(options, target.model)
        for path in report.save(Path(options.report.save_result), settings, summary, result):
            typer.echo(f"wrote {path}")
    if not summary.completed:
        raise SystemExit(1)


def saved_settings(options: BenchOptions, model: str) -> dict[str, Any]:
    """Return the options as JSON values by their flat names: with the model's name, and without the API
    key."""
    values: dict[str, Any] = {}
    for part in msgspec.structs.astuple(options):
        values |= msgspec.structs.asdict(part)
    del values["api_key"]
    values["model"] = model
    return {name: str(value) if value == math.inf else value for name, value in values.items()}


def _prompts(options: WorkloadOptions, endpoint: Endpoint, rng: np.random.Generator) -> list[WorkloadPrompt]:
    count = options.num_prompts
    if options.dataset == "random":
        lengths = workloads.RandomLengths(
            options.random_input_len, options.random_output_len, options.random_range_ratio
        )
        if endpoint == "chat":
            return workloads.random_words(count, lengths, rng)
        return workloads.random_tokens(count, lengths, options.random_vocab_size, rng)
    if options.dataset_path is None:
        raise BenchError(f"--dataset {options.dataset} needs --dataset-path")
    path = Path(options.dataset_path)
    if options.dataset == "sharegpt":
        return workloads.sharegpt(path, count, options.output_len, rng)
    return workloads.jsonl(path, count, options.output_len or 128, rng)


def _arrivals(options: LoadOptions, count: int, rng: np.random.Generator) -> list[float]:
    if options.trace is None:
        return gamma_arrivals(count, options.request_rate, options.burstiness, rng)
    if not math.isinf(options.request_rate):
        raise BenchError("--trace sets the arrival times: omit --request-rate")
    return trace_arrivals(Path(options.trace), count)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BenchError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BenchError("--extra-body must be a JSON object")
    return value


async def _first_model(server: ServerOptions) -> str:
    async with open_session(server.api_key) as session:
        return await first_model(session, server.base_url)


async def _with_progress(
    target: Target,
    prompts: Sequence[WorkloadPrompt],
    arrivals: Sequence[float],
    api_key: str | None,
    max_concurrency: int | None,
) -> Run:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        bar = progress.add_task("requests", total=len(prompts))
        failed = 0

        def on_outcome(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            progress.update(
                bar, advance=1, description=f"requests ({failed} failed)" if failed else "requests"
            )

        return await run_load(
            target,
            prompts,
            arrivals,
            api_key=api_key,
            max_concurrency=max_concurrency,
            on_outcome=on_outcome,
        )
