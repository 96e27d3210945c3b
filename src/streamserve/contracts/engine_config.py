"""Limits of one engine's step and cache: `execution` resolves them, the engine keeps to them."""

import msgspec

from streamserve.protocol.config import Eviction, Order


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resolved limits of one engine's steps and cache: the result of a model's configuration on this machine.

    - `num_blocks`: the size of the KV pool in blocks of `block_size` tokens.
    - `max_num_batched_tokens`: query tokens of a step over all requests; `max_chunk`: query tokens of one
      prompt.
    - `preempt_every`: preempt the lowest-ranked running sequence every this many steps (for tests; 0: never).
    - `draft_nodes`: maximum number of draft tokens for one request in a step.
    - `order`, `prefill_share`: the order of requests and the share of prompts in a step (baselines/orders.py,
      scheduling/prefill.py).
    - `slo_admission`: refuse requests whose latency targets are infeasible (scheduling/feasibility.py).
    - `eviction`: whether the KV of preempted sequences is swapped or recomputed; `swap_blocks`: blocks of the
      host pool for it.
    - `check`: check every step (engine/invariants.py).
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
