"""Eviction of a sequence's KV: recompute it, or swap it out and in (Stream2LLM).

A prompt stream may change while its KV is evicted. KV that an edit then invalidates was copied out in vain;
it is neither copied back nor recomputed. So prompts that only grow favour swapping, and prompts that are
replaced favour recomputing.
"""

from dataclasses import dataclass
from typing import Literal

from streamserve.contracts.cost import CostModel

Eviction = Literal["recompute", "swap", "cost"]

MEMORY = 0.5
"""Weight of the previous estimate in the running average of the share of a prompt that survives an edit."""


@dataclass(frozen=True)
class SwapVerdict:
    """The decision to swap or to recompute, and the seconds that each is expected to cost until the sequence
    continues."""

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
) -> SwapVerdict:
    """Decide whether to swap or to recompute evicted KV of `tokens` tokens.

    The share `survival` (0 to 1) of it is expected to be needed when the sequence continues. Recomputing
    takes steps of `chunk` query tokens. KV that needs more than `free_host_blocks` blocks of host memory is
    recomputed under every policy.
    """
    blocks = -(-tokens // block_size)
    swap = costs.swap.out(blocks) + costs.swap.back(survival * blocks)
    recompute = costs.prefill(round(survival * tokens), chunk)
    preferred = policy == "swap" or (policy == "cost" and swap < recompute)
    return SwapVerdict(preferred and 0 < blocks <= free_host_blocks, swap, recompute)


def learn_survival(survival: float, retained: int, before: int) -> float:
    """Return the share of a prompt that is expected to survive its next edit, after an edit that retained
    `retained` of `before` tokens. `survival` is the expectation so far."""
    return MEMORY * survival + (1 - MEMORY) * min(1.0, retained / before) if before else survival
