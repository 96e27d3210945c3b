"""Settings of the HTTP server, and of its workers."""

from typing import Annotated

import msgspec

from streamserve.protocol.config import KVTransport, LogFormat, LogLevel
from streamserve.protocol.grammar import MAX_GRAMMAR_BYTES
from streamserve.protocol.setting_types import (
    LauncherName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReasoningFormatName,
    Sequences,
    ToolFormatName,
    Workers,
    about,
)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server."""

    host: Annotated[str, about("address to listen on; by default only this machine can connect")] = (
        "127.0.0.1"
    )
    port: Annotated[int, about("port to listen on; 0: a free port", ge=0, le=65535)] = 8000
    ssl_certfile: Annotated[
        str | None,
        about(
            "serve HTTPS with the certificate in this PEM file; the certificates of its issuers may "
            "follow it in the file"
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        about("PEM file with the certificate's private key, without a password; by default --ssl-certfile"),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        about("name of the model in the API; may be given several times; by default MODEL as given"),
    ] = ()
    lora: Annotated[
        tuple[str, ...],
        about(
            "LoRA adapter to serve, as NAME=PATH with a folder in PEFT's layout; may be given several "
            "times; requests choose an adapter by the field model; with several models, set it in each "
            "model's table"
        ),
    ] = ()
    models_memory_bytes: Annotated[
        PositiveInt | None,
        about(
            "memory for the weights, KV caches and draft models of all models that are loaded at the same "
            "time; by default 80 % of the memory that is available at the start"
        ),
    ] = None
    idle_unload: Annotated[
        PositiveFloat | None,
        about(
            "seconds without a request after which a model is unloaded, until the next request for it; by "
            "default it stays until another model needs its memory"
        ),
    ] = None
    load_timeout: Annotated[
        PositiveFloat | None,
        about("seconds that a request waits for its model to be loaded; by default 120"),
    ] = None
    memory_timeout: Annotated[
        NonNegativeFloat | None,
        about(
            "part of --load-timeout to wait for a busy model to become idle, so that it can be unloaded, "
            "in seconds; by default 10"
        ),
    ] = None
    max_requests: Annotated[
        PositiveInt,
        about(
            "maximum number of open requests, running and waiting; further requests are refused with status "
            "429"
        ),
    ] = 1024
    max_requests_per_key: Annotated[
        PositiveInt | None,
        about("maximum number of open requests and WebSockets of one API key; by default unlimited"),
    ] = None
    max_waiting_tokens: Annotated[
        PositiveInt,
        about(
            "maximum number of prompt tokens of waiting requests; further requests are refused with status "
            "429"
        ),
    ] = 1 << 20
    max_body_bytes: Annotated[int, about("maximum size of a request body, in bytes", ge=1024)] = 8 << 20
    max_memory_bytes: Annotated[
        int,
        about(
            "maximum memory of the API server for open requests, in bytes: bodies, parsed bodies, "
            "log-probabilities; further requests are refused with status 429",
            ge=1 << 20,
        ),
    ] = 256 << 20
    strict_fields: Annotated[
        bool,
        about(
            "refuse request fields that are unknown or without effect; by default they are accepted and "
            "named in the reply's Warning header"
        ),
    ] = False
    max_connections: Annotated[
        PositiveInt,
        about("maximum number of open connections; fewer if the limit on open files is lower (ulimit -n)"),
    ] = 4096
    max_connections_per_address: Annotated[
        PositiveInt, about("maximum number of open connections from one address; a proxy is one address")
    ] = 2048
    max_streams: Annotated[
        PositiveInt,
        about("maximum number of open prompt streams; further streams are refused with status 429"),
    ] = 512
    stream_ttl: Annotated[
        PositiveFloat, about("seconds without a request after which an open prompt stream is deleted")
    ] = 300.0
    max_stored_responses: Annotated[
        NonNegativeInt,
        about(
            "maximum number of responses of /v1/responses that are kept in memory; the oldest are dropped "
            "first; 0: no response is kept"
        ),
    ] = 1024
    max_stored_response_bytes: Annotated[
        NonNegativeInt, about("maximum size of all stored responses with their conversations, in bytes")
    ] = 64 << 20
    stored_response_ttl: Annotated[PositiveFloat, about("seconds for which a response is kept")] = 86400.0
    batch_folder: Annotated[
        str | None,
        about("folder that keeps files and batches; without it /v1/files and /v1/batches are disabled"),
    ] = None
    max_batch_file_bytes: Annotated[PositiveInt, about("maximum size of an uploaded file, in bytes")] = (
        100 << 20
    )
    max_batch_folder_bytes: Annotated[
        PositiveInt, about("maximum size of all files in the batch folder together, in bytes")
    ] = 1 << 30
    max_batch_requests: Annotated[PositiveInt, about("maximum number of requests of one batch")] = 50_000
    batch_concurrency: Annotated[
        PositiveInt, about("maximum number of requests of all batches that are open at once")
    ] = 32
    chat_template: Annotated[
        str | None, about("file with a chat template in Jinja, in place of the model's own template")
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        about(
            "let requests bring a chat template (chat_template); rendering one may take up to 30 seconds of "
            "processor time, during which large requests wait"
        ),
    ] = False
    tool_parser: Annotated[
        ToolFormatName, about("format of the model's tool calls; auto: detected from its chat template")
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningFormatName, about("format of the model's reasoning; auto: detected from its chat template")
    ] = "auto"
    special_tokens_in_messages: Annotated[
        bool,
        about(
            "if a message, a tool or a text to rank contains the text of a special token (such as an "
            "end-of-turn token), encode it as that special token; by default it is encoded as ordinary text"
        ),
    ] = False
    max_grammar_bytes: Annotated[
        int, about("maximum size of a request's JSON schema or grammar, in bytes", ge=1, le=MAX_GRAMMAR_BYTES)
    ] = MAX_GRAMMAR_BYTES
    grammar_timeout: Annotated[
        PositiveFloat, about("seconds that compiling a request's JSON schema or grammar may take")
    ] = 1.0
    request_timeout: Annotated[
        PositiveFloat | None, about("seconds that a request may take in total; by default unlimited")
    ] = None
    read_timeout: Annotated[PositiveFloat, about("seconds that a client may take to send a request")] = 60.0
    write_timeout: Annotated[
        PositiveFloat, about("seconds that a client may leave its reply unread before it is disconnected")
    ] = 30.0
    drain_timeout: Annotated[
        NonNegativeFloat, about("seconds that open requests have to finish after the first SIGTERM")
    ] = 30.0
    stuck_after: Annotated[
        PositiveFloat,
        about(
            "seconds without progress after which a worker that has work is replaced; an idle worker is "
            "replaced after three times this duration"
        ),
    ] = 10.0
    api_key: Annotated[
        tuple[str, ...],
        about(
            "API key that clients must send: the key itself, env:NAME (an environment variable), or "
            "sha256:DIGEST; may be given several times. All users of the machine can read command lines: "
            "prefer --api-key-file or STREAMSERVE_API_KEY"
        ),
    ] = ()
    api_key_file: Annotated[
        str | None, about("file with API keys, one per line, each alone or followed by its tenant's name")
    ] = None
    admin_key: Annotated[
        tuple[str, ...],
        about(
            "key for the admin routes, for example to load adapters; written as for --api-key: the key "
            "itself, env:NAME or sha256:DIGEST. Without an admin key, the admin routes answer with 403"
        ),
    ] = ()
    admin_key_file: Annotated[str | None, about("file with admin keys, one per line")] = None
    metrics_key: Annotated[
        tuple[str, ...],
        about(
            "key that gives access to /metrics only, written as for --api-key; API keys give access to "
            "/metrics, too"
        ),
    ] = ()
    metrics_key_file: Annotated[str | None, about("file with metrics keys, one per line")] = None
    share_prefixes: Annotated[
        bool,
        about(
            "share cached prefixes among tenants; response times then reveal to a tenant whether another "
            "tenant sent the same prefix"
        ),
    ] = False
    workers: Annotated[
        Workers | None,
        about(
            "number of unified workers, which do both prefill and decode and can be combined with pairs; "
            "by default 1, or 0 with pairs"
        ),
    ] = None
    pairs: Annotated[
        Workers,
        about("number of pairs of a prefill worker and a decode worker (disaggregated serving); 0: none"),
    ] = 0
    prefill: Annotated[
        Workers, about("number of prefill workers, with --decode; instead of --pairs if the numbers differ")
    ] = 0
    decode: Annotated[Workers, about("number of decode workers, with --prefill")] = 0
    max_workers: Annotated[
        Workers | None,
        about(
            "maximum number of workers at the same time, including workers that POST /admin/workers adds; "
            "each worker gets 1/max_workers of this machine's memory and processors; by default the number "
            "of workers at the start"
        ),
    ] = None
    prefill_max_num_seqs: Annotated[
        Sequences | None,
        about("value of --max-num-seqs for prefill workers; by default --max-num-seqs"),
    ] = None
    prefill_max_num_batched_tokens: Annotated[
        PositiveInt | None,
        about("value of --max-num-batched-tokens for prefill workers; by default --max-num-batched-tokens"),
    ] = None
    prefill_max_chunk: Annotated[
        PositiveInt | None, about("value of --max-chunk for prefill workers; by default --max-chunk")
    ] = None
    decode_max_num_seqs: Annotated[
        Sequences | None,
        about("value of --max-num-seqs for decode workers; by default --max-num-seqs"),
    ] = None
    decode_max_num_batched_tokens: Annotated[
        PositiveInt | None,
        about("value of --max-num-batched-tokens for decode workers; by default --max-num-batched-tokens"),
    ] = None
    decode_max_chunk: Annotated[
        PositiveInt | None, about("value of --max-chunk for decode workers; by default --max-chunk")
    ] = None
    launcher: Annotated[
        LauncherName,
        about(
            "where workers run: local (on this machine), join (on machines that join at --listen with "
            "`streamserve worker --join`), ray (where Ray places them)"
        ),
    ] = "local"
    listen: Annotated[
        str,
        about(
            "with --launcher join or ray: address tcp://HOST:PORT at which machines join; by default only "
            "processes of this machine can join; with ray, the default is the address that Ray has for this "
            "machine"
        ),
    ] = "tcp://127.0.0.1:7800"
    join_key: Annotated[
        str | None,
        about(
            "file with this server's key (see `streamserve keys new`): required with --launcher join, "
            "possible with --launcher ray"
        ),
    ] = None
    join_clients: Annotated[
        str | None,
        about(
            "with --join-key: file with the public keys of the machines that may join, one per line, each "
            "followed by a name; by default machines that have a copy of --join-key may join"
        ),
    ] = None
    join_lease: Annotated[
        float,
        about(
            "with --launcher join or ray: seconds without a message from a machine after which its workers "
            "are considered lost; a machine that cannot reach this server for this time ends its workers",
            ge=1,
            le=600,
        ),
    ] = 5.0
    ray_address: Annotated[
        str,
        about(
            "with --launcher ray: address of the Ray cluster, as for ray.init; auto: the cluster of "
            "this machine"
        ),
    ] = "auto"
    ray_resources: Annotated[
        tuple[str, ...],
        about(
            "with --launcher ray: custom resource that each worker needs, as NAME=AMOUNT; may be given "
            "several times"
        ),
    ] = ()
    router: Annotated[
        str,
        about(
            "policy that assigns requests to workers: flowguard (flowguard:0.4,0.1,0.3,0.2:0.85 with other "
            "weights and overload threshold), flowguard-as-published, predictive, round-robin, random, "
            "least-loaded, cache-aware, or classes:20,50 (separate workers for requests with tpot_ms up to "
            "20, up to 50, and all others; classes:20=2,50=1,other=3 with the number of decode workers of "
            "each class)"
        ),
    ] = "flowguard"
    continue_tokens: Annotated[
        NonNegativeInt,
        about(
            "compute the next turn of a chat on the decode worker if at most this many of its prompt tokens "
            "are not in that worker's cache; 0: never"
        ),
    ] = 64
    kv_transport: Annotated[
        KVTransport,
        about(
            "transport of KV between workers: shm (shared memory of one machine), tcp (encrypted), nixl "
            "(NVIDIA NIXL; between machines with kv_trusted_network); auto: shared memory within a machine, "
            "tcp between machines"
        ),
    ] = "auto"
    kv_trusted_network: Annotated[
        bool,
        about(
            "let NIXL write KV between machines; NIXL has no keys: every program that reaches its ports can "
            "write to the memory of the workers"
        ),
    ] = False
    kv_bytes_per_second: Annotated[
        PositiveFloat | None,
        about("for benchmarks: maximum bandwidth of KV transfers between workers"),
    ] = None
    timeline: Annotated[
        str | None,
        about(
            "write a timeline of steps and requests to this file (for chrome://tracing or ui.perfetto.dev)"
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        about(
            "send a trace of every request to this OpenTelemetry collector, for example "
            "http://localhost:4318/v1/traces"
        ),
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        about(
            "origin whose web pages may call the API (https://app.example), * for all; may be given several "
            "times"
        ),
    ] = ()
    fork_workers: Annotated[
        bool,
        about(
            "start workers on this machine by forking a process that has already imported their "
            "libraries; --no-fork-workers: start each worker as a new process, which takes about a second "
            "longer"
        ),
    ] = True
    log_level: Annotated[
        LogLevel,
        about(
            "minimum level of log messages; by default warning in `streamserve generate`, `chat` and "
            "`batch`, and in `LLM`"
        ),
    ] = "info"
    log_format: Annotated[LogFormat, about("format of log lines: text, or JSON objects")] = "text"
    access_log: Annotated[bool, about("log every HTTP request")] = False
