"""The host pool: swapped-out KV blocks, and the copies out and in.

    plan N    swap out: source blocks stay pinned, host blocks are taken           ┐ copied during step N
              swap in: device blocks are taken, the sequence is not computed       ┘
    complete  after step N: sources and emptied host blocks are free, swapped-in sequences run again

The step touches nothing that a copy reads or writes, so both may run concurrently.
"""

from collections.abc import Iterable, Iterator

from streamserve.contracts.plan import TARGET
from streamserve.engine.block_tables import BlockTables
from streamserve.engine.sequence import Sequence
from streamserve.engine.status import SequenceStatus


class SwapSpace:
    """Owns `size` host blocks, and the pins of the blocks being copied."""

    def __init__(self, tables: BlockTables, size: int) -> None:
        self.size = size
        self.moving: set[int] = set()
        """Ids of the sequences that are swapped out or in during this step."""
        self._tables = tables
        self._free = list(range(size))
        self._copies_out: list[tuple[int, int]] = []
        self._copies_in: list[tuple[int, int]] = []
        self._pinned: list[list[int]] = []
        self._emptied: list[int] = []

    @property
    def free(self) -> int:
        """Number of host blocks that could be taken now."""
        return len(self._free)

    @property
    def pending_free(self) -> int:
        """Number of KV blocks that will be free when this step is over."""
        return sum(self._tables.pool.sole(block) for blocks in self._pinned for block in blocks)

    def out(self, sequence: Sequence) -> int:
        """Swap a running sequence out into host blocks, of which there must be enough; returns how many."""
        self._tables.trim_to(sequence, max(sequence.kv.computed))
        blocks, sequence.kv.blocks = sequence.kv.blocks, []
        sequence.kv.host_blocks = [self._free.pop() for _ in blocks]
        self._copies_out += zip(blocks, sequence.kv.host_blocks, strict=True)
        self._pinned.append(blocks)
        sequence.become(SequenceStatus.SWAPPED if blocks else SequenceStatus.WAITING)
        self.moving.add(sequence.id)
        return len(blocks)

    def blocks_needed(self, sequence: Sequence, cached: list[int]) -> int:
        """Return the number of KV blocks to allocate for a swapped sequence, whose `cached` blocks are still
        cached."""
        return max(0, len(sequence.kv.host_blocks) - len(cached))

    def back(self, sequence: Sequence, cached: list[int]) -> int:
        """Swap a sequence in: first the `cached` blocks of the prefix index, which hold less than was
        computed, then copies of the rest. Returns the number of copies."""
        computed = list(sequence.kv.computed)
        self._tables.attach(sequence, cached)
        fresh = [self._tables.pool.allocate() for _ in sequence.kv.host_blocks[len(cached) :]]
        self._copies_in += zip(sequence.kv.host_blocks[len(cached) :], fresh, strict=True)
        for group, known in enumerate(sequence.kv.computed):
            whole = known == len(cached) * self._tables.block_size
            sequence.kv.computed[group] = computed[group] if whole else min(known, computed[group])
        sequence.kv.blocks += fresh
        sequence.become(SequenceStatus.RUNNING)
        self.moving.add(sequence.id)
        self._emptied += sequence.kv.host_blocks
        sequence.kv.host_blocks = []
        return len(fresh)

    def forget(self, sequence: Sequence, retained: int = 0) -> None:
        """Free a sequence's host blocks except the first `retained`. No copy of this step may read them."""
        self._free += sequence.kv.host_blocks[retained:]
        del sequence.kv.host_blocks[retained:]

    def faults(self, swapped: Iterable[list[int]]) -> Iterator[str]:
        """Yield what is wrong with the host blocks between steps, where sequences hold those `swapped`."""
        blocks = [block for held in swapped for block in held] + self._free
        if sorted(blocks) != list(range(self.size)):
            yield f"{len(blocks)} host blocks are held or free, of {self.size}, not each once"
        if self._pinned or self._emptied or self._copies_out or self._copies_in or self.moving:
            yield "a copy of the last step is not complete"

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return this step's copies: (KV block, host block) out, and (host block, KV block) in."""
        copies = self._copies_out, self._copies_in
        self._copies_out, self._copies_in = [], []
        return copies

    def complete(self) -> None:
        """Complete the step's copies: free the blocks that they read."""
        for blocks in self._pinned:
            self._tables.pool.release(blocks)
        self._free += self._emptied
        self._pinned, self._emptied = [], []
        self.moving.clear()


def truncate(tables: BlockTables, swap: SwapSpace, sequence: Sequence, retained: int) -> int:
    """Truncate a sequence's KV to its first `retained` tokens, on the device or the host; returns how many
    tokens of the target's KV were dropped. A partly retained block that other sequences hold is copied when
    it is written to."""
    dropped = max(0, sequence.kv.computed[TARGET] - retained)
    sequence.kv.computed = [min(computed, retained) for computed in sequence.kv.computed]
    del sequence.kv.hashes[retained // tables.block_size :]
    blocks = tables.blocks_for(max(sequence.kv.computed))
    if sequence.kv.host_blocks:
        swap.forget(sequence, blocks)
    tables.trim_to(sequence, max(sequence.kv.computed))
    if not blocks and sequence.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED):
        sequence.become(SequenceStatus.WAITING)
    return dropped
