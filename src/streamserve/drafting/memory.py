"""Paged KV of a draft service: blocks for one sequence alone, taken from whoever was used longest ago.

What is evicted is only KV: the tokens stay, and it is computed again from them when a tree is wanted.
"""

from collections.abc import Iterable

from streamserve.drafting.sessions import DraftedSequence
from streamserve.engine.blocks import BlockPool


class Memory:
    """`num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.evictions = 0

    def fits(self, length: int) -> bool:
        """Whether the whole pool holds a sequence of so many tokens."""
        return self._blocks(length) <= self.pool.size

    def reserve(self, sequence: DraftedSequence, length: int, others: Iterable[DraftedSequence]) -> bool:
        """Give `sequence` blocks for `length` tokens, evicting idle `others`; false if that is not enough,
        and then nothing changes."""
        missing = self._blocks(length) - len(sequence.blocks)
        victims = sorted((o for o in others if o.blocks and not o.running), key=lambda one: one.used)
        victims = [victim for victim in victims if victim is not sequence]
        if missing > self.pool.free + sum(len(victim.blocks) for victim in victims):
            return False
        for victim in victims:
            if missing <= self.pool.free:
                break
            self.release(victim)
            self.evictions += 1
        sequence.blocks += [self.pool.allocate() for _ in range(missing)]
        return True

    def release(self, sequence: DraftedSequence) -> None:
        """Take a sequence's blocks; its KV is forgotten."""
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size)
