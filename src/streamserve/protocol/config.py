"""Settings of models and workers: plain structs, complete and validated before anything starts.

Descriptions and bounds are written only here and in server_config.py: flags, environment variables, TOML
files, the arguments of `LLM` and `--help` are derived from these fields (settings/options.py).
"""

from typing import Annotated, Literal

import msgspec

from streamserve.protocol.drafting_config import DraftingConfig
from streamserve.protocol.kv_network import KVNetwork
from streamserve.protocol.setting_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Sequences,
    Share,
    about,
)

NumericsClass = Literal["auto", "native", "portable"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "int8"]
Task = Literal["auto", "generate", "embed", "score"]
Backend = Literal["auto", "native", "reference", "device"]
KernelPath = Literal["auto", "portable", "avx2", "avx512", "avx512_bf16", "amx"]
SpeculationMode = Literal["coupled", "rejection"]
Order = Literal["slo", "chunked", "prefill-first", "fcfs", "stta", "arrival", "lcas", "mcps"]
Role = Literal["unified", "prefill", "decode", "draft"]
Eviction = Literal["recompute", "swap", "cost"]
KVTransport = Literal["auto", "shm", "tcp", "nixl"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint to load, and how."""

    path: Annotated[str, about("checkpoint folder in Hugging Face layout, or GGUF file")]
    task: Annotated[
        Task,
        about(
            "what the model does: generate text, embed texts (/v1/embeddings), or score pairs of texts by "
            "its logits of yes and no (/v1/rerank, /v1/score); auto: embed if the checkpoint says that it is "
            "an embedding model, else generate"
        ),
    ] = "auto"
    dtype: Annotated[
        DType, about("data type of weights and KV cache; auto: the data type of the checkpoint")
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDType,
        about(
            "data type of the KV cache; int8 has one scale for each token, head, and key or value; auto: "
            "the data type of the model"
        ),
    ] = "auto"
    device: Annotated[
        str, about("where the model runs: cpu, cuda (a GPU) or cuda:INDEX; auto: a GPU if there is one")
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        about(
            "number of GPUs among which each worker divides the model, with one process for each GPU, "
            "beginning with the GPU of --device; with --backend device: number of processes on the CPU",
            ge=1,
            le=64,
        ),
    ] = 1
    backend: Annotated[
        Backend,
        about(
            "implementation of the model on a CPU: native (C++ kernels), reference (plain PyTorch), "
            "device (the code for GPUs in plain PyTorch, for tests); auto: native where its kernels are "
            "available, else reference"
        ),
    ] = "auto"
    kernel_path: Annotated[
        KernelPath,
        about(
            "instruction set that the native kernels use; auto: the fastest one on this processor, "
            "measured once. The environment variable STREAMSERVE_KERNEL_PATH applies to all models "
            "instead: it sets the latest instruction set that they may use, as on an older processor"
        ),
    ] = "auto"
    numerics: Annotated[
        NumericsClass,
        about(
            "numerics class of the native kernels; kernels of one class compute the same bits, so "
            "machines that serve together need the same class: native (AVX2 and AVX-512, not AMX), "
            "portable (any processor, slow); auto: the class of --kernel-path"
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        about(
            "round the weights of all layers while loading: int8 or int4 with one scale for each group of "
            "128 or 64 inputs, int8:GROUP or int4:GROUP with one for each GROUP (32, 64, 128) of inputs, "
            "w8a8 (8 bits with one scale for each output), or none"
        ),
    ] = "none"
    head_quantization: Annotated[
        Literal["auto", "int8", "none"],
        about(
            "precision of the output head, the matrix that computes the logits: int8 (8 bits), none (the "
            "model's data type); auto: the precision in a GGUF file, 8 bits with --quantization, else the "
            "model's data type"
        ),
    ] = "auto"
    max_loras: Annotated[
        int,
        about(
            "maximum number of LoRA adapters that are loaded at the same time; 0: the number of --lora "
            "adapters",
            ge=0,
            le=4096,
        ),
    ] = 0
    max_lora_rank: Annotated[int, about("largest rank of a LoRA adapter", ge=1, le=1024)] = 64
    max_lora_bytes: Annotated[
        PositiveInt | None,
        about(
            "memory of each worker for the matrices of all LoRA adapters; by default enough for "
            "--max-loras adapters of rank --max-lora-rank"
        ),
    ] = None
    threads: Annotated[
        NonNegativeInt,
        about(
            "CPU threads of each worker; 0: the processors that affinity mask and CPU quota allow, "
            "divided among the workers"
        ),
    ] = 0
    max_model_len: Annotated[
        PositiveInt | None,
        about(
            "maximum length of prompt and output together, in tokens; by default the model's context length"
        ),
    ] = None
    kv_cache_bytes: Annotated[
        PositiveInt | None, about("size of the KV cache in bytes; by default a share of the free memory")
    ] = None
    num_blocks: Annotated[PositiveInt | None, about("size of the KV cache in blocks, instead of bytes")] = (
        None
    )
    block_size: Annotated[int, about("tokens per KV block", ge=1, le=256)] = 16
    max_num_seqs: Annotated[Sequences, about("maximum number of sequences that run at the same time")] = 64
    max_num_batched_tokens: Annotated[
        PositiveInt, about("maximum number of query tokens in a step, over all requests (token budget)")
    ] = 512
    max_chunk: Annotated[
        PositiveInt, about("maximum number of tokens of one prompt in a step (chunked prefill)")
    ] = 512
    order: Annotated[
        Order,
        about(
            "scheduling order: slo (by latency target, then by arrival). The others are for comparison: "
            "arrival (by arrival alone); chunked (by arrival, as Sarathi-Serve); prefill-first (by arrival, "
            "prefill before decode); fcfs, stta (AdaServe's baselines: the strictest target limits the batch "
            "size); lcas (prompt streams with the latest chunk first, from Stream2LLM); mcps (prompt streams "
            "with the most computed tokens first, from Stream2LLM)"
        ),
    ] = "slo"
    prefill_share: Annotated[
        Share | None,
        about(
            "with --order slo: share of a step's query tokens for prefill, beyond what latency targets "
            "require; by default the share with the highest estimated throughput"
        ),
    ] = None
    slo_admission: Annotated[
        bool,
        about("refuse requests with status 503 if their latency targets cannot be met at the current load"),
    ] = False
    enable_prefix_caching: Annotated[bool, about("reuse the KV of common prompt prefixes")] = True
    eviction: Annotated[
        Eviction,
        about(
            "what happens to the KV of preempted sequences: it is recomputed, swapped to host memory, or "
            "whichever is estimated to take less time (cost)"
        ),
    ] = "cost"
    swap_space: Annotated[
        NonNegativeFloat | None,
        about(
            "GiB of host memory for swapped KV blocks, in addition to the KV cache; by default 0, or with "
            "--eviction cost and a profile that contains copy times (--profile) the memory that the KV cache "
            "lacks for --max-num-seqs sequences of full length, but no more than the KV cache has, and no "
            "more than a quarter of the remaining memory"
        ),
    ] = None
    profile: Annotated[
        bool,
        about(
            "measure step times when a model is first served on this machine (about a second), and store them"
        ),
    ] = True
    preempt_every: Annotated[
        NonNegativeInt,
        about("for tests: number of steps between forced preemptions; 0: no forced preemptions"),
    ] = 0
    check: Annotated[
        bool, about("for debugging: check the invariants of blocks and sequences after every step")
    ] = False
    draft: Annotated[
        str,
        about(
            "drafter for speculative decoding: a draft model's folder or hub name, ngram, self:K (the "
            "model's first K layers), tcp://[SERVERKEY@]HOST:PORT[,...] (draft services), or none; auto: the "
            "packaged draft model if it fits the model, else none"
        ),
    ] = "auto"
    draft_key: Annotated[
        str | None, about("file with this server's key for draft services (see `streamserve keys new`)")
    ] = None
    draft_model: Annotated[
        tuple[str, ...],
        about(
            "fingerprint of an allowed draft model; draft services with other draft models are not used; may "
            "be given several times; by default all draft models are allowed"
        ),
    ] = ()
    speculation_mode: Annotated[
        SpeculationMode,
        about(
            "verification of draft tokens of sampled requests: coupled (the same text as without "
            "speculation), rejection (rejection sampling: a different text from the same distribution)"
        ),
    ] = "coupled"
    speculation_policy: Annotated[
        str,
        about(
            "how many tokens are drafted: goodput (first the draft tokens that latency targets require, "
            "then draft tokens that increase throughput), off, fixed:DEPTH, fixed-tree:WIDTHxDEPTH; for "
            "comparison adaserve, adaserve-as-published, equal-greedy, global-greedy, specustream, "
            "specustream-as-published, specustream-equations, threshold, specinfer-tree"
        ),
    ] = "goodput"


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration that a worker process reads from its standard input, as msgpack.

    - `worker`: its name, with the number of times it was started. `peer`: its name at the endpoint, if that
      differs; it stays the same for all heads that the worker serves.
    - `host`: the name of its machine. It is number `host_number` of `host_workers` workers there, which share
      memory and GPUs evenly.
    - `reports_prefixes`: report cached prefixes, because requests can also go to other workers.
    - `kv_network`: keys and address for KV over TCP.
    - `trace`: report lifecycle events and steps with their times.
    - `leased`: after this configuration, the worker reads from standard input the time until which it may
      run.
    - `clock_offset`: seconds by which the server's clock, in which the worker reports times, is ahead of this
      machine's.
    - `journal`: inherited descriptor of the memory for its journal; -1: none.
    - `weights`: inherited descriptors of the memory for the weights of the target and of a draft model,
      shared by all workers of the host; empty: the worker keeps a separate copy.
    - `crash_folder`: the folder for its crash report; empty: none is written.
    - `expected`: fingerprint of the model that the other workers have loaded; empty: no worker has loaded
      one.
    """

    worker: str
    role: Role
    endpoint: str
    model: ModelConfig
    host_workers: int = 1
    host_number: int = 0
    reports_prefixes: bool = False
    kv_transport: KVTransport = "shm"
    kv_network: KVNetwork | None = None
    kv_bytes_per_second: float | None = None
    trace: bool = False
    leased: bool = False
    clock_offset: float = 0.0
    host: str = ""
    journal: int = -1
    weights: tuple[int, ...] = ()
    crash_folder: str = ""
    peer: str = ""
    expected: str = ""
    drafting: DraftingConfig | None = None
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
