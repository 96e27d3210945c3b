"""KV allocation for a step: from free blocks, or from blocks of lower-ranked sequences, which are evicted.

    Scheduler.plan ──▶ admit, reserve, swap_in, grow      for one sequence, in service order
                        └──▶ preempt the lowest below it    its KV goes to the host pool, or is dropped

scheduling/ordering.py ranks the sequences; scheduling/eviction.py decides whether evicted KV is swapped or
recomputed.
"""

from collections.abc import Container, Iterable, Mapping

from streamserve.contracts.cost import CostModel
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import TARGET, StepPlan
from streamserve.engine.block_tables import BlockTables
from streamserve.engine.reservations import evictable, outranks, status_when_dropped
from streamserve.engine.sequence import EngineSequence, MemoryClaim
from streamserve.engine.status import SequenceStatus
from streamserve.engine.swap import SwapSpace
from streamserve.protocol.reports import EvictionReport
from streamserve.scheduling.eviction import decide


class KVAllocator:
    """Allocates the blocks of `tables` and `swap` to the `sequences` of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        costs: CostModel,
        tables: BlockTables,
        swap: SwapSpace,
        sequences: Mapping[int, EngineSequence],
    ) -> None:
        self.evictions = EvictionReport()
        self.preemptions = 0
        self._config = config
        self._costs = costs
        self._tables = tables
        self._swap = swap
        self._sequences = sequences
        self._recomputing: dict[int, int] = {}
        self._ranked: list[EngineSequence] = []
        self._proposed: Container[int] = ()
        self._idle = False

    def begin(self, ranked: list[EngineSequence], proposed: Container[int], idle: bool) -> None:
        """Begin a step. `ranked` has the sequences, highest rank first. The caller adds the ids of sequences
        that become part of the step to `proposed`. In an `idle` step the tails of prompt streams count as
        work."""
        self._ranked, self._proposed, self._idle = ranked, proposed, idle

    def admit(self, sequence: EngineSequence) -> int | None:
        """Admit a waiting sequence if all its tokens fit into free blocks and the blocks of sequences that
        may be evicted for it. Returns the number of its cached tokens; None if it must wait."""
        cached = self._tables.match(sequence)
        enough = self._missing(sequence, cached) <= self._free_and_below(sequence, cached)
        # Check memory before claiming slots: a sequence evicted for a slot in vain would start again, for
        # ever.
        if (self.running() and not enough) or not self._claim_slots(sequence):
            return None
        self._tables.attach(sequence, cached)
        return len(cached) * self._config.block_size

    def reserve(self, sequence: EngineSequence) -> bool:
        """Allocate blocks for all tokens of an admitted sequence and for its next one, before another worker
        sends the KV. Returns False, with nothing allocated, if there are not enough."""
        tokens = sequence.pending + 1
        if self._evict_for(sequence, tokens) and not self._tables.shortage(sequence, tokens):
            self._tables.grow(sequence, tokens)
            sequence.become(SequenceStatus.AWAITING_KV)
            return True
        self._tables.drop(sequence)
        return False

    def grow(self, sequence: EngineSequence, tokens: int) -> int:
        """Allocate slots for up to `tokens` next tokens; returns the number of tokens that have slots."""
        if self._tables.writable(sequence, tokens):
            return tokens
        self._evict_for(sequence, tokens)
        tokens = min(tokens, self._tables.free_slots(sequence))
        if tokens:
            self._tables.grow(sequence, tokens)
        return tokens

    def swap_in(self, sequence: EngineSequence) -> bool:
        """Swap a sequence in if there are enough blocks now; returns whether it was swapped in. It can be
        computed from the next step on."""
        cached = self._tables.match(sequence)
        blocks_needed = self._blocks_to_resume(sequence, cached)
        if blocks_needed > self._free_and_below(sequence, cached) or not self._claim_slots(sequence):
            return False
        while (missing := blocks_needed - self._free_after(cached) - self._swap.pending_free) > 0:
            if not self._evict_one(sequence, missing):
                return False
        # Blocks of an evicted sequence may become free only after their copies: try again in the next step.
        if blocks_needed > self._free_after(cached):
            return False
        self.evictions.blocks_back += self._swap.back(sequence, cached)
        return True

    def must_yield(self, sequence: EngineSequence) -> bool:
        """Whether a swapped sequence must leave the free blocks to waiting sequences that outrank it.

        These would evict it for the blocks. As the service order may change from step to step, the sequence
        could be swapped out and in without end.
        """
        cached = self._tables.match(sequence)
        left = self._free_after(cached) + self._swap.pending_free - self._blocks_to_resume(sequence, cached)
        above = True
        for other in self._ranked:
            if other is sequence:
                above = False
            elif (
                other.passed_over
                and not other.kv.blocks
                and other.todo(self._idle)
                and outranks(other, sequence, above)
            ):
                shared = self._tables.match(other)
                # Free blocks that it finds by prefix count, too: attaching takes them from the free list.
                left -= self._missing(other, shared) + sum(map(self._tables.pool.is_free, shared))
                if left < 0:
                    return True
        return False

    def drop_if_cached(self, sequence: EngineSequence) -> bool:
        """Free a swapped sequence's host blocks if the prefix index has all the KV that they hold; returns
        whether they were freed."""
        known = len(self._tables.match(sequence)) * self._config.block_size
        if known >= sequence.kv.computed[TARGET]:
            self._swap.forget(sequence)
            sequence.kv.computed = [0] * self._tables.groups
            sequence.become(SequenceStatus.WAITING)
            return True
        return False

    def preempt(self, sequence: EngineSequence) -> None:
        """Free a sequence's blocks. The policy decides whether its KV is swapped to the host pool or
        recomputed; KV that stays in the prefix index is not recomputed. A SENDING sequence is always
        recomputed, because no step would swap it in."""
        sequence.preempted_at = sequence.outputs
        stream = sequence.stream
        if stream.open and not sequence.submitted.answer_early and not sequence.todo(idle=False):
            # Two such streams that do not both fit would otherwise evict each other for ever (MemoryClaim).
            stream.claim = MemoryClaim.NONE
        self.preemptions += 1
        tokens, sending = sequence.kv.computed[TARGET], sequence.status is SequenceStatus.SENDING
        survival = sequence.stream.survival if sequence.stream.open else 1.0
        decision = decide(
            "recompute" if sending else self._config.eviction, self._costs,
            self._config.max_chunk, max(sequence.kv.computed), self._config.block_size,
            survival, self._swap.free,
        )  # fmt: skip
        if decision.swap:
            self.evictions.swap_predicted += decision.swap_seconds
            self.evictions.swaps += 1
            self.evictions.blocks_out += self._swap.out(sequence)
            return
        self.evictions.recompute_predicted += decision.recompute_seconds
        self.evictions.recomputes += 1
        self._recomputing[sequence.id] = tokens
        self._tables.drop(sequence)
        sequence.become(status_when_dropped(sequence))
        # Whatever a drafter derived from earlier requests is void (DraftRequest).
        sequence.epoch += 1

    def review_claims(self) -> None:
        """Give prompt streams that were evicted while idle a claim to free blocks, in order of arrival, if
        there are enough for all of a stream's tokens (MemoryClaim)."""
        free = self._tables.pool.free
        for sequence in self._sequences.values():
            if sequence.stream.claim is MemoryClaim.ANY:
                continue
            missing = self._missing(sequence, sequence.kv.blocks)
            if sequence.status is SequenceStatus.SWAPPED:
                missing = max(missing, self._blocks_to_resume(sequence, []))
            fits = missing <= free
            free -= missing if fits else 0
            sequence.stream.claim = MemoryClaim.FREE if fits else MemoryClaim.NONE

    def preempt_lowest(self) -> None:
        """Preempt the lowest-ranked running sequence that got a token since its last preemption. (Without
        that condition a sequence might never finish.)"""
        moving = [s for s in self._ranked if s.kv.blocks and s.outputs > s.preempted_at]
        if moving:
            self.preempt(moving[-1])

    def stepped(self, plan: StepPlan, seconds: float, swap_seconds: float) -> None:
        """Complete the swap copies of an executed plan, and count what its evictions cost. The step took
        `seconds`, its swap copies `swap_seconds`."""
        self._swap.complete()
        self.evictions.swap_seconds += swap_seconds
        if not self._recomputing:
            return
        tokens = sum(span.query_tokens for span in plan.spans)
        for span in plan.spans:
            again = self._recomputing.get(span.sequence, 0) - span.start
            if again > 0:  # tokens whose KV an eviction dropped: they get their share of the step's seconds
                self.evictions.recompute_seconds += seconds * min(len(span.tokens), again) / tokens
            if again <= len(span.tokens):
                self._recomputing.pop(span.sequence, None)

    def forget(self, sequence: EngineSequence) -> None:
        """Free all blocks and host blocks of a sequence."""
        self._tables.drop(sequence)
        self._swap.forget(sequence)
        self._recomputing.pop(sequence.id, None)

    def running(self) -> list[EngineSequence]:
        """Return the sequences that hold blocks."""
        return [sequence for sequence in self._sequences.values() if sequence.kv.blocks]

    def _claim_slots(self, sequence: EngineSequence) -> bool:
        """Make sequence slots available for `sequence`; return whether there are enough. Running sequences
        with nothing left to compute take no slots. If slots are missing, lower-ranked sequences are
        preempted, but only if that frees enough slots."""
        if _slots(self._sequences.values()) <= self._config.max_num_seqs:
            return True
        working = [s for s in self.running() if not s.status.schedulable or s.todo(self._idle)]
        missing = _slots(working) + len(sequence.choices) - self._config.max_num_seqs
        below = [s for s in self._evictable(sequence) if not s.status.schedulable or s.todo(self._idle)]
        if _slots(below) < missing:
            return False  # no eviction in vain: the victim would come back, and be evicted again
        while missing > 0:
            missing -= len(below[-1].choices)
            self.preempt(below.pop())
        return True

    def _free_after(self, cached: list[int]) -> int:
        """Return the number of free blocks that remain when the blocks `cached` have been taken."""
        return self._tables.pool.free - sum(self._tables.pool.is_free(block) for block in cached)

    def _free_and_below(self, sequence: EngineSequence, cached: list[int]) -> int:
        """Return the maximum number of blocks that a sequence could get in addition to the blocks `cached`:
        free blocks, and blocks of sequences that may be evicted for it."""
        below = sum(len(other.kv.blocks) for other in self._evictable(sequence))
        return self._free_after(cached) + self._swap.pending_free + below

    def _missing(self, sequence: EngineSequence, cached: list[int]) -> int:
        """Return the number of blocks that a waiting sequence needs in addition to the blocks `cached`, for
        its tokens and its next one. It is limited to the pool: a prompt that fills the pool can still be
        computed."""
        return min(self._tables.blocks_for(len(sequence.tokens) + 1), self._tables.pool.size) - len(cached)

    def _blocks_to_resume(self, sequence: EngineSequence, cached: list[int]) -> int:
        """Return the number of blocks that a swapped sequence needs in addition to the blocks `cached`: for
        its KV, and one for its next tokens, or it would soon be evicted again. A sequence that fills the
        whole pool has slots for them in its last block."""
        return min(self._swap.blocks_needed(sequence, cached) + 1, self._tables.pool.size - len(cached))

    def _evictable(self, sequence: EngineSequence) -> list[EngineSequence]:
        """Return the sequences with blocks that may be evicted for this one and are not part of the step yet.
        The last one is evicted first."""
        if sequence.stream.claim is not MemoryClaim.ANY:
            return []
        below = evictable(sequence, self._ranked, self._sequences.values())
        return [
            s for s in below if s.kv.blocks and s.id not in self._proposed and s.id not in self._swap.moving
        ]

    def _evict_for(self, sequence: EngineSequence, tokens: int) -> bool:
        """Evict lower-ranked sequences until the next `tokens` tokens of a sequence fit, counting blocks that
        become free at the end of the step; returns False if they cannot fit."""
        while (missing := self._tables.shortage(sequence, tokens) - self._swap.pending_free) > 0:
            if not self._evict_one(sequence, missing):
                return False
        return True

    def _evict_one(self, sequence: EngineSequence, missing: int) -> bool:
        """Evict one lower-ranked sequence because `missing` blocks are missing; returns False if there is
        none. Idle prompt streams are evicted first."""
        below = self._evictable(sequence)
        if below:
            idle = [s for s in below if s.stream.open and not s.todo(self._idle)]
            self.preempt(_best_fit(idle, missing) if idle else below[-1])
        return bool(below)


def _slots(sequences: Iterable[EngineSequence]) -> int:
    """Return the number of sequence slots that these sequences take: one for each choice."""
    return sum(len(sequence.choices) for sequence in sequences)


def _best_fit(idle: list[EngineSequence], missing: int) -> EngineSequence:
    """Return the smallest sequence with at least `missing` blocks, so that few are copied out; if all are
    smaller, the largest one."""
    enough = [sequence for sequence in idle if len(sequence.kv.blocks) >= missing]
    return (min if enough else max)(enough or idle, key=lambda sequence: len(sequence.kv.blocks))
