"""Batch composition: rank the sequences, allocate KV blocks for them, then fix trees and chunks by the
budget.

There are no prefill and decode phases. Each sequence knows its tokens and how many of them have KV. A step
computes a span of query tokens for some sequences: a prompt chunk, the next token, or a token tree. The batch
candidates (engine/batch.py) are ranked without allocating. `plan` lets kv_allocator.py allocate blocks in
service order: by default first for decoding sequences (one token is pending), then for the rest. `select`
decides which of the allocated slots are used, and frees the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from streamserve.contracts.cost import CostModel
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import TARGET, SequenceState, Span, StepPlan
from streamserve.contracts.tree import TokenTree, root
from streamserve.engine.batch import BatchCandidates
from streamserve.engine.block_tables import BlockTables
from streamserve.engine.kv_allocator import KVAllocator
from streamserve.engine.reservations import is_admitted_first, waits_for_prefix
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import SequenceStatus, TransferRole
from streamserve.engine.swap import SwapSpace, truncate
from streamserve.scheduling.budget import divide
from streamserve.scheduling.prefill import PrefillChunk

MAX_PROMPT_TAIL = 64
"""Maximum number of uncomputed prompt tokens after which draft tokens may follow in the same step. The draft
model has to read these tokens while the client waits for the first token."""


class Proposal(msgspec.Struct, frozen=True):
    """A sequence that is to be part of a step. Slots are allocated for its next `slots` tokens; at least
    `due` of them are computed. Up to `nodes` draft tokens may follow, if there is headroom. `cached` is set
    if the sequence has just been admitted: the number of its tokens found in the prefix index."""

    sequence: EngineSequence
    slots: int
    due: int
    nodes: int
    cached: int | None


@dataclass
class _Step:
    """A step being composed from `candidates`.

    * `decoding`: ids of the sequences that decode.
    * `budget`: query tokens left.
    * `free_slots`: sequence slots left, one for each output choice.
    * `prefix_waits_left`: number of sequences that may still be passed over because another sequence computes
      their next block.
    * `admission_open`: whether waiting sequences may still start. False once a sequence has to wait that must
      not be overtaken, or no prefix waits are left.
    * `pending_hashes`: hashes of the blocks that running sequences are about to compute, with the blocks of
      deferred sequences last.
    * `has_complete_prompt`: whether a complete prompt is part of the step.
    """

    candidates: BatchCandidates
    decoding: set[int]
    budget: int
    free_slots: int
    prefix_waits_left: int
    admission_open: bool = True
    pending_hashes: tuple[set[bytes], set[bytes]] = field(default_factory=lambda: (set(), set()))
    proposals: dict[int, Proposal] = field(default_factory=dict)
    has_complete_prompt: bool = False


class Scheduler:
    """Composes the steps of one engine. Owns its live sequences and, through `tables`, their blocks."""

    def __init__(self, config: EngineConfig, groups: int, drafting: bool, costs: CostModel) -> None:
        self.config = config
        self.drafting = drafting
        self.tables = BlockTables(
            config.num_blocks, config.block_size, groups, prefix_caching=config.enable_prefix_caching
        )
        self.swap = SwapSpace(self.tables, config.swap_blocks)
        self.sequences: dict[int, EngineSequence] = {}
        self.allocator = KVAllocator(config, costs, self.tables, self.swap, self.sequences)
        self.released: list[int] = []
        self.reserved: list[EngineSequence] = []
        self._last_id = 0
        self.steps = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether a step could run a sequence, or let the executor forget one. A prompt stream with nothing
        left to compute does not count."""
        sequences = self.sequences.values()
        return bool(self.released) or any(s.status.schedulable and s.todo(idle=True) for s in sequences)

    def of(self, request: str) -> list[EngineSequence]:
        return [sequence for sequence in self.sequences.values() if sequence.request == request]

    def add(self, sequence: EngineSequence) -> None:
        """Add a sequence, and look up its cached prefix."""
        self.sequences[sequence.id] = sequence
        self.tables.match(sequence)  # sets kv.cached: policies rank the sequence by its uncached tokens

    def attach_copy(self, sequence: EngineSequence) -> bool:
        """Give a cache copy, which is only sent, the cached blocks of all its tokens. Returns False, with
        nothing attached, if a block is missing."""
        cached = self.tables.match(sequence)
        if len(cached) * self.config.block_size < len(sequence.tokens):
            return False
        self.tables.attach(sequence, cached)
        sequence.become(SequenceStatus.RUNNING)
        sequence.become(SequenceStatus.SENDING)
        return True

    def new_id(self) -> int:
        """Return an id that no sequence has had before."""
        self._last_id += 1
        return self._last_id

    def fork(self, sequence: EngineSequence) -> list[EngineSequence]:
        """Fork a sequence at the end of its prompt into one sequence for each choice; returns them. They
        share all its blocks."""
        first, *others = sequence.choices
        sequence.choices = (first,)
        branches = [sequence.branch(self.new_id(), choice) for choice in others]
        for branch in branches:
            self.tables.fork(sequence, branch)
            branch.become(SequenceStatus.RUNNING)
            self.add(branch)
        return [sequence, *branches]

    def remove(self, sequence: EngineSequence) -> None:
        """Forget a sequence, and free its blocks and host blocks."""
        self.allocator.forget(sequence)
        del self.sequences[sequence.id]
        if sequence.state_sent:
            self.released.append(sequence.id)

    def plan(self, candidates: BatchCandidates) -> list[Proposal]:
        """Allocate blocks for the batch candidates in service order, and return the proposals. A proposed
        sequence holds its blocks until the step is committed."""
        step = self._begin(candidates)
        for sequence in candidates.service_order:
            if not step.budget:
                break
            if (chunk := self._chunk(sequence, step)) is not None:
                self._serve(sequence, chunk, step)
        if not step.proposals:
            self._serve_highest(step)
        return list(step.proposals.values())

    def _serve(self, sequence: EngineSequence, chunk: PrefillChunk, step: "_Step") -> None:
        """Make a sequence part of the step, with up to the tokens of its `chunk`, if it gets memory."""
        waiting, cached = sequence.status is not SequenceStatus.RUNNING, sequence.cached_at_start
        sequence.passed_over = waiting
        if waiting:
            cached = self._start(sequence, step)
            if cached is None:
                return
        todo = sequence.todo(step.candidates.idle)
        tokens = self.allocator.grow(sequence, min(todo, step.budget, chunk.tokens))
        if tokens:
            self._propose(sequence, tokens, chunk, cached, step)
        elif not waiting:
            sequence.passed_over = True
        elif todo:
            # It got no block: give the cached ones back, and let no later sequence take the memory that it
            # waits for.
            self.tables.drop(sequence)
            step.admission_open = False
        else:  # all of it was cached: it holds the blocks, and computes the next part of its stream
            self._run(sequence, cached)

    def _serve_highest(self, step: "_Step") -> None:
        """Make the highest-ranked sequence that gets memory part of a step that has none.

        The order gave all query tokens to sequences that got no memory: it serves prompt streams by edit
        stability, and memory goes by rank. The highest-ranked sequence may evict all others."""
        for sequence in step.candidates.ranked:
            if step.proposals:
                return
            if sequence.status.schedulable and sequence.transfer.role is not TransferRole.RECEIVER:
                chunk = self._chunk(sequence, step, PrefillChunk(self.config.max_chunk, 1))
                if chunk is not None:
                    self._serve(sequence, chunk, step)

    def _begin(self, candidates: BatchCandidates) -> "_Step":
        self.steps += 1
        decoding = {s.id for s in candidates.service_order if s.decoding}
        step = _Step(
            candidates, decoding, candidates.budget, self.config.max_num_seqs, self.config.max_num_seqs
        )
        self.allocator.begin(candidates.ranked, step.proposals, candidates.idle)
        if self.config.preempt_every and self.steps % self.config.preempt_every == 0:
            self.allocator.preempt_lowest()
        # A decoding sequence waits for no prefix, so steps that only decode need no hashes.
        if len(decoding) < len(candidates.service_order):
            for other in candidates.service_order:
                if other.status is SequenceStatus.RUNNING:
                    step.pending_hashes[candidates.deferred(other)].update(self.tables.pending_hashes(other))
        return step

    def _chunk(
        self, sequence: EngineSequence, step: "_Step", chunk: PrefillChunk | None = None
    ) -> PrefillChunk | None:
        """Return how many tokens of a sequence may be part of the step, without regard to memory: by default
        its `chunk` among the batch candidates. None if it is not computed in this step."""
        candidates = step.candidates
        if not sequence.todo(candidates.idle) or sequence.id in self.swap.moving:
            return None
        with_prompt = candidates.exclusive and not step.decoding.issuperset(step.proposals)
        if sequence.id in step.decoding and (sequence.status is not SequenceStatus.RUNNING or with_prompt):
            return None  # evicted in this step for a higher rank, or the order decodes nothing with prompts
        if step.has_complete_prompt and candidates.deferred(sequence):
            return None  # deferred: no client waits for its output yet
        chunk = chunk or candidates.chunks.get(sequence.id) or PrefillChunk(self.config.max_chunk, 1)
        return chunk if chunk.tokens and step.free_slots >= len(sequence.choices) else None

    def _start(self, sequence: EngineSequence, step: "_Step") -> int | None:
        """Admit a waiting sequence. Returns the number of its cached tokens; None if it computes nothing in
        this step."""
        if not (step.admission_open or is_admitted_first(sequence)):
            return None
        deferred = step.candidates.deferred(sequence)
        if self._next_block_is_pending(sequence, step):
            step.prefix_waits_left -= 1
            step.admission_open = step.prefix_waits_left > 0
            return None
        if sequence.status is SequenceStatus.SWAPPED:
            # A sequence that must yield leaves admission open, so that the sequences it yields to can start.
            # It yields even if its KV is cached: the free blocks that it must leave may hold that KV.
            if self.allocator.must_yield(sequence):
                return None
            if not self.allocator.drop_if_cached(sequence):
                # A sequence that is admitted first is swapped in even if admission is closed.
                step.admission_open = self.allocator.swap_in(sequence) and step.admission_open
                return None
        cached = self.allocator.admit(sequence)
        if cached is None:
            step.admission_open = step.admission_open and deferred
        elif sequence.transfer.role is not TransferRole.RECEIVER:
            step.pending_hashes[deferred].update(self.tables.pending_hashes(sequence))
            return cached
        elif self.allocator.reserve(sequence):
            self.reserved.append(sequence)
        else:
            step.admission_open = False
        return None

    def _next_block_is_pending(self, sequence: EngineSequence, step: "_Step") -> bool:
        """Whether a sequence waits because another sequence computes its next block, which will soon be a
        prefix hit. Sequences that are not deferred do not wait for deferred ones."""
        if not waits_for_prefix(sequence):
            return False
        head, deferred = self.tables.next_hash(sequence), step.candidates.deferred(sequence)
        return any(head in hashes for hashes in step.pending_hashes[: 1 + deferred])

    def _propose(
        self, sequence: EngineSequence, tokens: int, chunk: PrefillChunk, cached: int | None, step: "_Step"
    ) -> None:
        """Add a sequence to the step, with `tokens` query tokens."""
        step.has_complete_prompt = step.has_complete_prompt or not (
            sequence.stream.open or sequence.id in step.decoding
        )
        step.budget -= tokens
        step.free_slots -= len(sequence.choices)
        sequence.cached_at_start = None
        nodes = self._nodes(sequence, tokens) if self.drafting else 0
        step.proposals[sequence.id] = Proposal(sequence, tokens, min(tokens, chunk.due), nodes, cached)
        if sequence.passed_over:
            self._run(sequence)
        if cached is not None and not sequence.lookup_counted:
            sequence.lookup_counted = True
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += cached

    def _run(self, sequence: EngineSequence, cached: int | None = None) -> None:
        """Start an admitted sequence. If its first step is a later one, `cached` is remembered for it."""
        sequence.passed_over, sequence.cached_at_start = False, cached
        sequence.become(SequenceStatus.RUNNING)

    def select(self, proposals: list[Proposal], trees: Mapping[int, TokenTree]) -> StepPlan:
        """Return the plan of the step: tree nodes and chunk sizes are fixed together by the budget, and
        allocated blocks that are not needed are freed."""
        slots = [proposal.slots for proposal in proposals]
        drafted = [trees.get(proposal.sequence.id) for proposal in proposals]
        due = [proposal.due for proposal in proposals]
        divided = divide(self.config.max_num_batched_tokens, slots, due, drafted)
        spans, admitted = [], []
        for proposal, (chunk, tree) in zip(proposals, divided, strict=True):
            sequence = proposal.sequence
            self.tables.trim(sequence, chunk + (len(tree) - 1 if tree else 0))
            if not chunk:
                # The budget left no token for it, and `trim` has freed the blocks of this step.
                if not sequence.kv.blocks:
                    sequence.become(SequenceStatus.WAITING)
                continue
            # A prompt stream is not sampled before it is answered: its state is sent then.
            if (sequence.state_stale or not sequence.state_sent) and (
                sequence.submitted.answer_early or not sequence.stream.open
            ):
                admitted.append(_state(sequence))
                sequence.state_sent, sequence.state_stale = True, False
            spans.append(_span(sequence, chunk, tree))
        released, self.released = self.released, []
        copies_out, copies_in = self.swap.pop_copies()
        return StepPlan(
            self.steps, admitted, released, self.tables.take_copies(), spans, copies_out, copies_in
        )

    def take_reserved(self) -> list[EngineSequence]:
        """Return the sequences that got blocks for another worker's KV since the last call."""
        reserved, self.reserved = self.reserved, []
        return reserved

    def truncate(self, sequence: EngineSequence, retained: int) -> int:
        """Drop the KV after a sequence's first `retained` tokens; returns the number of dropped tokens."""
        return truncate(self.tables, self.swap, sequence, retained)

    def allocate_draft_slots(self, proposal: Proposal, nodes: int) -> int:
        """Allocate slots for up to `nodes` draft tokens after the proposed tokens, without evicting; returns
        the number of draft tokens that have slots."""
        nodes = min(nodes, self.tables.free_slots(proposal.sequence) - proposal.slots)
        self.tables.grow(proposal.sequence, proposal.slots + nodes)
        return nodes

    def _nodes(self, sequence: EngineSequence, tokens: int) -> int:
        """Return the maximum number of draft tokens after `tokens` query tokens: 0 unless these include the
        last token, and fewer than the sequence may still output."""
        pending = sequence.pending
        if (
            tokens < pending
            or pending > (1 if sequence.stream.open else MAX_PROMPT_TAIL)
            or len(sequence.choices) > 1
        ):
            return 0
        if not sequence.params.speculation.enabled or sequence.transfer.role.sends:
            return 0  # a prefill worker samples one token of each choice
        max_nodes = min(self.config.draft_nodes, sequence.params.speculation.max_nodes)
        return max(0, min(max_nodes, sequence.outputs_left(self.config.max_model_len) - 1))


def _state(sequence: EngineSequence) -> SequenceState:
    return SequenceState(
        sequence.id,
        sequence.choices[0],
        sequence.params,
        sequence.tokens[: sequence.prompt_length],
        sequence.tokens[sequence.prompt_length :],
    )


def _span(sequence: EngineSequence, chunk: int, tree: TokenTree | None) -> Span:
    start = sequence.kv.computed[TARGET]
    tokens = sequence.tokens[start : start + chunk]
    if chunk == sequence.pending:
        tree = tree or root(tokens[-1])
    return Span(
        sequence.id,
        start,
        tokens,
        list(sequence.kv.blocks),
        tree=tree,
        choices=sequence.choices if tree else (),
        prompt_logprobs=None if sequence.prompt_logprobs_done else sequence.params.prompt_logprobs,
        adapter=sequence.submitted.adapter,
    )
