"""Block tables: how sequences take, share, copy and give back the blocks of the pool.

    sequence A  [3][7][9 ]          A and B forked: 3 and 7 are full and shared for good;
    sequence B  [3][7][9'] ← copy   9 was half full, so the first to write gets a copy.

Only what a sequence alone holds, and nobody can find by hash, is ever written to.
"""

from streamserve.engine.block_pool import BlockPool
from streamserve.engine.plan import TARGET
from streamserve.engine.sequence import Sequence
from streamserve.scheduling.prefix import extend_hashes


class BlockTables:
    """Owns the pool, and the copies asked for since the last `take_copies`."""

    def __init__(self, num_blocks: int, block_size: int, planes: int, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.planes = planes
        self.prefix_caching = prefix_caching
        self.copies_on_write = 0
        self._copies: list[tuple[int, int]] = []

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` positions need."""
        return -(-length // self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        """Cached blocks for the longest known prefix of a waiting sequence; they are not taken yet. The
        last token is left out, for its output is wanted; so is everything if prompt logits are. The sequence
        remembers how much there was."""
        if not self.prefix_caching or not sequence.prompt_logprobs_done:
            return []
        length = len(sequence.tokens) - 1
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens, self.block_size, length)
        found = []
        for digest in sequence.hashes[: length // self.block_size]:
            block = self.pool.lookup(digest)
            if block is None or not self.pool.has_plane(block, TARGET):
                break
            found.append(block)
        sequence.found = len(found) * self.block_size
        return found

    def next_hash(self, sequence: Sequence) -> bytes | None:
        """The name of the first full block that a waiting sequence would have to compute, if it has one."""
        known = len(self.match(sequence))
        return sequence.hashes[known] if known < len(sequence.hashes) else None

    def coming(self, sequence: Sequence) -> set[bytes]:
        """The names of the full blocks that a running sequence is about to compute."""
        return set(sequence.hashes[sequence.computed[TARGET] // self.block_size :])

    def attach(self, sequence: Sequence, blocks: list[int]) -> None:
        """Start a waiting sequence on the cached blocks that `match` found."""
        for block in blocks:
            self.pool.share(block)
        sequence.blocks = list(blocks)
        for plane in range(self.planes):
            whole = 0
            while whole < len(blocks) and self.pool.has_plane(blocks[whole], plane):
                whole += 1
            sequence.computed[plane] = whole * self.block_size

    def writable(self, sequence: Sequence, rows: int) -> bool:
        """Whether the next `rows` positions can be written as things are."""
        held = len(sequence.blocks) * self.block_size
        return sequence.computed[TARGET] + rows <= held and not self._copy_needed(sequence)

    def shortage(self, sequence: Sequence, rows: int) -> int:
        """How many free blocks are missing to write `rows` tokens behind those computed."""
        length = sequence.computed[TARGET] + rows
        wanted = self.blocks_for(length) - len(sequence.blocks) + self._copy_needed(sequence)
        return max(0, wanted - self.pool.free)

    def room(self, sequence: Sequence) -> int:
        """How many tokens could be written behind those computed with the blocks that are free now."""
        blocks = len(sequence.blocks) + self.pool.free - self._copy_needed(sequence)
        return max(0, blocks * self.block_size - sequence.computed[TARGET])

    def grow(self, sequence: Sequence, rows: int) -> None:
        """Make the next `rows` positions writable; there must be no shortage."""
        if self._copy_needed(sequence):
            index = sequence.computed[TARGET] // self.block_size
            source, fresh = sequence.blocks[index], self.pool.allocate()
            sequence.blocks[index] = fresh
            self._copies.append((source, fresh))
            # Copies come first in a step, in this order: whoever gets the source next writes after the read.
            self.pool.release([source])
            self.copies_on_write += 1
            # Only the target's KV is copied: guesses come before the copies, so a draft model reads anew.
            for plane in range(1, self.planes):
                sequence.computed[plane] = min(sequence.computed[plane], index * self.block_size)
        while len(sequence.blocks) < self.blocks_for(sequence.computed[TARGET] + rows):
            sequence.blocks.append(self.pool.allocate())

    def trim(self, sequence: Sequence, rows: int) -> None:
        """Give back blocks beyond the next `rows` positions."""
        self.trim_to(sequence, sequence.computed[TARGET] + rows)

    def trim_to(self, sequence: Sequence, length: int) -> None:
        """Give back blocks beyond the first `length` positions, with the KV of every group that is in them: a
        draft model may have read further than the target computes."""
        keep = self.blocks_for(length)
        if keep < len(sequence.blocks):
            self.pool.release(sequence.blocks[keep:])
            del sequence.blocks[keep:]
            held = keep * self.block_size
            sequence.computed = [min(computed, held) for computed in sequence.computed]

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies this step must perform before anything else."""
        copies, self._copies = self._copies, []
        return copies

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let `target` hold all of `source`'s blocks too."""
        for block in source.blocks:
            self.pool.share(block)
        target.blocks = list(source.blocks)
        target.hashes = list(source.hashes)
        target.computed = list(source.computed)

    def register(self, sequence: Sequence) -> None:
        """Let others find the full blocks of what is computed."""
        if not self.prefix_caching:
            return
        longest = max(sequence.computed)
        extend_hashes(sequence.hashes, sequence.root, sequence.tokens, self.block_size, longest)
        for plane, computed in enumerate(sequence.computed):
            full = computed // self.block_size
            first = full - 1
            while first >= 0 and not self.pool.knows(sequence.blocks[first], sequence.hashes[first], plane):
                first -= 1
            for index in range(first + 1, full):
                self.pool.register(sequence.blocks[index], sequence.hashes[index], 1 << plane)

    def disown(self, sequence: Sequence) -> None:
        """Let nobody find the blocks that a sequence holds any more: their KV may be wrong."""
        for block in sequence.blocks:
            self.pool.forget(block)

    def drop(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds; what is cached can still be found."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = [0] * self.planes

    def _copy_needed(self, sequence: Sequence) -> bool:
        """Whether the block that the next token goes to is held by others as well."""
        index = sequence.computed[TARGET] // self.block_size
        return index < len(sequence.blocks) and not self.pool.writable(sequence.blocks[index])
