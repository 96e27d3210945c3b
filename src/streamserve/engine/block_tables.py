"""Block tables: allocation, prefix sharing, copy-on-write and release of a sequence's KV blocks.

    sequence A  [3][7][9 ]          A and B forked: 3 and 7 are full and stay shared;
    sequence B  [3][7][9'] ← copy   9 was half full, so the first to write gets a copy.

A block is only written to while one sequence alone holds it and no lookup can find it by hash.
"""

from streamserve.engine.block_pool import BlockPool
from streamserve.engine.plan import TARGET
from streamserve.engine.sequence import Sequence
from streamserve.scheduling.prefix import extend_hashes


class BlockTables:
    """Owns the pool, and the copies requested since the last `take_copies`."""

    def __init__(self, num_blocks: int, block_size: int, groups: int, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.groups = groups
        self.prefix_caching = prefix_caching
        self.copies_on_write = 0
        self._copies: list[tuple[int, int]] = []

    def blocks_for(self, length: int) -> int:
        """Return the number of blocks that `length` positions need."""
        return -(-length // self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of a waiting sequence's longest known prefix, without taking a reference.
        The last token is left out, since its logits are needed; with prompt log-probabilities the whole
        prompt is. Stores the cached prefix length in `sequence.cached`."""
        if not self.prefix_caching or not sequence.prompt_logprobs_done:
            return []
        length = len(sequence.tokens) - 1
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens, self.block_size, length)
        cached = []
        for digest in sequence.hashes[: length // self.block_size]:
            block = self.pool.lookup(digest)
            if block is None or not self.pool.has_group(block, TARGET):
                break
            cached.append(block)
        sequence.cached = len(cached) * self.block_size
        return cached

    def next_hash(self, sequence: Sequence) -> bytes | None:
        """Return the hash of the first full block that a waiting sequence would have to compute, None if it
        has none."""
        known = len(self.match(sequence))
        return sequence.hashes[known] if known < len(sequence.hashes) else None

    def pending_hashes(self, sequence: Sequence) -> set[bytes]:
        """Return the hashes of the full blocks that a running sequence is about to compute."""
        return set(sequence.hashes[sequence.computed[TARGET] // self.block_size :])

    def attach(self, sequence: Sequence, blocks: list[int]) -> None:
        """Start a waiting sequence on the cached blocks that `match` found."""
        for block in blocks:
            self.pool.share(block)
        sequence.blocks = list(blocks)
        for group in range(self.groups):
            whole = 0
            while whole < len(blocks) and self.pool.has_group(blocks[whole], group):
                whole += 1
            sequence.computed[group] = whole * self.block_size

    def writable(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the next `tokens` positions can be written without allocating or copying."""
        held = len(sequence.blocks) * self.block_size
        return sequence.computed[TARGET] + tokens <= held and not self._copy_needed(sequence)

    def shortage(self, sequence: Sequence, tokens: int) -> int:
        """Return how many free blocks are missing to write `tokens` tokens after those computed."""
        length = sequence.computed[TARGET] + tokens
        needed = self.blocks_for(length) - len(sequence.blocks) + self._copy_needed(sequence)
        return max(0, needed - self.pool.free)

    def free_slots(self, sequence: Sequence) -> int:
        """Return how many tokens could be written after those computed with the blocks that are free now."""
        blocks = len(sequence.blocks) + self.pool.free - self._copy_needed(sequence)
        return max(0, blocks * self.block_size - sequence.computed[TARGET])

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Make the next `tokens` positions writable. There must be no shortage."""
        if self._copy_needed(sequence):
            index = sequence.computed[TARGET] // self.block_size
            source, fresh = sequence.blocks[index], self.pool.allocate()
            sequence.blocks[index] = fresh
            self._copies.append((source, fresh))
            # Copies come first in a step, in this order: the next holder of the source block writes after
            # they are read.
            self.pool.release([source])
            self.copies_on_write += 1
            # Only the target's KV is copied: drafting precedes the copies, so a draft model computes the
            # block's tokens again.
            for group in range(1, self.groups):
                sequence.computed[group] = min(sequence.computed[group], index * self.block_size)
        while len(sequence.blocks) < self.blocks_for(sequence.computed[TARGET] + tokens):
            sequence.blocks.append(self.pool.allocate())

    def trim(self, sequence: Sequence, tokens: int) -> None:
        """Free the blocks beyond the next `tokens` positions."""
        self.trim_to(sequence, sequence.computed[TARGET] + tokens)

    def trim_to(self, sequence: Sequence, length: int) -> None:
        """Free the blocks beyond the first `length` positions, with their KV of every KV cache group: a draft
        model may have computed more tokens than the target."""
        keep = self.blocks_for(length)
        if keep < len(sequence.blocks):
            self.pool.release(sequence.blocks[keep:])
            del sequence.blocks[keep:]
            held = keep * self.block_size
            sequence.computed = [min(computed, held) for computed in sequence.computed]

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies that this step must perform before anything else."""
        copies, self._copies = self._copies, []
        return copies

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let `target` share all of `source`'s blocks."""
        for block in source.blocks:
            self.pool.share(block)
        target.blocks = list(source.blocks)
        target.hashes = list(source.hashes)
        target.computed = list(source.computed)

    def register(self, sequence: Sequence) -> None:
        """Add the full blocks of what is computed to the prefix index."""
        if not self.prefix_caching:
            return
        longest = max(sequence.computed)
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens, self.block_size, longest)
        for group, computed in enumerate(sequence.computed):
            full = computed // self.block_size
            first = full - 1
            while first >= 0 and not self.pool.knows(sequence.blocks[first], sequence.hashes[first], group):
                first -= 1
            for index in range(first + 1, full):
                self.pool.register(sequence.blocks[index], sequence.hashes[index], 1 << group)

    def unregister(self, sequence: Sequence) -> None:
        """Remove the sequence's blocks from the prefix index: their KV may be wrong."""
        for block in sequence.blocks:
            self.pool.forget(block)

    def drop(self, sequence: Sequence) -> None:
        """Release all of the sequence's blocks; cached ones can still be found."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = [0] * self.groups

    def _copy_needed(self, sequence: Sequence) -> bool:
        """Whether the block of the next token is shared or cached, so that it must be copied before it is
        written."""
        index = sequence.computed[TARGET] // self.block_size
        return index < len(sequence.blocks) and not self.pool.writable(sequence.blocks[index])
