"""The host pool: swapped-out KV blocks, and the copies between device and host.

    plan N    swap out: source blocks stay pinned, host blocks are taken           ┐ copied during step N
              swap in: device blocks are taken, the sequence is not computed       ┘
    complete  after step N: sources and emptied host blocks are free, swapped-in sequences run again

The step touches no block that a copy reads or writes, so both may run concurrently.
"""

from collections.abc import Iterable, Iterator

from streamserve.contracts.plan import TARGET
from streamserve.engine.block_tables import BlockTables
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import SequenceStatus


class SwapSpace:
    """The host blocks, `size` of them, and the pins of the KV blocks being copied."""

    def __init__(self, tables: BlockTables, size: int) -> None:
        self.size = size
        self.moving: set[int] = set()
        """Ids of the sequences that are swapped out or in during the present step."""
        self._tables = tables
        self._free = list(range(size))
        self._copies_out: list[tuple[int, int]] = []
        self._copies_in: list[tuple[int, int]] = []
        self._pinned: list[list[int]] = []
        self._emptied: list[int] = []

    @property
    def free(self) -> int:
        """Number of free host blocks."""
        return len(self._free)

    @property
    def pending_free(self) -> int:
        """Number of KV blocks that become free when the step has ended, because their copies are complete."""
        return sum(self._tables.pool.sole(block) for blocks in self._pinned for block in blocks)

    def out(self, sequence: EngineSequence) -> int:
        """Swap a running sequence out; returns the number of its blocks. The pool must have that many free
        host blocks."""
        self._tables.trim_to(sequence, max(sequence.kv.computed))
        blocks, sequence.kv.blocks = sequence.kv.blocks, []
        sequence.kv.host_blocks = [self._free.pop() for _ in blocks]
        self._copies_out += zip(blocks, sequence.kv.host_blocks, strict=True)
        self._pinned.append(blocks)
        sequence.become(SequenceStatus.SWAPPED if blocks else SequenceStatus.WAITING)
        self.moving.add(sequence.id)
        return len(blocks)

    def blocks_needed(self, sequence: EngineSequence, cached: list[int]) -> int:
        """Return the number of KV blocks to allocate to swap a sequence in; its `cached` blocks are found in
        the prefix index."""
        return max(0, len(sequence.kv.host_blocks) - len(cached))

    def back(self, sequence: EngineSequence, cached: list[int]) -> int:
        """Swap a sequence in; returns the number of copies. The `cached` blocks are taken from the prefix
        index, the others are copied from the host. `cached` must hold fewer tokens than were computed."""
        computed = list(sequence.kv.computed)
        self._tables.attach(sequence, cached)
        fresh = [self._tables.pool.allocate() for _ in sequence.kv.host_blocks[len(cached) :]]
        self._copies_in += zip(sequence.kv.host_blocks[len(cached) :], fresh, strict=True)
        for group, known in enumerate(sequence.kv.computed):
            # A cached block may lack this group's KV. Then tokens after it do not count as computed.
            whole = known == len(cached) * self._tables.block_size
            sequence.kv.computed[group] = computed[group] if whole else min(known, computed[group])
        sequence.kv.blocks += fresh
        sequence.become(SequenceStatus.RUNNING)
        self.moving.add(sequence.id)
        self._emptied += sequence.kv.host_blocks
        sequence.kv.host_blocks = []
        return len(fresh)

    def forget(self, sequence: EngineSequence, retained: int = 0) -> None:
        """Free a sequence's host blocks except the first `retained`. No copy of the present step may read
        them."""
        self._free += sequence.kv.host_blocks[retained:]
        del sequence.kv.host_blocks[retained:]

    def faults(self, swapped: Iterable[list[int]]) -> Iterator[str]:
        """Yield the inconsistencies of the host blocks between steps. `swapped` are the host blocks of each
        sequence."""
        blocks = [block for held in swapped for block in held] + self._free
        if sorted(blocks) != list(range(self.size)):
            yield f"{len(blocks)} host blocks are held or free, of {self.size}, not each once"
        if self._pinned or self._emptied or self._copies_out or self._copies_in or self.moving:
            yield "a copy of the last step is not complete"

    def pop_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return and forget the copies of the step being planned: (KV block, host block) out, and (host
        block, KV block) in."""
        copies = self._copies_out, self._copies_in
        self._copies_out, self._copies_in = [], []
        return copies

    def complete(self) -> None:
        """Free the blocks that the step's copies have read, after the step."""
        for blocks in self._pinned:
            self._tables.pool.release(blocks)
        self._free += self._emptied
        self._pinned, self._emptied = [], []
        self.moving.clear()


def truncate(tables: BlockTables, swap: SwapSpace, sequence: EngineSequence, retained: int) -> int:
    """Truncate a sequence's KV to its first `retained` tokens, on the device or the host; returns the number
    of dropped tokens of the target's KV. A partly retained block that other sequences hold too is copied when
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
