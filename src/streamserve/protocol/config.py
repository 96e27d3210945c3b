"""Settings: plain structs, complete and validated before anything starts.

The descriptions and bounds here are the only ones: flags, environment variables, TOML files, the arguments of
`LLM` and `--help` are made from these fields (settings/options.py).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from streamserve.protocol.grammar import MAX_GRAMMAR_BYTES
from streamserve.protocol.logs import LogFormat

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "int8"]
Task = Literal["auto", "generate", "embed", "score"]
Backend = Literal["auto", "native", "reference", "device"]
KernelPath = Literal["auto", "portable", "avx2", "avx512", "avx512_bf16", "amx"]
SpeculationMode = Literal["coupled", "rejection"]
ToolParser = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "granite", "phi4_mini", "qwen3_coder", "pythonic",
    "gemma", "functiongemma", "olmo3", "harmony",
]  # fmt: skip
ReasoningParser = Literal[
    "auto", "none", "qwen3", "deepseek_r1", "granite", "granite3_3", "mistral", "harmony"
]
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
    `prefill_share` set the order and the share of prompts in a step (baselines/orders.py,
    scheduling/prefill.py); with `slo_admission`, requests whose latency targets are infeasible are refused
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

    path: Annotated[str, Meta(description="checkpoint folder in Hugging Face layout, or GGUF file")]
    task: Annotated[
        Task,
        Meta(
            description="what the model does: generate text, embed texts (/v1/embeddings), or score pairs of "
            "texts by its logits of yes and no (/v1/rerank, /v1/score); auto: embed if the checkpoint says "
            "that it is an embedding model, else generate"
        ),
    ] = "auto"
    dtype: Annotated[
        DType, Meta(description="data type of weights and KV cache; auto: that of the checkpoint")
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Meta(
            description="data type of the KV cache: int8, with a scale for each token's key and value of a "
            "head; auto: that of the model"
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(
            description="where the model runs: cpu, cuda (a GPU) or cuda:INDEX; auto: a GPU if there is one"
        ),
    ] = "auto"
    backend: Annotated[
        Backend,
        Meta(
            description="implementation of the model on a CPU: native (C++ kernels), reference (plain "
            "PyTorch), device (the GPUs' in plain PyTorch, for tests); auto: native where its kernels are "
            "available, else reference"
        ),
    ] = "auto"
    kernel_path: Annotated[
        KernelPath,
        Meta(
            description="instructions that the native kernels use; auto: those with which this processor "
            "multiplies fastest, measured once"
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        Meta(
            description="round the weights of all layers while loading: int8, int4, or int8:GROUP, "
            "int4:GROUP with a scale for each GROUP (32, 64, 128) of inputs; w8a8: 8 bits with one scale an "
            "output; none: as they are"
        ),
    ] = "none"
    head_quantization: Annotated[
        Literal["auto", "int8", "none"],
        Meta(
            description="the matrix of the logits: int8: in 8 bits; none: in the model's data type; auto: as "
            "a GGUF file has it, in 8 bits with --quantization, else in the model's data type"
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(
            ge=0,
            description="CPU threads of a worker; 0: the processors of affinity mask and CPU quota, divided "
            "among the workers",
        ),
    ] = 0
    max_model_len: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="maximum length of prompt and output together, in tokens; by default the "
                "model's context length",
            ),
        ]
        | None
    ) = None
    kv_cache_bytes: (
        Annotated[
            int,
            Meta(ge=1, description="size of the KV cache in bytes; by default a share of the free memory"),
        ]
        | None
    ) = None
    num_blocks: (
        Annotated[int, Meta(ge=1, description="size of the KV cache in blocks, instead of bytes")] | None
    ) = None
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens per KV block")] = 16
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=4096, description="maximum number of sequences that run at the same time")
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Meta(ge=1, description="maximum number of query tokens in a step, over all requests (token budget)"),
    ] = 512
    max_chunk: Annotated[
        int, Meta(ge=1, description="maximum number of tokens of one prompt in a step (chunked prefill)")
    ] = 512
    order: Annotated[
        Order,
        Meta(
            description="scheduling order: slo (by latency target, then by arrival); for comparison "
            "arrival (by arrival alone), chunked (by arrival, Sarathi-Serve), prefill-first "
            "(by arrival, prefill before decode), fcfs and stta (batch size limited by the "
            "strictest target, AdaServe's baselines), lcas and mcps (prompt streams by "
            "latest chunk or by computed tokens, Stream2LLM)"
        ),
    ] = "slo"
    prefill_share: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="with --order slo: share of a step's query tokens for prefill, beyond what "
                "latency targets require; by default the share with the highest estimated "
                "throughput",
            ),
        ]
        | None
    ) = None
    slo_admission: Annotated[
        bool,
        Meta(
            description="refuse requests with status 503 if their latency targets cannot be met at the "
            "current load"
        ),
    ] = False
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV of common prompt prefixes")] = True
    eviction: Annotated[
        Eviction,
        Meta(
            description="what happens to the KV of preempted sequences: it is recomputed, swapped to "
            "host memory, or whichever is estimated to take less time (cost)"
        ),
    ] = "cost"
    swap_space: Annotated[
        float, Meta(ge=0, description="GiB of host memory for swapped KV blocks, in addition to the KV cache")
    ] = 0.0
    profile: Annotated[
        bool,
        Meta(
            description="measure step times when a model is first served on this machine (about a "
            "second), and store them"
        ),
    ] = True
    preempt_every: Annotated[
        int, Meta(ge=0, description="for tests: preempt a sequence every so many steps; 0: never")
    ] = 0
    check: Annotated[
        bool, Meta(description="for debugging: check the invariants of blocks and sequences after every step")
    ] = False
    draft: Annotated[
        str,
        Meta(
            description="drafter for speculative decoding: a draft model's folder or hub name, ngram, "
            "self:K (the model's first K layers), tcp://[SERVERKEY@]HOST:PORT[,...] (draft "
            "services), or none; auto: the packaged draft model if it fits the model, else "
            "none"
        ),
    ] = "auto"
    draft_key: (
        Annotated[
            str,
            Meta(description="file with this server's key for draft services (see `streamserve keys new`)"),
        ]
        | None
    ) = None
    draft_model: Annotated[
        tuple[str, ...],
        Meta(
            description="fingerprint of a draft model that draft services may use; may be given several "
            "times; by default any"
        ),
    ] = ()
    speculation_mode: Annotated[
        SpeculationMode,
        Meta(
            description="verification of draft tokens of sampled requests: coupled (the same text as "
            "without speculation), rejection (rejection sampling: another text of the same "
            "distribution)"
        ),
    ] = "coupled"
    speculation_policy: Annotated[
        str,
        Meta(
            description="how many tokens are drafted: goodput (what latency targets require, then what "
            "increases throughput), off, fixed:DEPTH, fixed-tree:WIDTHxDEPTH; for "
            "comparison adaserve, adaserve-as-published, equal-greedy, global-greedy, "
            "specustream, specustream-as-published, specustream-equations, threshold, "
            "specinfer-tree"
        ),
    ] = "goodput"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server."""

    host: Annotated[
        str, Meta(description="address to listen on; by default only this machine can connect")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: a free port")] = 8000
    ssl_certfile: (
        Annotated[
            str,
            Meta(
                description="serve HTTPS with the certificate in this PEM file, which its issuers' "
                "certificates may follow"
            ),
        ]
        | None
    ) = None
    ssl_keyfile: (
        Annotated[
            str,
            Meta(
                description="PEM file with the certificate's private key, without a password; by default "
                "--ssl-certfile"
            ),
        ]
        | None
    ) = None
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(
            description="name of the model in the API; may be given several times; by default MODEL as given"
        ),
    ] = ()
    models_memory_bytes: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="memory for the weights, KV caches and drafts of all models that are loaded at "
                "the same time; by default 80 % of the memory that is available at the start",
            ),
        ]
        | None
    ) = None
    idle_unload: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="seconds without a request after which a model is unloaded, until the next "
                "request for it; by default it stays until another model needs its memory",
            ),
        ]
        | None
    ) = None
    load_timeout: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="seconds that a request waits for its model to be loaded; by default 120",
            ),
        ]
        | None
    ) = None
    memory_timeout: (
        Annotated[
            float,
            Meta(
                ge=0,
                description="seconds of these in which models that are in use may become idle, so that "
                "one is unloaded for it; by default 10",
            ),
        ]
        | None
    ) = None
    max_requests: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum number of open requests, running and waiting; further ones are refused "
            "with status 429",
        ),
    ] = 1024
    max_requests_per_key: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="maximum number of open requests and WebSockets of one API key; by default "
                "unlimited",
            ),
        ]
        | None
    ) = None
    max_waiting_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum number of prompt tokens of waiting requests; further requests are "
            "refused with status 429",
        ),
    ] = 1 << 20
    max_body_bytes: Annotated[int, Meta(ge=1024, description="maximum size of a request body, in bytes")] = (
        8 << 20
    )
    max_memory_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="maximum memory of the API server for open requests, in bytes: bodies, parsed "
            "bodies, log-probabilities; further requests are refused with status 429",
        ),
    ] = 256 << 20
    strict_fields: Annotated[
        bool,
        Meta(
            description="refuse request fields that are unknown or without effect; by default they are taken "
            "and named in the reply's Warning header"
        ),
    ] = False
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum number of open connections; fewer if the limit on open files is lower "
            "(ulimit -n)",
        ),
    ] = 4096
    max_connections_per_address: Annotated[
        int,
        Meta(ge=1, description="maximum number of open connections from one address; a proxy is one address"),
    ] = 2048
    max_streams: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum number of open prompt streams; further ones are refused with status 429",
        ),
    ] = 512
    stream_ttl: Annotated[
        float,
        Meta(gt=0, description="seconds without a request after which an open prompt stream is deleted"),
    ] = 300.0
    max_stored_responses: Annotated[
        int,
        Meta(
            ge=0,
            description="maximum number of responses of /v1/responses that are kept in memory; the oldest "
            "are dropped first; 0: none is kept",
        ),
    ] = 1024
    max_stored_response_bytes: Annotated[
        int,
        Meta(ge=0, description="maximum size of all stored responses with their conversations, in bytes"),
    ] = 64 << 20
    stored_response_ttl: Annotated[float, Meta(gt=0, description="seconds for which a response is kept")] = (
        86400.0
    )
    batch_folder: (
        Annotated[
            str,
            Meta(
                description="folder that keeps files and batches; without it /v1/files and /v1/batches are "
                "disabled"
            ),
        ]
        | None
    ) = None
    max_batch_file_bytes: Annotated[
        int, Meta(ge=1, description="maximum size of an uploaded file, in bytes")
    ] = 100 << 20
    max_batch_folder_bytes: Annotated[
        int, Meta(ge=1, description="maximum size of all files in the batch folder together, in bytes")
    ] = 1 << 30
    max_batch_requests: Annotated[int, Meta(ge=1, description="maximum number of requests of one batch")] = (
        50_000
    )
    batch_concurrency: Annotated[
        int, Meta(ge=1, description="maximum number of requests of all batches that are open at once")
    ] = 32
    tool_parser: Annotated[
        ToolParser,
        Meta(description="format of the model's tool calls; auto: detected from its chat template"),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(description="format of the model's reasoning; auto: detected from its chat template"),
    ] = "auto"
    max_grammar_bytes: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_GRAMMAR_BYTES,
            description="maximum size of a request's JSON schema or grammar, in bytes",
        ),
    ] = MAX_GRAMMAR_BYTES
    grammar_timeout: Annotated[
        float, Meta(gt=0, description="seconds that compiling a request's JSON schema or grammar may take")
    ] = 1.0
    request_timeout: (
        Annotated[
            float, Meta(gt=0, description="seconds that a request may take in total; by default unlimited")
        ]
        | None
    ) = None
    read_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a client may take to send a request")
    ] = 60.0
    write_timeout: Annotated[
        float,
        Meta(gt=0, description="seconds that a client may leave its reply unread before it is disconnected"),
    ] = 30.0
    drain_timeout: Annotated[
        float, Meta(ge=0, description="seconds that open requests have to finish after the first SIGTERM")
    ] = 30.0
    stuck_after: Annotated[
        float, Meta(gt=0, description="seconds without a message after which a worker counts as stuck")
    ] = 30.0
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="API key that clients must send: the key itself, env:NAME (an environment "
            "variable), or sha256:DIGEST; may be given several times. All users of the "
            "machine can read command lines: prefer --api-key-file or STREAMSERVE_API_KEY"
        ),
    ] = ()
    api_key_file: Annotated[str, Meta(description="file with API keys, one per line")] | None = None
    admin_key: Annotated[
        tuple[str, ...],
        Meta(
            description="key for the /admin routes, as for --api-key; without one these routes are disabled"
        ),
    ] = ()
    admin_key_file: Annotated[str, Meta(description="file with admin keys, one per line")] | None = None
    metrics_key: Annotated[
        tuple[str, ...],
        Meta(description="key for /metrics alone, as for --api-key; API keys are valid there too"),
    ] = ()
    metrics_key_file: Annotated[str, Meta(description="file with metrics keys, one per line")] | None = None
    pairs: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="number of pairs of a prefill worker and a decode worker (disaggregated "
            "serving); 0: one worker for both",
        ),
    ] = 0
    prefill: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="number of prefill workers, with --decode; instead of --pairs if the numbers differ",
        ),
    ] = 0
    decode: Annotated[int, Meta(ge=0, le=64, description="number of decode workers, with --prefill")] = 0
    prefill_max_num_seqs: (
        Annotated[int, Meta(ge=1, le=4096, description="max_num_seqs of prefill workers, if different")]
        | None
    ) = None
    prefill_max_num_batched_tokens: (
        Annotated[int, Meta(ge=1, description="max_num_batched_tokens of prefill workers, if different")]
        | None
    ) = None
    prefill_max_chunk: (
        Annotated[int, Meta(ge=1, description="max_chunk of prefill workers, if different")] | None
    ) = None
    decode_max_num_seqs: (
        Annotated[int, Meta(ge=1, le=4096, description="max_num_seqs of decode workers, if different")] | None
    ) = None
    decode_max_num_batched_tokens: (
        Annotated[int, Meta(ge=1, description="max_num_batched_tokens of decode workers, if different")]
        | None
    ) = None
    decode_max_chunk: (
        Annotated[int, Meta(ge=1, description="max_chunk of decode workers, if different")] | None
    ) = None
    router: Annotated[
        str,
        Meta(
            description="policy that assigns requests to workers: flowguard "
            "(flowguard:0.4,0.1,0.3,0.2:0.85 with other weights and overload threshold), "
            "flowguard-as-published, predictive, round-robin, random, least-loaded, "
            "cache-aware, or classes:20,50 (separate workers for requests with tpot_ms up "
            "to 20, up to 50, and all others)"
        ),
    ] = "flowguard"
    continue_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="compute the next turn of a chat on the decode worker if at most this many of "
            "its prompt tokens are not in that worker's cache; 0: never",
        ),
    ] = 64
    kv_transport: Annotated[
        KVTransport,
        Meta(description="transport of KV between workers: shared memory, or NVIDIA NIXL"),
    ] = "shm"
    kv_bytes_per_second: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="for benchmarks: limit the bandwidth of KV transfers between workers to this",
            ),
        ]
        | None
    ) = None
    timeline: (
        Annotated[
            str,
            Meta(
                description="write a timeline of steps and requests to this file (for chrome://tracing or "
                "ui.perfetto.dev)"
            ),
        ]
        | None
    ) = None
    otlp_traces_endpoint: (
        Annotated[
            str,
            Meta(
                description="send a trace of every request to this OpenTelemetry collector, for example "
                "http://localhost:4318/v1/traces"
            ),
        ]
        | None
    ) = None
    cors_origin: Annotated[
        tuple[str, ...],
        Meta(
            description="origin whose web pages may call the API (https://app.example), * for all; may "
            "be given several times"
        ),
    ] = ()
    log_level: Annotated[LogLevel, Meta(description="minimum level of log messages")] = "info"
    log_format: Annotated[LogFormat, Meta(description="format of log lines: text, or JSON objects")] = "text"
    access_log: Annotated[bool, Meta(description="log every HTTP request")] = False


class DraftingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a draft service."""

    listen: Annotated[
        str, Meta(description="address for target servers, tcp://HOST:PORT; port 0: a free port")
    ] = "tcp://127.0.0.1:7700"
    key: (
        Annotated[
            str,
            Meta(
                description="file with the service's key (see `streamserve keys new`), with --clients; "
                "required unless --listen is a loopback address"
            ),
        ]
        | None
    ) = None
    clients: (
        Annotated[
            str,
            Meta(
                description="file with the public keys of allowed target servers, one per line, each "
                "followed by a name"
            ),
        ]
        | None
    ) = None
    share: Annotated[
        tuple[str, ...],
        Meta(
            description="NAME=WEIGHT: weight of a target server when the service is shared, by default "
            "1; may be given several times"
        ),
    ] = ()
    max_batch: Annotated[
        int, Meta(ge=1, le=256, description="maximum number of target servers in a draft batch")
    ] = 16
    max_batch_ms: Annotated[
        float,
        Meta(
            gt=0, description="maximum duration of a draft batch for several target servers, in milliseconds"
        ),
    ] = 50.0
    max_targets: Annotated[int, Meta(ge=1, le=4096, description="maximum number of open sessions")] = 64
    admission: Annotated[
        bool,
        Meta(
            description="refuse target servers beyond N_max, the maximum number that the service is "
            "estimated to speed up"
        ),
    ] = True
    rate: Annotated[
        float, Meta(gt=0, description="maximum number of messages per second from one client")
    ] = 2000.0
    lease: Annotated[
        float,
        Meta(gt=0, description="seconds without a message after which a target server's session is closed"),
    ] = 30.0
    keep_warm: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="run dummy passes in short idle gaps, after which real ones are faster; auto: "
            "only if that is measured to help"
        ),
    ] = "auto"
    metrics: (
        Annotated[str, Meta(description="HOST:PORT for Prometheus metrics; by default there are none")] | None
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
