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

bench = typer.Typer(help="Measure servers.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure servers."""


class Dataset(StrEnum):
    """The source of the prompts."""

    random = "random"
    sharegpt = "sharegpt"
    jsonl = "jsonl"


class EndpointName(StrEnum):
    """The route that requests are sent to."""

    completions = "completions"
    chat = "chat"


def _option(panel: str, *names: str, about: str, **more: Any) -> Any:
    return typer.Option(*names, help=about, rich_help_panel=panel, **more)


@bench.command()
def serve(
    base_url: Annotated[
        str, _option("Server", about="any server with OpenAI's API")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, _option("Server", about="its name; by default the first it lists")] = None,
    endpoint: Annotated[EndpointName, _option("Server", about="the route to ask")] = EndpointName.completions,
    api_key: Annotated[
        str | None, _option("Server", about="better in the environment than here", envvar="OPENAI_API_KEY")
    ] = None,
    dataset: Annotated[
        Dataset, _option("Workload", about="made-up prompts, or those of a file")
    ] = Dataset.random,
    dataset_path: Annotated[Path | None, _option("Workload", about="the file of sharegpt or jsonl")] = None,
    num_prompts: Annotated[int, _option("Workload", about="how many requests to send", min=1)] = 100,
    random_input_len: Annotated[int, _option("Workload", about="tokens of a random prompt", min=1)] = 256,
    random_output_len: Annotated[int, _option("Workload", about="tokens asked for with it", min=1)] = 64,
    random_range_ratio: Annotated[
        float, _option("Workload", about="lengths vary by this share, up and down", min=0, max=0.99)
    ] = 0.0,
    random_vocab_size: Annotated[
        int, _option("Workload", about="random token ids are below this (completions)", min=1)
    ] = 1000,
    output_len: Annotated[
        int | None,
        _option(
            "Workload", about="tokens to ask for with prompts of a file that do not say (jsonl: 128)", min=1
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, _option("Workload", "--ignore-eos", about="answers as long as asked for, where servers know it")
    ] = False,
    temperature: Annotated[float, _option("Workload", about="0 always takes the likeliest token")] = 0.0,
    extra_body: Annotated[
        str, _option("Workload", about="further fields of every request", metavar="JSON")
    ] = "{}",
    seed: Annotated[int, _option("Workload", about="of prompts, lengths and arrivals", min=0)] = 0,
    request_rate: Annotated[float, _option("Load", about="requests a second; inf: all at once")] = math.inf,
    burstiness: Annotated[
        float, _option("Load", about="1: Poisson arrivals; less: burstier; more: steadier")
    ] = 1.0,
    trace: Annotated[
        Path | None, _option("Load", about="send at these times instead: seconds, one a line")
    ] = None,
    max_concurrency: Annotated[
        int | None, _option("Load", about="most requests open at once; further ones wait here", min=1)
    ] = None,
    goodput: Annotated[
        list[str] | None,
        _option("Report", about="count requests within these: ttft:MS tpot:MS e2el:MS", metavar="TARGET"),
    ] = None,
    percentile_metrics: Annotated[str, _option("Report", about="latencies to print")] = "ttft,tpot,itl,e2el",
    save_result: Annotated[
        Path | None, _option("Report", about="write a JSON file, and plots beside it as PNG")
    ] = None,
    more_targets: Annotated[
        list[str] | None, typer.Argument(help="further ones of --goodput", metavar="[TARGET]...")
    ] = None,
) -> None:
    """Send requests to a server and print its latencies and throughput, as `vllm bench serve` does.

    Ctrl-C ends the load, and prints the results so far.
    """
    given = {name: value for name, value in locals().items() if name not in ("api_key", "more_targets")}
    given["goodput"] = [*(goodput or []), *(more_targets or [])]
    with _complaining():
        _run(given, api_key)


@contextmanager
def _complaining() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        hint = "the load client needs aiohttp: pip install 'streamserve[bench]'"
        raise SystemExit(_complain(hint)) from error
    except BenchError as error:
        raise SystemExit(_complain(str(error))) from error


def _complain(message: str) -> int:
    typer.secho(f"streamserve bench: {message}", fg="red", err=True)
    return 2


def _run(given: dict[str, Any], api_key: str | None) -> None:
    import numpy as np
    import uvloop

    from streamserve.bench import report
    from streamserve.bench.client import Target
    from streamserve.bench.statistics import parse_metrics, parse_targets, summarize

    targets, metrics = parse_targets(given["goodput"]), parse_metrics(given["percentile_metrics"])
    rng = np.random.default_rng(given["seed"])
    prompts = _prompts(given, rng)
    arrivals = _arrivals(given, rng)
    model = given["model"] or uvloop.run(_ask_for_model(given["base_url"], api_key))
    target = Target(
        base_url=given["base_url"],
        model=model,
        endpoint=given["endpoint"].value,
        temperature=given["temperature"],
        ignore_eos=given["ignore_eos"],
        extra_body=_object(given["extra_body"]),
    )
    run = uvloop.run(_with_progress(target, prompts, arrivals, api_key, given["max_concurrency"]))
    summary = summarize(run.outcomes, run.duration, targets, run.interrupted)
    rate = None if math.isinf(given["request_rate"]) or given["trace"] else given["request_rate"]
    typer.echo(report.as_text(summary, metrics, given["max_concurrency"], rate))
    for remark in report.remarks(summary, run.outcomes):
        typer.echo(remark)
    if given["save_result"]:
        settings = {name: _plain(value) for name, value in (given | {"model": model}).items()}
        for path in report.save(given["save_result"], settings, summary, run):
            typer.echo(f"wrote {path}")
    if not summary.completed:
        raise SystemExit(1)


def _prompts(given: dict[str, Any], rng: "np.random.Generator") -> "list[Prompt]":
    from streamserve.bench import workloads

    count, path = given["num_prompts"], given["dataset_path"]
    if given["dataset"] is Dataset.random:
        lengths = workloads.RandomLengths(
            given["random_input_len"], given["random_output_len"], given["random_range_ratio"]
        )
        if given["endpoint"] is EndpointName.chat:
            return workloads.random_words(count, lengths, rng)
        return workloads.random_tokens(count, lengths, given["random_vocab_size"], rng)
    if path is None:
        raise BenchError(f"--dataset {given['dataset']} needs --dataset-path")
    if given["dataset"] is Dataset.sharegpt:
        return workloads.sharegpt(path, count, given["output_len"], rng)
    return workloads.jsonl(path, count, given["output_len"] or 128, rng)


def _arrivals(given: dict[str, Any], rng: "np.random.Generator") -> list[float]:
    from streamserve.bench.arrivals import gamma_arrivals, trace_arrivals

    if given["trace"] is None:
        return gamma_arrivals(given["num_prompts"], given["request_rate"], given["burstiness"], rng)
    if not math.isinf(given["request_rate"]):
        raise BenchError("--trace says when to send, so --request-rate cannot")
    return trace_arrivals(given["trace"], given["num_prompts"])


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


async def _ask_for_model(base_url: str, api_key: str | None) -> str:
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
