"""Where a step's blocks come from: free ones, or those of sequences that rank lower and are evicted for it.

    Scheduler.plan ──▶ admit, reserve, swap_in, grow      for one sequence, in its turn
                        └──▶ preempt the lowest below it    its KV goes to the host pool, or is dropped

scheduling/ordering.py decides the rank of each sequence, scheduling/eviction.py what becomes of evicted KV.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from streamserve.engine.block_tables import BlockTables
from streamserve.engine.plan import TARGET, StepPlan
from streamserve.engine.sequence import Sequence
from streamserve.engine.swap import SwapSpace
from streamserve.protocol.config import EngineConfig
from streamserve.scheduling.eviction import Costs, decide


@dataclass
class EvictionCounters:
    """What evictions came to so far, as in EvictionReport."""

    swaps: int = 0
    recomputes: int = 0
    blocks_out: int = 0
    blocks_back: int = 0
    swap_predicted: float = 0.0
    swap_seconds: float = 0.0
    recompute_predicted: float = 0.0
    recompute_seconds: float = 0.0


class Room:
    """Makes room for the `sequences` of one engine in the blocks of `tables` and `swap`."""

    def __init__(
        self,
        config: EngineConfig,
        costs: Costs,
        tables: BlockTables,
        swap: SwapSpace,
        sequences: Mapping[int, Sequence],
    ) -> None:
        self.evictions = EvictionCounters()
        self.preemptions = 0
        self._config = config
        self._costs = costs
        self._tables = tables
        self._swap = swap
        self._sequences = sequences
        self._again: dict[int, int] = {}
        self._ranked: list[Sequence] = []
        self._going: Container[int] = ()
        self._idle = False

    def begin(self, ranked: list[Sequence], going: Container[int], idle: bool) -> None:
        """A step begins: `ranked` are the first to the last, `going` will tell who is part of it by then, in
        an `idle` one the tails of arriving prompts count as work."""
        self._ranked, self._going, self._idle = ranked, going, idle

    def admit(self, sequence: Sequence) -> int | None:
        """Let a waiting sequence hold blocks if all its tokens could fit: into free blocks, or into those of
        running sequences that rank lower. Returns how many tokens were cached, None if it must wait."""
        if not self._seated(sequence):
            return None
        found = self._tables.match(sequence)
        missing = self._missing(sequence)
        free = self._free_beside(found) + self._swap.leaving
        below = sum(len(s.blocks) for s in self._below(sequence))
        if self.running() and missing > free + below:
            return None
        self._tables.attach(sequence, found)
        return len(found) * self._config.block_size

    def reserve(self, sequence: Sequence) -> bool:
        """Blocks for all of an admitted sequence's tokens and the next; false, and none, if there are not
        enough."""
        rows = sequence.pending + 1
        if self._evict_for(sequence, rows) and not self._tables.shortage(sequence, rows):
            self._tables.grow(sequence, rows)
            return True
        self._tables.drop(sequence)
        return False

    def grow(self, sequence: Sequence, rows: int) -> int:
        """Blocks for up to `rows` tokens; returns for how many."""
        if self._tables.writable(sequence, rows):
            return rows
        self._evict_for(sequence, rows)
        rows = min(rows, self._tables.room(sequence))
        if rows:
            self._tables.grow(sequence, rows)
        return rows

    def swap_in(self, sequence: Sequence) -> bool:
        """Let a swapped sequence come back, if there is room now; it goes on with the next step."""
        found = self._tables.match(sequence)
        if not self._seated(sequence):
            return False
        wanted = self._swap.wanted(sequence, found) + 1  # and one to go on with
        while (short := wanted - self._free_beside(found) - self._swap.leaving) > 0:
            if not self._evict_below(sequence, short):
                return False
        if wanted > self._free_beside(found):
            return False
        self.evictions.blocks_back += self._swap.back(sequence, found)
        return True

    def yields(self, sequence: Sequence) -> bool:
        """Whether a swapped sequence would take blocks that others wait for who would evict it for them: the
        order of turns may change from step to step, and it would go out and come back for ever."""
        found = self._tables.match(sequence)
        left = self._free_beside(found) + self._swap.leaving - self._swap.wanted(sequence, found) - 1
        holds, above = _holds_reservation(sequence), True
        for other in self._ranked:
            if other is sequence:
                above = False
            elif other.waits and not other.blocks and other.todo(self._idle):
                first = _holds_reservation(other)
                if first if first != holds else above:
                    shared = self._tables.match(other)
                    left -= self._missing(other) + sum(map(self._tables.pool.is_free, shared))
                    if left < 0:
                        return True
        return False

    def known_by_now(self, sequence: Sequence) -> bool:
        """Whether the prefix index finds as much as a swapped sequence has on the host, which is forgotten
        then."""
        known = len(self._tables.match(sequence)) * self._config.block_size
        if known >= sequence.computed[TARGET]:
            self._swap.forget(sequence)
            sequence.computed = [0] * self._tables.planes
        return not sequence.swapped

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks: its KV waits in the host pool, or will be recomputed as far as the
        prefix index forgets it, whichever the policy says. Nobody would bring back one that only waits for
        its ticket."""
        sequence.preempted_at = sequence.outputs
        self.preemptions += 1
        tokens = sequence.computed[TARGET]
        verdict = decide(
            "recompute" if sequence.held else self._config.eviction, self._costs, max(sequence.computed),
            self._config.block_size, sequence.survival if sequence.open else 1.0, self._swap.free,
        )  # fmt: skip
        if verdict.swap:
            self.evictions.swap_predicted += verdict.swap_seconds
            self.evictions.swaps += 1
            self.evictions.blocks_out += self._swap.out(sequence)
            return
        self.evictions.recompute_predicted += verdict.recompute_seconds
        self.evictions.recomputes += 1
        self._again[sequence.id] = tokens
        self._tables.drop(sequence)
        sequence.epoch += 1
        sequence.told = 0

    def preempt_lowest(self) -> None:
        """Only one that got a token since its last preemption, so that all end some day."""
        moved = [s for s in self._ranked if s.running and s.outputs > s.preempted_at]
        if moved:
            self.preempt(moved[-1])

    def stepped(self, plan: StepPlan, seconds: float, swap_seconds: float) -> None:
        """The plan has been carried out, in so many seconds in all, so many of which went to its swaps."""
        self._swap.settle()
        self.evictions.swap_seconds += swap_seconds
        rows = sum(span.rows for span in plan.spans)
        for span in plan.spans:
            again = self._again.get(span.sequence, 0) - span.start
            if again > 0:  # of what an eviction dropped
                self.evictions.recompute_seconds += seconds * min(len(span.tokens), again) / rows
            if again <= len(span.tokens):
                self._again.pop(span.sequence, None)

    def forget(self, sequence: Sequence) -> None:
        """Free all that a sequence holds."""
        self._tables.drop(sequence)
        self._swap.forget(sequence)
        self._again.pop(sequence.id, None)

    def running(self) -> list[Sequence]:
        """The sequences that hold blocks."""
        return [sequence for sequence in self._sequences.values() if sequence.blocks]

    def _seated(self, sequence: Sequence) -> bool:
        """Whether there is a place for one more to run beside those that have something to compute."""
        if _slots(self._sequences.values()) <= self._config.max_num_seqs:
            return True
        working = [s for s in self.running() if s.held or s.todo(self._idle)]
        missing = _slots(working) + len(sequence.choices) - self._config.max_num_seqs
        below = [s for s in self._below(sequence) if s.held or s.todo(self._idle)]
        if _slots(below) < missing:
            return False  # nothing is evicted in vain: it would come back, and be evicted again
        while missing > 0:
            missing -= len(below[-1].choices)
            self.preempt(below.pop())
        return True

    def _free_beside(self, found: list[int]) -> int:
        """Blocks that could be allocated once the cached blocks `found` are taken."""
        return self._tables.pool.free - sum(self._tables.pool.is_free(block) for block in found)

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence needs beside those that the prefix index has."""
        return self._tables.blocks_for(len(sequence.tokens) + 1) - len(self._tables.match(sequence))

    def _below(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that must give way to this one and are not part of the step yet, the last of them
        first: those that rank lower. A prompt that holds a transfer reservation waits for none that holds
        none, whatever their ranks, nor for those that wait for theirs: or both workers might wait for each
        other's blocks for ever."""
        place, first = self._ranked.index(sequence), _holds_reservation(sequence)
        lower = [s for s in self._ranked[:place] if first and not _holds_reservation(s)]
        lower += [s for s in self._ranked[place + 1 :] if first or not _holds_reservation(s)]
        lower = [s for s in lower if not s.held]  # blocks that were reserved in this very step are promised
        if sequence.granted:
            lower += [s for s in self._sequences.values() if s.held and s.handoff and not s.granted]
        return [s for s in lower if s.blocks and s.id not in self._going and s.id not in self._swap.moved]

    def _evict_for(self, sequence: Sequence, rows: int) -> bool:
        """Evict lower ones until the next `rows` tokens of a sequence fit, when the step is over at the
        latest; false if they never will."""
        while (short := self._tables.shortage(sequence, rows) - self._swap.leaving) > 0:
            if not self._evict_below(sequence, short):
                return False
        return True

    def _evict_below(self, sequence: Sequence, short: int) -> bool:
        """Evict one that ranks lower, if there is any, where `short` blocks are missing."""
        below = self._below(sequence)
        if below:
            resting = [s for s in below if s.open and not s.todo(self._idle)]
            self.preempt(_best_fit(resting, short) if resting else below[-1])
        return bool(below)


def _holds_reservation(sequence: Sequence) -> bool:
    """Whether another worker holds blocks for it and waits for its KV, as for every prompt handed over. For
    an answer that returns nobody waits: it may be given up."""
    return sequence.granted and not sequence.returned


def _slots(sequences: Iterable[Sequence]) -> int:
    """Batch slots that these sequences take: one for each choice."""
    return sum(len(sequence.choices) for sequence in sequences)


def _best_fit(resting: list[Sequence], short: int) -> Sequence:
    """The smallest that gives up so many blocks, or else the largest: what is copied out takes its time."""
    enough = [sequence for sequence in resting if len(sequence.blocks) >= short]
    return (min if enough else max)(enough or resting, key=lambda sequence: len(sequence.blocks))
