"""Settings: plain structs, complete and checked before anything starts.

The descriptions and bounds here are the only ones: flags, environment variables, TOML files, the arguments
of `LLM` and `--help` are made from these fields (settings.py).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DType = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["auto", "native", "reference"]
LogLevel = Literal["debug", "info", "warning", "error"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one engine's step and cache, all known: what a model's configuration came to on this machine.

    `num_blocks` is the size of the KV pool in blocks of `block_size` tokens. `max_num_batched_tokens` is
    the step's budget of query tokens over all requests; `max_chunk` bounds one prompt's share of it.
    `preempt_every` k preempts the lowest-ranked running sequence every k steps (for tests; 0: never).
    `draft_depth` and `draft_nodes` bound the trees asked of a drafter, where there is one.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_chunk: int = 512
    enable_prefix_caching: bool = True
    preempt_every: int = 0
    draft_depth: int = 8
    draft_nodes: int = 8


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint to load, and how."""

    path: Annotated[str, Meta(description="checkpoint folder in Hugging Face layout")]
    dtype: Annotated[
        DType, Meta(description="precision of weights and cache; auto takes the checkpoint's own")
    ] = "auto"
    backend: Annotated[
        Backend,
        Meta(description="what computes: our own kernels, plain torch, or the kernels where they can be had"),
    ] = "auto"
    threads: Annotated[int, Meta(ge=0, description="CPU threads of the worker; 0 takes all it may use")] = 0
    max_model_len: (
        Annotated[int, Meta(ge=1, description="longest prompt and output together; by default the model's")]
        | None
    ) = None
    kv_cache_bytes: (
        Annotated[int, Meta(ge=1, description="memory for the KV cache; by default a share of what is free")]
        | None
    ) = None
    num_blocks: (
        Annotated[int, Meta(ge=1, description="size of the KV cache in blocks, instead of in bytes")] | None
    ) = None
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens in a KV block")] = 16
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="sequences that may run at once")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="query tokens of one step, over all requests")
    ] = 512
    max_chunk: Annotated[int, Meta(ge=1, description="query tokens of one prompt in one step")] = 512
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV of prompts that begin alike")] = (
        True
    )
    preempt_every: Annotated[
        int, Meta(ge=0, description="for tests: preempt a sequence every so many steps")
    ] = 0


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the HTTP server presents itself."""

    host: Annotated[str, Meta(description="address to listen on; loopback unless told otherwise")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8000
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="names clients may use; by default the model as given")
    ] = ()
    max_requests: Annotated[
        int, Meta(ge=1, description="open requests, running and waiting, before new ones get 429")
    ] = 1024
    stuck_after: Annotated[
        float, Meta(gt=0, description="seconds of silence after which a worker counts as stuck")
    ] = 30.0
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 32 << 20
    log_level: Annotated[LogLevel, Meta(description="how much to log")] = "info"


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker process reads from its standard input, as msgpack. `worker` is its name, with the
    number of times it was started."""

    worker: str
    role: Literal["unified"]
    endpoint: str
    model: ModelConfig
    log_level: LogLevel = "info"
