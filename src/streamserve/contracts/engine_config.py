"""Limits of one engine's step and cache: `execution` resolves them, the engine keeps to them."""

import msgspec

from streamserve.protocol.config import Eviction, Order


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
