"""Paged KV cache of a draft service: unshared blocks per sequence, with eviction of the least recently used
sequence.

Only KV is evicted: the tokens stay, and the KV is recomputed from them when a tree is requested. Accounts
with more than an equal share of the blocks are evicted first: a client with high demand cannot evict one with
low demand.
"""

from collections.abc import Iterator, Sequence

from streamserve.draft_service.server.sessions import DraftedSequence


class FreeList:
    """The free blocks of a pool of `size`, where a block has at most one holder. The block released last is
    allocated first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = dict.fromkeys(reversed(range(size)))

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self) -> int:
        """Allocate a block. Raises RuntimeError if none is free."""
        if not self._free:
            raise RuntimeError("no free KV block: evict a sequence before allocating")
        return self._free.popitem()[0]

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks; the first of them is allocated next. Raises RuntimeError for a block that is free
        already."""
        for block in reversed(blocks):
            if block in self._free:
                raise RuntimeError(f"KV block {block} was released more often than taken")
            self._free[block] = None


class Memory:
    """A pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = FreeList(num_blocks)
        self.block_size = block_size
        self.evictions = 0
        self._holders: dict[DraftedSequence, None] = {}
        """Sequences that have blocks, the least recently used first."""

    def reserve(self, sequence: DraftedSequence, length: int) -> bool:
        """Allocate blocks for `length` tokens to `sequence`, evicting idle sequences; return False, without
        any change, if that is not enough."""
        missing = self._blocks(length) - len(sequence.blocks)
        if missing > self.pool.free:
            idle = [other for other in self._holders if not other.running and other is not sequence]
            if missing > self.pool.free + sum(len(other.blocks) for other in idle):
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
        """Free a sequence's blocks; its KV is lost."""
        self.pool.release(sequence.blocks)
        sequence.account.blocks -= len(sequence.blocks)
        self._holders.pop(sequence, None)
        sequence.blocks, sequence.computed = [], 0

    def _victims(self, idle: list[DraftedSequence]) -> Iterator[DraftedSequence]:
        """Yield sequences in eviction order: first the sequences of accounts that have more than an equal
        share of the blocks."""
        share = self.pool.size / max(len({holder.account for holder in self._holders}), 1)
        spared = []
        for sequence in idle:
            if sequence.account.blocks > share:
                yield sequence
            else:
                spared.append(sequence)
        yield from spared

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size)
