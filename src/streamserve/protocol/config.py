"""Settings as they reach a worker: plain structs, complete and checked before anything starts."""

from typing import Literal

import msgspec

DType = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one engine's step and cache.

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
    """Which checkpoint to load, and how: the part of a worker's configuration that names the model.

    `path` is a folder in Hugging Face layout. `kv_cache_bytes` None takes what `num_blocks` asks, or what
    `max_num_seqs` full contexts need within a fraction of the machine's free memory. `num_blocks` None
    derives the pool from the bytes. `max_model_len` None takes the checkpoint's own limit.
    """

    path: str
    dtype: DType = "auto"
    threads: int = 0
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_chunk: int = 512
    enable_prefix_caching: bool = True
    preempt_every: int = 0


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker process reads from its standard input, as msgpack."""

    worker: str
    role: Literal["unified"]
    endpoint: str
    model: ModelConfig
    log_level: str = "info"
