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

    def reserve(self, sequence: DraftedSequence, length: int, others: Iterable[DraftedSequence]) -> bool:
        """Give `sequence` blocks for `length` tokens, evicting idle `others`; false if that is not enough,
        and then nothing changes."""
        missing = self._blocks(length) - len(sequence.blocks)
        if missing > self.pool.free:
            idle = [one for one in others if one.blocks and not one.running and one is not sequence]
            if missing > self.pool.free + sum(len(one.blocks) for one in idle):
                return False
            for victim in sorted(idle, key=lambda one: one.used):
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
