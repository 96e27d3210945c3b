"""What becomes of an evicted sequence's KV: computed again, or copied out and back (Stream2LLM).

An arriving prompt may change while its KV is away. What an edit will invalidate is copied out in vain, and is
neither copied back nor computed again: so appended prompts tend to swapping, replaced ones to recomputing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from streamserve.scheduling.cost import Line, SwapCost

Eviction = Literal["recompute", "swap", "cost"]

MEMORY = 0.5
"""Weight of what is known already, when an edit shows which share of a prompt survived it."""


GUESSED_SWAP = SwapCost(Line(1e-4, 2e-4), Line(1e-4, 2e-4))
"""Where nothing was measured: blocks of a megabyte at some 5 GB/s."""


@dataclass(frozen=True)
class Costs:
    """What evicting depends on: `step(rows, kv_tokens)` and `swap(blocks)` in seconds, on this machine.
    `chunk`: query tokens of a prompt in a step."""

    step: Callable[[int, int], float]
    swap: SwapCost = GUESSED_SWAP
    chunk: int = 512

    def recompute(self, tokens: int) -> float:
        """Seconds to compute the KV of a prompt's first `tokens` tokens, alone."""
        starts = range(0, tokens, self.chunk)
        return sum(self.step(min(self.chunk, tokens - start), start) for start in starts)


@dataclass(frozen=True)
class Verdict:
    """Whether to swap, and the seconds that either way is expected to cost until the sequence goes on."""

    swap: bool
    swap_seconds: float
    recompute_seconds: float


def decide(
    policy: Eviction, costs: Costs, tokens: int, block_size: int, survival: float, room: int
) -> Verdict:
    """What to do with the KV of `tokens` tokens, of which the share `survival` is expected to be wanted when
    the sequence goes on. The host pool has `room` blocks: without room for all there is nothing to choose."""
    blocks = -(-tokens // block_size)
    swap = costs.swap.out(blocks) + costs.swap.back(survival * blocks)
    recompute = costs.recompute(round(survival * tokens))
    chosen = policy == "swap" or (policy == "cost" and swap < recompute)
    return Verdict(chosen and 0 < blocks <= room, swap, recompute)


def learn_survival(survival: float, kept: int, before: int) -> float:
    """The share expected to survive the next edit, after one that kept `kept` of `before` tokens."""
    return MEMORY * survival + (1 - MEMORY) * min(1.0, kept / before) if before else survival
