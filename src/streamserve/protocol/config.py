"""Settings: plain structs, complete and validated before anything starts.

The descriptions and bounds here are the only ones: flags, environment variables, TOML files, the arguments of
`LLM` and `--help` are made from these fields (settings/resolve.py).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from streamserve.protocol.grammar import MAX_GRAMMAR_BYTES
from streamserve.protocol.logs import LogFormat

DType = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["auto", "native", "reference"]
SpeculationMode = Literal["coupled", "rejection"]
ToolParser = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3"]
Order = Literal["slo", "chunked", "prefill-first", "fcfs", "stta", "arrival", "lcas", "mcps"]
Role = Literal["unified", "prefill", "decode", "draft"]
KVTransport = Literal["shm", "nixl"]
Eviction = Literal["recompute", "swap", "cost"]
LogLevel = Literal["debug", "info", "warning", "error"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resolved limits of one engine's step and cache: the result of a model's configuration on this machine.

    `num_blocks` is the size of the KV pool in blocks of `block_size` tokens. `max_num_batched_tokens` is the
    step's budget of query tokens over all requests; `max_chunk` limits one prompt's share of it.
    `preempt_every` k preempts the lowest-ranked running sequence every k steps (for tests; 0: never).
    `draft_nodes` limits the draft tokens for one request in a step, if there is a drafter. `order` and
    `prefill_share` set the order and the share of prompts in a step (scheduling/ordering.py, prefill.py);
    with `slo_admission`, requests whose latency targets are infeasible are refused
    (scheduling/feasibility.py). `eviction` selects what happens to the KV of preempted sequences, with
    `swap_blocks` blocks in the host pool. With `check` every step is checked (engine/invariants.py).
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_chunk: int = 512
    enable_prefix_caching: bool = True
    preempt_every: int = 0
    draft_nodes: int = 32
    order: Order = "slo"
    prefill_share: float | None = None
    eviction: Eviction = "cost"
    swap_blocks: int = 0
    slo_admission: bool = False
    check: bool = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint to load, and how."""

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
    order: Annotated[
        Order,
        Meta(
            description="who goes first: slo by latency target, then by arrival; the others, for comparison, "
            "by arrival alone, with batches capped for the strictest target, or for prompts still arriving "
            "by the latest chunk (lcas) or what is computed (mcps)"
        ),
    ] = "slo"
    prefill_share: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="order slo: the share of a step's tokens that prompts get, beyond what "
                "targets ask for; by default as many as pay",
            ),
        ]
        | None
    ) = None
    slo_admission: Annotated[
        bool,
        Meta(description="refuse requests whose latency targets cannot be met at the present load, with 503"),
    ] = False
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV of prompts that begin alike")] = (
        True
    )
    eviction: Annotated[
        Eviction,
        Meta(description="KV that must make room is computed again, swapped, or whichever costs less"),
    ] = "cost"
    swap_space: Annotated[
        float, Meta(ge=0, description="GiB of memory to swap KV blocks into, beside the KV cache")
    ] = 0.0
    profile: Annotated[
        bool,
        Meta(description="measure the model on this machine when it is first served: a second, then kept"),
    ] = True
    preempt_every: Annotated[
        int, Meta(ge=0, description="for tests: preempt a sequence every so many steps")
    ] = 0
    check: Annotated[
        bool, Meta(description="for debugging: check all counts of blocks and sequences after every step")
    ] = False
    draft: Annotated[
        str,
        Meta(
            description="who guesses tokens for the model to check: a draft model's folder or name, ngram, "
            "self:K (the model's own first K layers), tcp://[SERVERKEY@]HOST:PORT[,...] (draft services), or "
            "none; auto takes the packaged draft where it fits"
        ),
    ] = "auto"
    draft_key: (
        Annotated[str, Meta(description="file with the key that draft services know this server by")] | None
    ) = None
    draft_model: Annotated[
        tuple[str, ...],
        Meta(description="fingerprint of a draft model that services may draft with; by default any"),
    ] = ()
    speculation_mode: Annotated[
        SpeculationMode,
        Meta(
            description="how guesses of sampled requests are verified: coupled gives the very text of plain "
            "decoding, rejection another of the same distribution"
        ),
    ] = "coupled"
    speculation_policy: Annotated[
        str,
        Meta(
            description="how much is guessed: goodput (what targets need, then as much as pays), off, "
            "fixed:DEPTH, fixed-tree:WIDTHxDEPTH, or for comparison adaserve, adaserve-printed, "
            "equal-greedy, global-greedy, specustream, specustream-printed, specustream-equations, "
            "threshold, specinfer-tree"
        ),
    ] = "goodput"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server."""

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
    max_requests_per_key: (
        Annotated[
            int, Meta(ge=1, description="open requests and WebSockets of one API key; by default any number")
        ]
        | None
    ) = None
    max_waiting_tokens: Annotated[
        int,
        Meta(ge=1, description="prompt tokens of requests that wait, before new ones get 429"),
    ] = 1 << 20
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 8 << 20
    max_memory_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="memory of the server's process that all open requests together may hold: bodies, "
            "what they are parsed to, log-probabilities; beyond it new ones get 429",
        ),
    ] = 256 << 20
    max_connections: Annotated[
        int,
        Meta(ge=1, description="open connections; fewer where the process may open few files (ulimit -n)"),
    ] = 4096
    max_connections_per_address: Annotated[
        int, Meta(ge=1, description="the same from one address; a proxy is one address")
    ] = 2048
    max_streams: Annotated[
        int, Meta(ge=1, description="prompts that may be arriving at once, before new ones get 429")
    ] = 512
    stream_ttl: Annotated[
        float, Meta(gt=0, description="seconds after which an arriving prompt that nobody touches is dropped")
    ] = 300.0
    tool_parser: Annotated[
        ToolParser, Meta(description="how the model writes tool calls; auto looks at its chat template")
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser, Meta(description="how the model thinks; auto looks at its chat template")
    ] = "auto"
    max_grammar_bytes: Annotated[
        int, Meta(ge=1, le=MAX_GRAMMAR_BYTES, description="largest schema or grammar of a request")
    ] = MAX_GRAMMAR_BYTES
    grammar_timeout: Annotated[
        float, Meta(gt=0, description="seconds that compiling a request's schema or grammar may take")
    ] = 1.0
    request_timeout: (
        Annotated[float, Meta(gt=0, description="seconds a request may take in all; by default any")] | None
    ) = None
    read_timeout: Annotated[float, Meta(gt=0, description="seconds a client may take to send a request")] = (
        60.0
    )
    write_timeout: Annotated[
        float, Meta(gt=0, description="seconds a client may leave its reply unread before it is dropped")
    ] = 30.0
    drain_timeout: Annotated[
        float, Meta(ge=0, description="seconds open requests have to end after the first SIGTERM")
    ] = 30.0
    stuck_after: Annotated[
        float, Meta(gt=0, description="seconds of silence after which a worker counts as stuck")
    ] = 30.0
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="key that clients must show: itself, env:NAME of a variable, or sha256:DIGEST; may "
            "be given several times. Arguments can be read by everybody on the machine: better use "
            "--api-key-file or STREAMSERVE_API_KEY"
        ),
    ] = ()
    api_key_file: Annotated[str, Meta(description="file with such keys, one a line")] | None = None
    admin_key: Annotated[
        tuple[str, ...], Meta(description="key for the /admin routes, which are closed without one")
    ] = ()
    admin_key_file: Annotated[str, Meta(description="file with such keys, one a line")] | None = None
    pairs: Annotated[
        int,
        Meta(ge=0, le=64, description="stream pairs: so many prefill workers, each with a decode worker"),
    ] = 0
    prefill: Annotated[
        int,
        Meta(ge=0, le=64, description="prefill workers of uneven pools, with --decode; instead of --pairs"),
    ] = 0
    decode: Annotated[int, Meta(ge=0, le=64, description="decode workers of uneven pools")] = 0
    prefill_max_num_seqs: (
        Annotated[int, Meta(ge=1, le=4096, description="max_num_seqs of prefill workers, if another")] | None
    ) = None
    prefill_max_num_batched_tokens: (
        Annotated[int, Meta(ge=1, description="max_num_batched_tokens of prefill workers, if another")] | None
    ) = None
    prefill_max_chunk: (
        Annotated[int, Meta(ge=1, description="max_chunk of prefill workers, if another")] | None
    ) = None
    decode_max_num_seqs: (
        Annotated[int, Meta(ge=1, le=4096, description="max_num_seqs of decode workers, if another")] | None
    ) = None
    decode_max_num_batched_tokens: (
        Annotated[int, Meta(ge=1, description="max_num_batched_tokens of decode workers, if another")] | None
    ) = None
    decode_max_chunk: (
        Annotated[int, Meta(ge=1, description="max_chunk of decode workers, if another")] | None
    ) = None
    router: Annotated[
        str,
        Meta(
            description="who chooses a request's place: flowguard (flowguard:0.4,0.1,0.3,0.2:0.85 with other "
            "weights and threshold), flowguard-printed, predictive, round-robin, random, least-loaded, "
            "cache-aware, or classes:20,50 (pipelines apart for tpot_ms up to 20, up to 50, and the rest)"
        ),
    ] = "flowguard"
    continue_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="the next turn of a chat, of which a decode worker has all but so many tokens, is "
            "computed there and not moved; 0: never",
        ),
    ] = 64
    kv_transport: Annotated[
        KVTransport,
        Meta(description="how KV goes from worker to worker: through shared memory, or by NVIDIA's NIXL"),
    ] = "shm"
    kv_bytes_per_second: (
        Annotated[
            float, Meta(gt=0, description="for measuring: a wire between workers that is as slow as this")
        ]
        | None
    ) = None
    timeline: (
        Annotated[
            str,
            Meta(description="file for a timeline of steps and requests (chrome://tracing, ui.perfetto.dev)"),
        ]
        | None
    ) = None
    otlp_traces_endpoint: (
        Annotated[
            str,
            Meta(
                description="OpenTelemetry collector that gets a trace of every request, for example "
                "http://localhost:4318/v1/traces"
            ),
        ]
        | None
    ) = None
    cors_origin: Annotated[
        tuple[str, ...],
        Meta(description="origin whose web pages may call this server (https://app.example); * for all"),
    ] = ()
    log_level: Annotated[LogLevel, Meta(description="how much to log")] = "info"
    log_format: Annotated[LogFormat, Meta(description="log lines as text, or as JSON objects")] = "text"
    access_log: Annotated[bool, Meta(description="log every HTTP request")] = False


class DraftingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a draft service."""

    listen: Annotated[
        str, Meta(description="address for targets, tcp://HOST:PORT; port 0 takes a free one")
    ] = "tcp://127.0.0.1:7700"
    key: (
        Annotated[str, Meta(description="file with the service's key; needed off loopback, with --clients")]
        | None
    ) = None
    clients: (
        Annotated[str, Meta(description="file with the public keys of allowed targets, each with a name")]
        | None
    ) = None
    share: Annotated[
        tuple[str, ...], Meta(description="NAME=WEIGHT: a target's share of the service, 1 for the others")
    ] = ()
    max_batch: Annotated[int, Meta(ge=1, le=256, description="targets drafted for in one pass")] = 16
    max_batch_ms: Annotated[
        float, Meta(gt=0, description="longest that a pass for several targets may take, in milliseconds")
    ] = 50.0
    max_targets: Annotated[int, Meta(ge=1, le=4096, description="sessions at once")] = 64
    admission: Annotated[
        bool, Meta(description="turn targets away beyond N_max, the most that gain by being drafted for")
    ] = True
    rate: Annotated[float, Meta(gt=0, description="messages a second that one client may send")] = 2000.0
    lease: Annotated[
        float, Meta(gt=0, description="seconds of silence after which a target's session is ended")
    ] = 30.0
    keep_warm: Annotated[
        Literal["auto", "always", "never"],
        Meta(description="draft for nobody in short gaps, which keeps it fast; auto: where that pays"),
    ] = "auto"
    metrics: (
        Annotated[str, Meta(description="HOST:PORT for Prometheus; by default there are no metrics")] | None
    ) = None


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration that a worker process reads from its standard input, as msgpack. `worker` is its
    name, with the number of times it was started; it may use `memory_share` of the free memory. With `trace`
    it reports what it does and when. `journal`: the inherited descriptor of the memory for its journal; -1:
    none. `crash_folder` is the folder for its crash report; without it none is written."""

    worker: str
    role: Role
    endpoint: str
    model: ModelConfig
    memory_share: float = 1.0
    kv_transport: KVTransport = "shm"
    kv_bytes_per_second: float | None = None
    trace: bool = False
    journal: int = -1
    crash_folder: str = ""
    drafting: DraftingConfig | None = None
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
