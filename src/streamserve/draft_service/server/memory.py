"""Paged KV of a draft service: blocks for one sequence alone, taken from whoever was used longest ago.

What is evicted is only KV: the tokens stay, and it is computed again from them when a tree is wanted.
Accounts that have more than an equal share of the blocks lose theirs first: a client that asks for much
cannot evict one that asks for little.
"""

from collections.abc import Iterator

from streamserve.draft_service.server.sessions import DraftedSequence
from streamserve.engine.block_pool import BlockPool


class Memory:
    """`num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.evictions = 0
        self._holders: dict[DraftedSequence, None] = {}
        """Sequences that have blocks, those used longest ago first."""

    def reserve(self, sequence: DraftedSequence, length: int) -> bool:
        """Give `sequence` blocks for `length` tokens, evicting idle ones; false if that is not enough, and
        then nothing changes."""
        missing = self._blocks(length) - len(sequence.blocks)
        if missing > self.pool.free:
            idle = [one for one in self._holders if not one.running and one is not sequence]
            if missing > self.pool.free + sum(len(one.blocks) for one in idle):
                return False
            for victim in self._victims(idle):
                if missing <= self.pool.free:
                    break
                self.release(victim)
                self.evictions += 1
        if missing > 0:
            sequence.blocks += [self.pool.allocate() for _ in range(missing)]
            sequence.account.blocks += missing
        self._holders.pop(sequence, None)
        if sequence.blocks:
            self._holders[sequence] = None
        return True

    def release(self, sequence: DraftedSequence) -> None:
        """Take a sequence's blocks; its KV is forgotten."""
        self.pool.release(sequence.blocks)
        sequence.account.blocks -= len(sequence.blocks)
        self._holders.pop(sequence, None)
        sequence.blocks, sequence.computed = [], 0

    def _victims(self, idle: list[DraftedSequence]) -> Iterator[DraftedSequence]:
        """In the order in which they are evicted: first those of accounts with more than their share."""
        share = self.pool.size / max(len({one.account for one in self._holders}), 1)
        spared = []
        for one in idle:
            if one.account.blocks > share:
                yield one
            else:
                spared.append(one)
        yield from spared

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size)
