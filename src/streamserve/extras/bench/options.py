"""Options of the load client: plain structs. Flags and `--help` are derived from their descriptions and
bounds."""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Dataset = Literal["random", "sharegpt", "jsonl"]
Endpoint = Literal["completions", "chat"]


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and how to connect to it."""

    base_url: Annotated[str, Meta(description="URL of the server; any server with OpenAI's API")] = (
        "http://127.0.0.1:8000"
    )
    model: (
        Annotated[str, Meta(description="name of the model; by default the first that the server lists")]
        | None
    ) = None
    endpoint: Annotated[Endpoint, Meta(description="route that requests are sent to")] = "completions"
    api_key: (
        Annotated[
            str,
            Meta(
                description="API key; prefer the environment variable OPENAI_API_KEY, as command lines are "
                "visible to others"
            ),
        ]
        | None
    ) = None


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts, and the parameters of requests."""

    dataset: Annotated[Dataset, Meta(description="source of the prompts: random ones, or a file")] = "random"
    dataset_path: Annotated[str, Meta(description="file with the prompts, for sharegpt and jsonl")] | None = (
        None
    )
    num_prompts: Annotated[int, Meta(ge=1, description="number of requests")] = 100
    random_input_len: Annotated[int, Meta(ge=1, description="length of random prompts in tokens")] = 256
    random_output_len: Annotated[
        int, Meta(ge=1, description="output length in tokens for random prompts")
    ] = 64
    random_range_ratio: Annotated[
        float,
        Meta(ge=0, le=0.99, description="random lengths are drawn uniformly from length × (1 ± this value)"),
    ] = 0.0
    random_vocab_size: Annotated[
        int, Meta(ge=1, description="random token ids are below this value (only --endpoint completions)")
    ] = 1000
    output_len: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="output length in tokens of prompts from a file that do not set it (jsonl: 128)",
            ),
        ]
        | None
    ) = None
    ignore_eos: Annotated[
        bool, Meta(description="request outputs of exactly the given length, if the server supports it")
    ] = False
    temperature: Annotated[float, Meta(description="sampling temperature; 0: always the likeliest token")] = (
        0.0
    )
    extra_body: Annotated[
        str, Meta(description="additional fields of every request body, as a JSON object")
    ] = "{}"
    seed: Annotated[int, Meta(ge=0, description="seed of prompts, lengths and arrival times")] = 0


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When requests are sent."""

    request_rate: Annotated[float, Meta(description="requests per second; inf: all at once")] = math.inf
    burstiness: Annotated[
        float,
        Meta(
            description="regularity of arrivals; 1: Poisson; below 1: burstier; above 1: more regular "
            "(shape of gamma gaps)"
        ),
    ] = 1.0
    trace: (
        Annotated[
            str,
            Meta(description="file with arrival times in seconds, one per line, instead of --request-rate"),
        ]
        | None
    ) = None
    max_concurrency: (
        Annotated[
            int, Meta(ge=1, description="maximum number of open requests; further ones wait in the client")
        ]
        | None
    ) = None


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics that a benchmark prints at its end, and the file to which it writes the results."""

    goodput: Annotated[
        tuple[str, ...], Meta(description="latency targets for goodput: ttft:MS tpot:MS e2el:MS")
    ] = ()
    percentile_metrics: Annotated[str, Meta(description="latency metrics to print")] = "ttft,tpot,itl,e2el"
    save_result: (
        Annotated[
            str, Meta(description="write the results to this JSON file, and plots to a PNG file next to it")
        ]
        | None
    ) = None


class BenchOptions(msgspec.Struct, frozen=True):
    """All options of a benchmark."""

    server: ServerOptions
    workload: WorkloadOptions
    load: LoadOptions
    report: ReportOptions
