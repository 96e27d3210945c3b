"""Eviction of a sequence's KV: recompute it, or swap it out and in (Stream2LLM).

A prompt stream may change while its KV is evicted. What an edit will invalidate is copied out for nothing,
and is neither copied back nor recomputed. So appended prompts tend to swapping, replaced ones to recomputing.
"""

from dataclasses import dataclass
from typing import Literal

from streamserve.contracts.cost import CostModel

Eviction = Literal["recompute", "swap", "cost"]

MEMORY = 0.5
"""Weight of the previous estimate when an edit shows which share of a prompt survived it."""


@dataclass(frozen=True)
class Verdict:
    """Whether to swap, and the seconds that either way is expected to cost until the sequence continues."""

    swap: bool
    swap_seconds: float
    recompute_seconds: float


def decide(
    policy: Eviction,
    costs: CostModel,
    chunk: int,
    tokens: int,
    block_size: int,
    survival: float,
    free_host_blocks: int,
) -> Verdict:
    """Decide how to evict the KV of `tokens` tokens, of which the share `survival` is expected to be needed
    when the sequence continues. If not all blocks fit into the host pool's `free_host_blocks`, the KV is
    recomputed, with `chunk` query tokens in a step."""
    blocks = -(-tokens // block_size)
    swap = costs.swap.out(blocks) + costs.swap.back(survival * blocks)
    recompute = costs.prefill(round(survival * tokens), chunk)
    preferred = policy == "swap" or (policy == "cost" and swap < recompute)
    return Verdict(preferred and 0 < blocks <= free_host_blocks, swap, recompute)


def learn_survival(survival: float, retained: int, before: int) -> float:
    """Return the share expected to survive the next edit, after one with `retained` of `before`
    tokens."""
    return MEMORY * survival + (1 - MEMORY) * min(1.0, retained / before) if before else survival
