"""The pool of KV blocks: reference counts, the prefix index and the LRU order of reuse. Pure bookkeeping.

    free, least recently used first                    held
    ┌───────────┬──────────────────────────────┐   ┌────────────────────────┐
    │ never used │ hashed: a lookup brings it back│   │ references ≥ 1, with or │
    │ or unhashed│ until it is allocated again     │   │ without a hash          │
    └───────────┴──────────────────────────────┘   └────────────────────────┘
      allocate takes from the left; release puts a sequence's last block before its first,
      so that the tail of a prefix is forgotten before its head.

A block id refers to a row in every KV cache group, so blocks of all groups are shared and evicted together.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping


class BlockPool:
    """A pool of `size` blocks, all free at first. It counts the holders of a block; callers keep the block
    tables."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._hashes: list[bytes | None] = [None] * size
        self._groups = [0] * size
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(size))
        self._withheld: set[int] = set()
        self._cached: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] | None = None

    @property
    def free(self) -> int:
        """Number of blocks that could be allocated now. Lookups may still find some of them by their hash."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks that a lookup can find."""
        return len(self._cached)

    def track_changes(self) -> None:
        """Start recording the changes that `take_changes` returns."""
        self._changes = {}

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the changes of the first KV cache group since the last call: the hashes that lookups now
        find, and the hashes that they no longer find."""
        changes, self._changes = self._changes or {}, None if self._changes is None else {}
        stored = [digest for digest, known in changes.items() if known]
        return stored, [digest for digest, known in changes.items() if not known]

    def report_all(self) -> None:
        """Let the next `take_changes` return all hashes that lookups find, for a reader that knows none yet.
        Does nothing if changes are not recorded."""
        if self._changes is not None:
            self._changes = {
                digest: True for digest, block in self._cached.items() if self._groups[block] & 1
            }

    def allocate(self) -> int:
        """Allocate the least recently used free block, and drop its hash. Raises RuntimeError if none is
        free."""
        if not self._free:
            raise RuntimeError("no free KV block: evict a sequence before allocating")
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block in use, or to a free block that was found by its hash."""
        if self._references[block] == 0:
            self._free.pop(block, None)  # a withheld block is not there
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each of `blocks`, which are in position order. Raises RuntimeError if one is
        free."""
        for block in reversed(list(blocks)):
            if self._references[block] <= 0:
                raise RuntimeError(f"KV block {block} was released more often than taken")
            self._references[block] -= 1
            if self._references[block] == 0 and block not in self._withheld:
                self._add_free(block)

    def withhold(self, block: int) -> None:
        """Keep a block in use from being allocated again before `give_back`, even without references."""
        self._withheld.add(block)

    def give_back(self) -> None:
        """Free the withheld blocks that have no references left."""
        withheld, self._withheld = sorted(self._withheld), set()
        for block in withheld:
            if self._references[block] == 0:
                self._add_free(block)

    def is_free(self, block: int) -> bool:
        """Return whether the block has no references."""
        return self._references[block] == 0

    def sole(self, block: int) -> bool:
        """Whether the block has exactly one reference."""
        return self._references[block] == 1

    def writable(self, block: int) -> bool:
        """Whether the block has one holder, and no lookup can find it."""
        return self._references[block] == 1 and self._hashes[block] is None

    def register(self, block: int, digest: bytes, groups: int) -> None:
        """Let lookups of `digest` find `block`, whose KV is complete in the KV cache groups of the bit mask
        `groups`. If lookups already find another block, that one stays, and this one is not registered."""
        if self._hashes[block] is None and digest not in self._cached:
            self._hashes[block] = digest
            self._cached[digest] = block
        if self._hashes[block] == digest:
            if self._changes is not None and groups & ~self._groups[block] & 1:
                self._changes[digest] = True
            self._groups[block] |= groups

    def lookup(self, digest: bytes) -> int | None:
        """Return the block that is registered under this hash; None if there is none."""
        return self._cached.get(digest)

    def knows(self, block: int, digest: bytes, group: int) -> bool:
        """Whether `block` need not be registered for KV cache group `group`: a lookup of `digest` finds
        another block, or finds this one with complete KV in the group."""
        registered = self._cached.get(digest)
        return registered is not None and (registered != block or self.has_group(block, group))

    def has_group(self, block: int, group: int) -> bool:
        """Whether a registered block's KV is complete in KV cache group `group`."""
        return bool(self._groups[block] >> group & 1)

    def faults(self, holders: Mapping[int, int]) -> Iterator[str]:
        """Yield the inconsistencies of the pool, given the actual number of `holders` of each held block."""
        counted = {block: count for block, count in enumerate(self._references) if count}
        if counted != holders:
            wrong = {block for block in {*counted, *holders} if counted.get(block) != holders.get(block)}
            yield f"blocks {sorted(wrong)} have other references than holders"
        if len(self._free) + len(counted) != self.size or not self._free.keys().isdisjoint(counted):
            yield f"{len(self._free)} blocks are free and {len(counted)} held, of {self.size}"
        named = {digest: block for block, digest in enumerate(self._hashes) if digest is not None}
        if named != self._cached:
            yield "names lead to other blocks than the blocks with these names"
        if any(mask and self._hashes[block] is None for block, mask in enumerate(self._groups)):
            yield "a block without a name counts as complete"

    def _add_free(self, block: int) -> None:
        self._free[block] = None
        if self._hashes[block] is None:  # no lookup can find it: allocate it first
            self._free.move_to_end(block, last=False)

    def forget(self, block: int) -> None:
        """Drop a block's hash, so that lookups no longer find it. The block may be held or free."""
        digest = self._hashes[block]
        if digest is not None:
            del self._cached[digest]
            if self._changes is not None and self._groups[block] & 1:
                self._changes[digest] = False
        self._hashes[block] = None
        self._groups[block] = 0
