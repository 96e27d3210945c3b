"""Block tables: allocation, prefix sharing, copy-on-write and release of a sequence's KV blocks.

    sequence A  [3][7][9 ]          A and B forked: 3 and 7 are full and stay shared;
    sequence B  [3][7][9'] ← copy   9 was half full, so the first to write gets a copy.

A block is only written to while one sequence alone holds it and no lookup can find it by hash.
"""

from streamserve.contracts.plan import TARGET
from streamserve.engine.block_pool import BlockPool
from streamserve.engine.sequence import Sequence
from streamserve.engine.status import TransferRole
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
        self._sources: list[int] = []

    def blocks_for(self, length: int) -> int:
        """Return the number of blocks that `length` positions need."""
        return -(-length // self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of a waiting sequence's longest known prefix, without taking a reference.
        The last token is left out where its logits are needed; with prompt log-probabilities the whole
        prompt is. Stores the cached prefix length in `sequence.kv.cached`."""
        if not self.prefix_caching or not sequence.prompt_logprobs_done:
            return []
        length = len(sequence.tokens) - (sequence.transfer.role is not TransferRole.COPY)
        extend_hashes(sequence.kv.hashes, sequence.kv.root, sequence.tokens, self.block_size, length)
        cached = []
        for digest in sequence.kv.hashes[: length // self.block_size]:
            block = self.pool.lookup(digest)
            if block is None or not self.pool.has_group(block, TARGET):
                break
            cached.append(block)
        sequence.kv.cached = len(cached) * self.block_size
        return cached

    def next_hash(self, sequence: Sequence) -> bytes | None:
        """Return the hash of the first full block that a waiting sequence would have to compute, None if it
        has none."""
        known = len(self.match(sequence))
        return sequence.kv.hashes[known] if known < len(sequence.kv.hashes) else None

    def pending_hashes(self, sequence: Sequence) -> set[bytes]:
        """Return the hashes of the full blocks that a running sequence is about to compute."""
        return set(sequence.kv.hashes[sequence.kv.computed[TARGET] // self.block_size :])

    def attach(self, sequence: Sequence, blocks: list[int]) -> None:
        """Start a waiting sequence on the cached blocks that `match` found."""
        for block in blocks:
            self.pool.share(block)
        sequence.kv.blocks = list(blocks)
        for group in range(self.groups):
            whole = 0
            while whole < len(blocks) and self.pool.has_group(blocks[whole], group):
                whole += 1
            sequence.kv.computed[group] = whole * self.block_size

    def writable(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the next `tokens` positions can be written without allocating or copying."""
        held = len(sequence.kv.blocks) * self.block_size
        return sequence.kv.computed[TARGET] + tokens <= held and not self._copy_needed(sequence)

    def shortage(self, sequence: Sequence, tokens: int) -> int:
        """Return how many free blocks are missing to write `tokens` tokens after those computed."""
        length = sequence.kv.computed[TARGET] + tokens
        needed = self.blocks_for(length) - len(sequence.kv.blocks) + self._copy_needed(sequence)
        return max(0, needed - self.pool.free)

    def free_slots(self, sequence: Sequence) -> int:
        """Return how many tokens could be written after those computed with the blocks that are free now."""
        blocks = len(sequence.kv.blocks) + self.pool.free - self._copy_needed(sequence)
        return max(0, blocks * self.block_size - sequence.kv.computed[TARGET])

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Make the next `tokens` positions writable. There must be no shortage."""
        if self._copy_needed(sequence):
            index = sequence.kv.computed[TARGET] // self.block_size
            source, fresh = sequence.kv.blocks[index], self.pool.allocate()
            sequence.kv.blocks[index] = fresh
            self._copies.append((source, fresh))
            self._leave(source)
            self.copies_on_write += 1
            # Only the target's KV is copied: drafting precedes the copies, so a draft model computes the
            # block's tokens again.
            for group in range(1, self.groups):
                sequence.kv.computed[group] = min(sequence.kv.computed[group], index * self.block_size)
        while len(sequence.kv.blocks) < self.blocks_for(sequence.kv.computed[TARGET] + tokens):
            sequence.kv.blocks.append(self.pool.allocate())

    def trim(self, sequence: Sequence, tokens: int) -> None:
        """Free the blocks beyond the next `tokens` positions."""
        self.trim_to(sequence, sequence.kv.computed[TARGET] + tokens)

    def trim_to(self, sequence: Sequence, length: int) -> None:
        """Free the blocks beyond the first `length` positions, with their KV of every KV cache group: a draft
        model may have computed more tokens than the target."""
        keep = self.blocks_for(length)
        if keep < len(sequence.kv.blocks):
            self.pool.release(sequence.kv.blocks[keep:])
            del sequence.kv.blocks[keep:]
            held = keep * self.block_size
            sequence.kv.computed = [min(computed, held) for computed in sequence.kv.computed]

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies that this step must perform before anything else; afterwards their sources may
        have another owner."""
        copies, self._copies = self._copies, []
        self.pool.release(self._sources)
        self._sources = []
        return copies

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let `target` share all of `source`'s blocks."""
        for block in source.kv.blocks:
            self.pool.share(block)
        target.kv.blocks = list(source.kv.blocks)
        target.kv.hashes = list(source.kv.hashes)
        target.kv.computed = list(source.kv.computed)

    def register(self, sequence: Sequence) -> None:
        """Add the full blocks of what is computed to the prefix index."""
        if not self.prefix_caching:
            return
        longest = max(sequence.kv.computed)
        extend_hashes(sequence.kv.hashes, sequence.kv.root, sequence.tokens, self.block_size, longest)
        for group, computed in enumerate(sequence.kv.computed):
            full = computed // self.block_size
            first = full - 1
            while first >= 0 and not self.pool.knows(
                sequence.kv.blocks[first], sequence.kv.hashes[first], group
            ):
                first -= 1
            for index in range(first + 1, full):
                self.pool.register(sequence.kv.blocks[index], sequence.kv.hashes[index], 1 << group)

    def unregister(self, sequence: Sequence) -> None:
        """Remove the sequence's blocks from the prefix index: their KV may be wrong."""
        for block in sequence.kv.blocks:
            self.pool.forget(block)

    def drop(self, sequence: Sequence) -> None:
        """Release all of the sequence's blocks; cached ones can still be found."""
        self.pool.release(sequence.kv.blocks)
        sequence.kv.blocks = []
        sequence.kv.computed = [0] * self.groups

    def _leave(self, source: int) -> None:
        """Drop a reference of a block that is to be copied. The last one is held until the copies are taken:
        a drafter that shares the target's KV writes to a new owner's blocks before the step copies."""
        if self.pool.sole(source):
            self._sources.append(source)
        else:
            self.pool.release([source])

    def _copy_needed(self, sequence: Sequence) -> bool:
        """Whether the block of the next token is shared or cached, so that it must be copied before it is
        written."""
        index = sequence.kv.computed[TARGET] // self.block_size
        return index < len(sequence.kv.blocks) and not self.pool.writable(sequence.kv.blocks[index])
