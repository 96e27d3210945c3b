"""`streamserve bench`: the options of the load client, and a run from the options to the report."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamserve.bench.errors import BenchError

if TYPE_CHECKING:
    import numpy as np

    from streamserve.bench.client import Target
    from streamserve.bench.load import Run
    from streamserve.bench.workloads import Prompt

bench = typer.Typer(help="Benchmark servers over HTTP.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Benchmark servers over HTTP."""


class Dataset(StrEnum):
    """The source of the prompts."""

    random = "random"
    sharegpt = "sharegpt"
    jsonl = "jsonl"


class EndpointName(StrEnum):
    """The route that requests are sent to."""

    completions = "completions"
    chat = "chat"


def _option(panel: str, *names: str, about: str, **keywords: Any) -> Any:
    return typer.Option(*names, help=about, rich_help_panel=panel, **keywords)


@bench.command()
def serve(
    base_url: Annotated[
        str, _option("Server", about="URL of the server; any server with OpenAI's API")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, _option("Server", about="name of the model; by default the first that the server lists")
    ] = None,
    endpoint: Annotated[
        EndpointName, _option("Server", about="route that requests are sent to")
    ] = EndpointName.completions,
    api_key: Annotated[
        str | None,
        _option(
            "Server",
            about="API key; prefer the environment variable, as command lines are visible to others",
            envvar="OPENAI_API_KEY",
        ),
    ] = None,
    dataset: Annotated[
        Dataset, _option("Workload", about="source of the prompts: random ones, or a file")
    ] = Dataset.random,
    dataset_path: Annotated[
        Path | None, _option("Workload", about="file with the prompts, for sharegpt and jsonl")
    ] = None,
    num_prompts: Annotated[int, _option("Workload", about="number of requests", min=1)] = 100,
    random_input_len: Annotated[
        int, _option("Workload", about="length of random prompts in tokens", min=1)
    ] = 256,
    random_output_len: Annotated[
        int, _option("Workload", about="output length in tokens for random prompts", min=1)
    ] = 64,
    random_range_ratio: Annotated[
        float,
        _option(
            "Workload", about="random lengths are drawn uniformly from length × (1 ± this)", min=0, max=0.99
        ),
    ] = 0.0,
    random_vocab_size: Annotated[
        int, _option("Workload", about="random token ids are below this (only --endpoint completions)", min=1)
    ] = 1000,
    output_len: Annotated[
        int | None,
        _option(
            "Workload",
            about="output length in tokens for prompts of a file that do not set one (jsonl: 128)",
            min=1,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        _option(
            "Workload",
            "--ignore-eos",
            about="request outputs of exactly the given length, if the server supports it",
        ),
    ] = False,
    temperature: Annotated[
        float, _option("Workload", about="sampling temperature; 0: always the likeliest token")
    ] = 0.0,
    extra_body: Annotated[
        str, _option("Workload", about="additional fields of every request body", metavar="JSON")
    ] = "{}",
    seed: Annotated[int, _option("Workload", about="seed of prompts, lengths and arrival times", min=0)] = 0,
    request_rate: Annotated[float, _option("Load", about="requests per second; inf: all at once")] = math.inf,
    burstiness: Annotated[
        float,
        _option(
            "Load",
            about="1: Poisson arrivals; less: burstier; more: more regular (shape of gamma gaps)",
        ),
    ] = 1.0,
    trace: Annotated[
        Path | None, _option("Load", about="file with arrival times to use instead, in seconds, one per line")
    ] = None,
    max_concurrency: Annotated[
        int | None,
        _option("Load", about="maximum number of open requests; further ones wait in the client", min=1),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        _option("Report", about="latency targets for goodput: ttft:MS tpot:MS e2el:MS", metavar="TARGET"),
    ] = None,
    percentile_metrics: Annotated[
        str, _option("Report", about="latency metrics to print")
    ] = "ttft,tpot,itl,e2el",
    save_result: Annotated[
        Path | None,
        _option("Report", about="write the results to this JSON file, and plots to a PNG file next to it"),
    ] = None,
    more_targets: Annotated[
        list[str] | None, typer.Argument(help="more targets for --goodput", metavar="[TARGET]...")
    ] = None,
) -> None:
    """Send requests to a server and print its latency and throughput, as `vllm bench serve` does.

    Ctrl-C stops sending and prints the results so far.
    """
    options = {name: value for name, value in locals().items() if name not in ("api_key", "more_targets")}
    options["goodput"] = [*(goodput or []), *(more_targets or [])]
    with _exit_on_error():
        _run(options, api_key)


@contextmanager
def _exit_on_error() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        hint = "the load client needs aiohttp: pip install 'streamserve[bench]'"
        raise SystemExit(_print_error(hint)) from error
    except BenchError as error:
        raise SystemExit(_print_error(str(error))) from error


def _print_error(message: str) -> int:
    typer.secho(f"streamserve bench: {message}", fg="red", err=True)
    return 2


def _run(options: dict[str, Any], api_key: str | None) -> None:
    import numpy as np
    import uvloop

    from streamserve.bench import report
    from streamserve.bench.client import Target
    from streamserve.bench.statistics import parse_metrics, parse_targets, summarize

    targets, metrics = parse_targets(options["goodput"]), parse_metrics(options["percentile_metrics"])
    rng = np.random.default_rng(options["seed"])
    prompts = _prompts(options, rng)
    arrivals = _arrivals(options, rng)
    model = options["model"] or uvloop.run(_first_model(options["base_url"], api_key))
    target = Target(
        base_url=options["base_url"],
        model=model,
        endpoint=options["endpoint"].value,
        temperature=options["temperature"],
        ignore_eos=options["ignore_eos"],
        extra_body=_object(options["extra_body"]),
    )
    run = uvloop.run(_with_progress(target, prompts, arrivals, api_key, options["max_concurrency"]))
    summary = summarize(run.outcomes, run.duration, targets, run.interrupted)
    rate = None if math.isinf(options["request_rate"]) or options["trace"] else options["request_rate"]
    typer.echo(report.as_text(summary, metrics, options["max_concurrency"], rate))
    for remark in report.remarks(summary, run.outcomes):
        typer.echo(remark)
    if options["save_result"]:
        settings = {name: _plain(value) for name, value in (options | {"model": model}).items()}
        for path in report.save(options["save_result"], settings, summary, run):
            typer.echo(f"wrote {path}")
    if not summary.completed:
        raise SystemExit(1)


def _prompts(options: dict[str, Any], rng: "np.random.Generator") -> "list[Prompt]":
    from streamserve.bench import workloads

    count, path = options["num_prompts"], options["dataset_path"]
    if options["dataset"] is Dataset.random:
        lengths = workloads.RandomLengths(
            options["random_input_len"], options["random_output_len"], options["random_range_ratio"]
        )
        if options["endpoint"] is EndpointName.chat:
            return workloads.random_words(count, lengths, rng)
        return workloads.random_tokens(count, lengths, options["random_vocab_size"], rng)
    if path is None:
        raise BenchError(f"--dataset {options['dataset']} needs --dataset-path")
    if options["dataset"] is Dataset.sharegpt:
        return workloads.sharegpt(path, count, options["output_len"], rng)
    return workloads.jsonl(path, count, options["output_len"] or 128, rng)


def _arrivals(options: dict[str, Any], rng: "np.random.Generator") -> list[float]:
    from streamserve.bench.arrivals import gamma_arrivals, trace_arrivals

    if options["trace"] is None:
        return gamma_arrivals(options["num_prompts"], options["request_rate"], options["burstiness"], rng)
    if not math.isinf(options["request_rate"]):
        raise BenchError("--trace sets the arrival times: omit --request-rate")
    return trace_arrivals(options["trace"], options["num_prompts"])


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BenchError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BenchError("--extra-body must be a JSON object")
    return value


def _plain(value: Any) -> Any:
    """Convert a setting to a JSON value."""
    return str(value) if isinstance(value, Path) or value == math.inf else value


async def _first_model(base_url: str, api_key: str | None) -> str:
    from streamserve.bench.client import first_model, open_session

    async with open_session(api_key) as session:
        return await first_model(session, base_url)


async def _with_progress(
    target: "Target",
    prompts: "Sequence[Prompt]",
    arrivals: Sequence[float],
    api_key: str | None,
    max_concurrency: int | None,
) -> "Run":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from streamserve.bench.load import run_load
    from streamserve.bench.statistics import Outcome

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
