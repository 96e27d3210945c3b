"""What goes into a step: rank the sequences, make room for them, then fix trees and chunks by the budget.

There are no phases. Each sequence knows its tokens and how many have KV; a step gives some of them a span of
query tokens: a prompt chunk, the next token, or a tree. The agenda ranks without allocating; `plan` makes
room in its turns, by default first for those one token behind (they are decoding), then for the rest,
evicting the lowest-ranked sequences where memory is short. `select` decides what of that room is used, and
gives the surplus back.
"""

from collections.abc import Mapping

import msgspec

from streamserve.engine.agenda import Agenda
from streamserve.engine.plan import TARGET, SequenceState, Span, StepPlan
from streamserve.engine.sequence import Sequence
from streamserve.engine.tables import BlockTables
from streamserve.policy.budget import divide
from streamserve.policy.prefill import Chunk
from streamserve.policy.tree import TokenTree, root
from streamserve.protocol.config import EngineConfig


class Proposal(msgspec.Struct, frozen=True):
    """Room was made for the next `room` tokens of a sequence, `due` of them whatever else might be in the
    step, and for `nodes` guessed ones behind them. `cached` is set when the sequence has just been admitted:
    tokens the prefix index gave it."""

    sequence: Sequence
    room: int
    due: int
    nodes: int
    cached: int | None


class Scheduler:
    """Owns the live sequences of one engine, and through `tables` their blocks."""

    def __init__(self, config: EngineConfig, planes: int, drafting: bool) -> None:
        self.config = config
        self.drafting = drafting
        self.tables = BlockTables(
            config.num_blocks, config.block_size, planes, prefix_caching=config.enable_prefix_caching
        )
        self.sequences: dict[int, Sequence] = {}
        self.released: list[int] = []
        self.reserved: list[Sequence] = []
        self.preemptions = 0
        self.steps = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: run a sequence, or let the executor forget one."""
        return bool(self.released) or any(not sequence.held for sequence in self.sequences.values())

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences.values() if sequence.running]

    def of(self, request: str) -> list[Sequence]:
        """The sequences of a request."""
        return [sequence for sequence in self.sequences.values() if sequence.request == request]

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free all it holds."""
        self.tables.drop(sequence)
        del self.sequences[sequence.id]
        if sequence.known:
            self.released.append(sequence.id)

    def plan(self, agenda: Agenda) -> list[Proposal]:
        """Make room, turn by turn. What is proposed holds its blocks until the step is committed."""
        self.steps += 1
        ranked, budget = agenda.ranked, agenda.budget
        if self.config.preempt_every and self.steps % self.config.preempt_every == 0:
            self._preempt_lowest(ranked)
        decoding = {s.id for s in ranked if s.running and s.pending == 1}
        places = self.config.max_num_seqs
        coming: set[bytes] = set()
        if len(decoding) < len(ranked):
            coming.update(*(self.tables.coming(s) for s in ranked if s.running))
        proposals: dict[int, Proposal] = {}
        for sequence in agenda.turns:
            if not budget:
                break
            if sequence.id in decoding and (not sequence.running or (agenda.exclusive and proposals)):
                continue  # evicted a moment ago for one that ranks higher, or not to decode beside a prompt
            wanted = agenda.chunks.get(sequence.id, Chunk(self.config.max_chunk, 1))
            if not wanted.tokens:
                continue
            cached = None
            if not sequence.running:
                if not places:
                    continue  # nobody overtakes the first that has to wait
                if not sequence.reserved and self.tables.next_hash(sequence) in coming:
                    places -= 1
                    continue  # another is computing what it needs next: it finds that soon
                cached = self._admit(sequence, ranked, proposals)
                if cached is None:
                    places = 0
                    continue
                if sequence.reserved:
                    places *= self._reserve(sequence, ranked, proposals)
                    continue
                coming |= self.tables.coming(sequence)
            proposal = self._make_room(sequence, budget, wanted, cached, ranked, proposals)
            if proposal:
                proposals[sequence.id] = proposal
                budget -= proposal.room
                if cached is not None:
                    self.prefix_queries += len(sequence.tokens)
                    self.prefix_hits += cached
            elif cached is not None:
                self.tables.drop(sequence)
                places = 0
        return list(proposals.values())

    def select(self, proposals: list[Proposal], trees: Mapping[int, TokenTree]) -> StepPlan:
        """Fix tree nodes and chunk sizes together by the budget, and give back the blocks not needed."""
        rooms = [proposal.room for proposal in proposals]
        guesses = [trees.get(proposal.sequence.id) for proposal in proposals]
        due = [proposal.due for proposal in proposals]
        divided = divide(self.config.max_num_batched_tokens, rooms, due, guesses)
        spans, admitted = [], []
        for proposal, (chunk, tree) in zip(proposals, divided, strict=True):
            sequence = proposal.sequence
            self.tables.trim(sequence, chunk + (len(tree) - 1 if tree else 0))
            if not chunk:
                continue
            if not sequence.known:
                admitted.append(_state(sequence))
                sequence.known = True
            spans.append(_span(sequence, chunk, tree))
        released, self.released = self.released, []
        return StepPlan(self.steps, admitted, released, self.tables.take_copies(), spans)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; its KV will be recomputed, as far as the prefix index forgot it."""
        self.tables.drop(sequence)
        sequence.epoch += 1
        sequence.told = 0
        sequence.preempted_at = sequence.outputs
        self.preemptions += 1

    def _admit(
        self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]
    ) -> int | None:
        """Let a waiting sequence hold blocks if all its tokens could fit: into free blocks, or into those of
        running sequences that rank lower. Returns how many tokens were cached, None if it must wait."""
        while sum(len(s.choices) for s in self.running()) + len(sequence.choices) > self.config.max_num_seqs:
            if not self._evict_below(sequence, ranked, proposals):
                return None
        found = self.tables.match(sequence)
        missing = self.tables.blocks_for(len(sequence.tokens) + 1) - len(found)
        free = self.tables.pool.free - sum(self.tables.pool.is_free(block) for block in found)
        below = sum(len(s.blocks) for s in self._below(sequence, ranked, proposals))
        if self.running() and missing > free + below:
            return None
        self.tables.attach(sequence, found)
        return len(found) * self.config.block_size

    def take_reserved(self) -> list[Sequence]:
        """The sequences that have got their blocks for another worker's KV since the last call."""
        reserved, self.reserved = self.reserved, []
        return reserved

    def _reserve(self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]) -> bool:
        """Blocks for all of an admitted sequence's tokens and the next; false if there are not enough."""
        rows = sequence.pending + 1
        while self.tables.shortage(sequence, rows):
            if not self._evict_below(sequence, ranked, proposals):
                self.tables.drop(sequence)
                return False
        self.tables.grow(sequence, rows)
        sequence.held = True
        self.reserved.append(sequence)
        return True

    def _make_room(
        self,
        sequence: Sequence,
        budget: int,
        chunk: Chunk,
        cached: int | None,
        ranked: list[Sequence],
        proposals: Mapping[int, Proposal],
    ) -> Proposal | None:
        """Blocks for the sequence's next tokens: as many as budget and memory allow, evicting lower ranks."""
        wanted = min(sequence.pending, budget, chunk.tokens)
        due = min(wanted, chunk.due)
        if not self.drafting and self.tables.writable(sequence, wanted):
            return Proposal(sequence, wanted, due, 0, cached)
        while self.tables.shortage(sequence, wanted):
            if not self._evict_below(sequence, ranked, proposals):
                break
        room = min(wanted, self.tables.room(sequence))
        if room <= 0:
            return None
        nodes = self._nodes(sequence, room)
        self.tables.grow(sequence, room + nodes)
        return Proposal(sequence, room, min(room, due), nodes, cached)

    def _nodes(self, sequence: Sequence, room: int) -> int:
        """Room for guesses behind the last token: only where memory is free, and output is still wanted."""
        if not self.drafting or sequence.pending > 1 or len(sequence.choices) > 1:
            return 0
        if not sequence.params.speculation.enabled:
            return 0
        limit = sequence.params.max_tokens
        wanted = self.config.max_model_len - len(sequence.tokens) - 1
        if limit is not None:
            wanted = min(wanted, limit - sequence.outputs - 1)
        most = min(self.config.draft_nodes, sequence.params.speculation.max_nodes)
        return max(0, min(most, wanted, self.tables.room(sequence) - room))

    def _below(
        self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]
    ) -> list[Sequence]:
        """Running sequences that rank below this one and are not part of the step yet."""
        lower = ranked[ranked.index(sequence) + 1 :]
        return [s for s in lower if s.running and s.id not in proposals]

    def _evict_below(
        self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]
    ) -> bool:
        below = self._below(sequence, ranked, proposals)
        if below:
            self.preempt(below[-1])
        return bool(below)

    def _preempt_lowest(self, ranked: list[Sequence]) -> None:
        """Only one that got a token since its last preemption, so that all end some day."""
        moved = [s for s in ranked if s.running and s.outputs > s.preempted_at]
        if moved:
            self.preempt(moved[-1])


def _state(sequence: Sequence) -> SequenceState:
    return SequenceState(
        sequence.id,
        sequence.choices[0],
        sequence.params,
        sequence.tokens[: sequence.prompt_length],
        sequence.tokens[sequence.prompt_length :],
    )


def _span(sequence: Sequence, chunk: int, tree: TokenTree | None) -> Span:
    start = sequence.computed[TARGET]
    tokens = sequence.tokens[start : start + chunk]
    if chunk == sequence.pending:
        tree = tree or root(tokens[-1])
    return Span(
        sequence.id,
        start,
        tokens,
        list(sequence.blocks),
        tree=tree,
        choices=sequence.choices if tree else (),
        prompt_logprobs=None if sequence.prompt_logprobs_done else sequence.params.prompt_logprobs,
    )
