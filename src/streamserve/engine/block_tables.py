"""Block tables: allocation, prefix sharing, copy-on-write and release of a sequence's KV blocks.

    sequence A  [3][7][9 ]          A and B forked: 3 and 7 are full and stay shared;
    sequence B  [3][7][9'] ← copy   9 was half full, so the first to write gets a copy.

A block is written only while exactly one sequence holds it and no lookup can find it by hash.
"""

from streamserve.contracts.plan import TARGET
from streamserve.engine.block_pool import BlockPool
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import TransferRole
from streamserve.scheduling.prefix import extend_hashes


class BlockTables:
    """The operations on sequences' block tables. Owns the block pool, and the copies requested since the last
    `take_copies`."""

    def __init__(self, num_blocks: int, block_size: int, groups: int, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.groups = groups
        self.prefix_caching = prefix_caching
        self.copies_on_write = 0
        self._copies: list[tuple[int, int]] = []

    def blocks_for(self, length: int) -> int:
        """Return the number of blocks for `length` positions."""
        return -(-length // self.block_size)

    def match(self, sequence: EngineSequence) -> list[int]:
        """Return the cached blocks of a waiting sequence's longest known prefix, without taking references.
        The last token is left out if its logits are needed. While prompt log-probabilities are due, the whole
        prompt must be computed, and no blocks are returned. Stores the cached prefix length in
        `sequence.kv.cached`."""
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

    def next_hash(self, sequence: EngineSequence) -> bytes | None:
        """Return the hash of the first full block that a waiting sequence has to compute; None if it has no
        full block to compute."""
        known = len(self.match(sequence))
        return sequence.kv.hashes[known] if known < len(sequence.kv.hashes) else None

    def pending_hashes(self, sequence: EngineSequence) -> set[bytes]:
        """Return the hashes of the full blocks that a running sequence is about to compute."""
        return set(sequence.kv.hashes[sequence.kv.computed[TARGET] // self.block_size :])

    def attach(self, sequence: EngineSequence, blocks: list[int]) -> None:
        """Give a waiting sequence references to the cached `blocks` that `match` returned."""
        for block in blocks:
            self.pool.share(block)
        sequence.kv.blocks = list(blocks)
        for group in range(self.groups):  # the draft model's KV may be missing in some of the blocks
            whole = 0
            while whole < len(blocks) and self.pool.has_group(blocks[whole], group):
                whole += 1
            sequence.kv.computed[group] = whole * self.block_size

    def writable(self, sequence: EngineSequence, tokens: int) -> bool:
        """Whether the next `tokens` positions can be written without allocating or copying."""
        held = len(sequence.kv.blocks) * self.block_size
        return sequence.kv.computed[TARGET] + tokens <= held and not self._copy_needed(sequence)

    def shortage(self, sequence: EngineSequence, tokens: int) -> int:
        """Return the number of free blocks that are missing to write the next `tokens` positions."""
        length = sequence.kv.computed[TARGET] + tokens
        needed = self.blocks_for(length) - len(sequence.kv.blocks) + self._copy_needed(sequence)
        return max(0, needed - self.pool.free)

    def free_slots(self, sequence: EngineSequence) -> int:
        """Return how many next positions could be written with the blocks that are free now."""
        blocks = len(sequence.kv.blocks) + self.pool.free - self._copy_needed(sequence)
        return max(0, blocks * self.block_size - sequence.kv.computed[TARGET])

    def grow(self, sequence: EngineSequence, tokens: int) -> None:
        """Make the next `tokens` positions writable. There must be no shortage."""
        if self._copy_needed(sequence):
            index = sequence.kv.computed[TARGET] // self.block_size
            source, fresh = sequence.kv.blocks[index], self.pool.allocate()
            sequence.kv.blocks[index] = fresh
            self._copies.append((source, fresh))
            # Until the step copies the source, it must not get a new owner, even if the sequences that
            # share it now are evicted: a drafter that shares the target's KV writes before the step copies.
            self.pool.withhold(source)
            self.pool.release([source])
            self.copies_on_write += 1
            # Only the target's KV is copied. Drafting precedes the copies, so a draft model would read the
            # block before it is copied: it computes the block's tokens again.
            for group in range(1, self.groups):
                sequence.kv.computed[group] = min(sequence.kv.computed[group], index * self.block_size)
        while len(sequence.kv.blocks) < self.blocks_for(sequence.kv.computed[TARGET] + tokens):
            sequence.kv.blocks.append(self.pool.allocate())

    def trim(self, sequence: EngineSequence, tokens: int) -> None:
        """Free the blocks beyond the next `tokens` positions."""
        self.trim_to(sequence, sequence.kv.computed[TARGET] + tokens)

    def trim_to(self, sequence: EngineSequence, length: int) -> None:
        """Free the blocks beyond the first `length` positions, with the KV of all KV cache groups in them. A
        draft model may have computed more tokens than the target."""
        keep = self.blocks_for(length)
        if keep < len(sequence.kv.blocks):
            self.pool.release(sequence.kv.blocks[keep:])
            del sequence.kv.blocks[keep:]
            held = keep * self.block_size
            sequence.kv.computed = [min(computed, held) for computed in sequence.kv.computed]

    def take_copies(self) -> list[tuple[int, int]]:
        """Return and forget the copies (source, destination) that this step must perform first; later steps
        may overwrite the sources."""
        copies, self._copies = self._copies, []
        self.pool.give_back()
        return copies

    def fork(self, source: EngineSequence, target: EngineSequence) -> None:
        """Let `target` share all blocks of `source`."""
        for block in source.kv.blocks:
            self.pool.share(block)
        target.kv.blocks = list(source.kv.blocks)
        target.kv.hashes = list(source.kv.hashes)
        target.kv.computed = list(source.kv.computed)

    def register(self, sequence: EngineSequence) -> None:
        """Add a sequence's full computed blocks to the prefix index."""
        if not self.prefix_caching:
            return
        longest = max(sequence.kv.computed)
        extend_hashes(sequence.kv.hashes, sequence.kv.root, sequence.tokens, self.block_size, longest)
        for group, computed in enumerate(sequence.kv.computed):
            full = computed // self.block_size
            first = full - 1
            # Blocks are registered in order, so all blocks before a registered one are registered too.
            while first >= 0 and not self.pool.knows(
                sequence.kv.blocks[first], sequence.kv.hashes[first], group
            ):
                first -= 1
            for index in range(first + 1, full):
                self.pool.register(sequence.kv.blocks[index], sequence.kv.hashes[index], 1 << group)

    def unregister(self, sequence: EngineSequence) -> None:
        """Remove the sequence's blocks, whose KV may be wrong, from the prefix index."""
        for block in sequence.kv.blocks:
            self.pool.forget(block)

    def drop(self, sequence: EngineSequence) -> None:
        """Release all of the sequence's blocks. Lookups still find the blocks that are in the prefix
        index."""
        self.pool.release(sequence.kv.blocks)
        sequence.kv.blocks = []
        sequence.kv.computed = [0] * self.groups

    def _copy_needed(self, sequence: EngineSequence) -> bool:
        """Whether the block of the next token is shared or cached, and must be copied before it is
        written."""
        index = sequence.kv.computed[TARGET] // self.block_size
        return index < len(sequence.kv.blocks) and not self.pool.writable(sequence.kv.blocks[index])
