"""What goes into a step: rank the sequences, make room for them, then fix trees and chunks by the budget.

There are no phases. Each sequence knows its tokens and how many have KV; a step gives some of them a span of
query tokens: a prompt chunk, the next token, or a tree. The agenda ranks without allocating; `plan` makes
room in its turns, by default first for those one token behind (they are decoding), then for the rest,
evicting the lowest-ranked sequences where memory is short. `select` decides what of that room is used, and
gives the surplus back.

Order knows nothing of eviction, eviction nothing of order: who goes first is policy/order.py's to say, what
becomes of an evicted sequence's KV policy/eviction.py's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from streamserve.engine.agenda import Agenda
from streamserve.engine.plan import TARGET, SequenceState, Span, StepPlan
from streamserve.engine.sequence import Sequence
from streamserve.engine.swap import SwapSpace, cut
from streamserve.engine.tables import BlockTables
from streamserve.policy.budget import divide
from streamserve.policy.eviction import Costs, decide
from streamserve.policy.prefill import Chunk
from streamserve.policy.tree import TokenTree, root
from streamserve.protocol.config import EngineConfig

SHORT_END = 64
"""A prompt is guessed behind as soon as no more than so many of its tokens are left to compute: of a longer
rest the draft would have to read as much while the first token is waited for."""


class Proposal(msgspec.Struct, frozen=True):
    """Room was made for the next `room` tokens of a sequence, `due` of them whatever else might be in the
    step; behind them there may be `nodes` guessed ones, as far as there is room. `cached` is set when the
    sequence has just been admitted: tokens the prefix index gave it."""

    sequence: Sequence
    room: int
    due: int
    nodes: int
    cached: int | None


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


class Scheduler:
    """Owns the live sequences of one engine, and through `tables` their blocks."""

    def __init__(self, config: EngineConfig, planes: int, drafting: bool, costs: Costs) -> None:
        self.config = config
        self.costs = costs
        self.drafting = drafting
        self.tables = BlockTables(
            config.num_blocks, config.block_size, planes, prefix_caching=config.enable_prefix_caching
        )
        self.swap = SwapSpace(self.tables, config.swap_blocks)
        self.evictions = EvictionCounters()
        self.sequences: dict[int, Sequence] = {}
        self.released: list[int] = []
        self._last_id = 0
        self._again: dict[int, int] = {}
        self._idle = False
        self.reserved: list[Sequence] = []
        self.preemptions = 0
        self.steps = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything: run a sequence, or let the executor forget one. Open prompts
        that are computed as far as they are known are no work."""
        sequences = self.sequences.values()
        return bool(self.released) or any(not s.held and s.todo(idle=True) for s in sequences)

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences.values() if sequence.blocks]

    def of(self, request: str) -> list[Sequence]:
        """The sequences of a request."""
        return [sequence for sequence in self.sequences.values() if sequence.request == request]

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        self.tables.match(sequence)  # who has little to compute need not wait for others to find that out

    def new_id(self) -> int:
        """A number that no sequence has had."""
        self._last_id += 1
        return self._last_id

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """At the end of its prompt a fresh sequence becomes one for each choice, sharing all its blocks."""
        first, *others = sequence.choices
        sequence.choices = (first,)
        branches = [sequence.branch(self.new_id(), choice) for choice in others]
        for branch in branches:
            self.tables.fork(sequence, branch)
            self.add(branch)
        return [sequence, *branches]

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free all it holds."""
        self.tables.drop(sequence)
        self.swap.forget(sequence)
        self._again.pop(sequence.id, None)
        del self.sequences[sequence.id]
        if sequence.known:
            self.released.append(sequence.id)

    def plan(self, agenda: Agenda) -> list[Proposal]:
        """Make room, turn by turn. What is proposed holds its blocks until the step is committed."""
        self.steps += 1
        ranked, budget = agenda.ranked, agenda.budget
        if self.config.preempt_every and self.steps % self.config.preempt_every == 0:
            self._preempt_lowest(ranked)
        self._idle = agenda.idle
        decoding = {s.id for s in agenda.turns if s.decoding}
        places = seats = self.config.max_num_seqs
        coming: tuple[set[bytes], set[bytes]] = set(), set()  # of complete prompts, of arriving ones
        if len(decoding) < len(agenda.turns):
            for one in agenda.turns:
                if one.running:
                    coming[agenda.later(one)].update(self.tables.coming(one))
        proposals: dict[int, Proposal] = {}
        busy, whole = False, Chunk(self.config.max_chunk, 1)  # busy: with complete prompts
        for sequence in agenda.turns:
            if not budget:
                break
            if not self._wanted(sequence) or sequence.id in self.swap.moved:
                continue
            beside_prompt = agenda.exclusive and not decoding.issuperset(proposals)
            if sequence.id in decoding and (not sequence.running or beside_prompt):
                continue  # evicted a moment ago for one that ranks higher, or not to decode beside a prompt
            wanted = agenda.chunks.get(sequence.id, whole)
            if not wanted.tokens or seats < len(sequence.choices):
                continue
            if busy and agenda.later(sequence):
                continue  # nobody waits for it yet
            cached = None
            sequence.waits = not sequence.running
            if not sequence.running:
                if not places:
                    continue  # nobody overtakes the first that has to wait
                head = None if sequence.reserved else self.tables.next_hash(sequence)
                if any(head in some for some in coming[: 1 + agenda.later(sequence)]):
                    places -= 1
                    continue  # another is computing what it needs next: it finds that soon
                if sequence.swapped and not self._known_by_now(sequence):
                    places = places if self._swap_in(sequence, ranked, proposals) else 0
                    continue
                cached = self._admit(sequence, ranked, proposals)
                if cached is None:
                    places *= agenda.later(sequence)
                    continue
                if sequence.reserved:
                    places *= self._reserve(sequence, ranked, proposals)
                    continue
                coming[agenda.later(sequence)].update(self.tables.coming(sequence))
            proposal = self._make_room(sequence, budget, wanted, cached, ranked, proposals)
            if proposal:
                busy = busy or not (sequence.open or sequence.id in decoding)
                sequence.waits = False
                proposals[sequence.id] = proposal
                budget -= proposal.room
                seats -= len(sequence.choices)
                if cached is not None and not sequence.returned:
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
            if (sequence.stale or not sequence.known) and (sequence.early or not sequence.open):
                admitted.append(_state(sequence))
                sequence.known, sequence.stale = True, False
            spans.append(_span(sequence, chunk, tree))
        released, self.released = self.released, []
        outs, backs = self.swap.take()
        return StepPlan(self.steps, admitted, released, self.tables.take_copies(), spans, outs, backs)

    def stepped(self, plan: StepPlan, seconds: float, swap_seconds: float) -> None:
        """The plan has been carried out, in so many seconds in all, so many of which went to its swaps."""
        self.swap.settle()
        self.evictions.swap_seconds += swap_seconds
        rows = sum(span.rows for span in plan.spans)
        for span in plan.spans:
            again = self._again.get(span.sequence, 0) - span.start
            if again > 0:  # of what an eviction dropped
                self.evictions.recompute_seconds += seconds * min(len(span.tokens), again) / rows
            if again <= len(span.tokens):
                self._again.pop(span.sequence, None)

    def cut(self, sequence: Sequence, keep: int) -> int:
        """Drop the KV behind a sequence's first `keep` tokens; returns how many tokens of it there were."""
        return cut(self.tables, self.swap, sequence, keep)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks: its KV waits in the host pool, or will be recomputed as far as the
        prefix index forgets it, whichever the policy says. Nobody would bring back one that only waits for
        its ticket."""
        sequence.preempted_at = sequence.outputs
        self.preemptions += 1
        tokens = sequence.computed[TARGET]
        verdict = decide(
            "recompute" if sequence.held else self.config.eviction, self.costs, max(sequence.computed),
            self.config.block_size, sequence.survival if sequence.open else 1.0, self.swap.free,
        )  # fmt: skip
        if verdict.swap:
            self.evictions.swap_predicted += verdict.swap_seconds
            self.evictions.swaps += 1
            self.evictions.blocks_out += self.swap.out(sequence)
            return
        self.evictions.recompute_predicted += verdict.recompute_seconds
        self.evictions.recomputes += 1
        self._again[sequence.id] = tokens
        self.tables.drop(sequence)
        sequence.epoch += 1
        sequence.told = 0

    def _wanted(self, sequence: Sequence) -> int:
        return sequence.todo(self._idle)

    def _admit(
        self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]
    ) -> int | None:
        """Let a waiting sequence hold blocks if all its tokens could fit: into free blocks, or into those of
        running sequences that rank lower. Returns how many tokens were cached, None if it must wait."""
        if not self._seated(sequence, ranked, proposals):
            return None
        found = self.tables.match(sequence)
        missing = self.tables.blocks_for(len(sequence.tokens) + 1) - len(found)
        free = self._free_beside(found) + self.swap.leaving
        below = sum(len(s.blocks) for s in self._below(sequence, ranked, proposals))
        if self.running() and missing > free + below:
            return None
        self.tables.attach(sequence, found)
        return len(found) * self.config.block_size

    def _seated(self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]) -> bool:
        """Whether there is a place for one more to run beside those that have something to compute."""
        if sum(len(s.choices) for s in self.sequences.values()) <= self.config.max_num_seqs:
            return True
        while True:
            working = [s for s in self.running() if s.held or self._wanted(s)]
            if sum(len(s.choices) for s in working) + len(sequence.choices) <= self.config.max_num_seqs:
                return True
            below = [s for s in self._below(sequence, ranked, proposals) if s.held or self._wanted(s)]
            if not below:
                return False
            self.preempt(below[-1])

    def _free_beside(self, found: list[int]) -> int:
        """Blocks that could be allocated once the cached blocks `found` are taken."""
        return self.tables.pool.free - sum(self.tables.pool.is_free(block) for block in found)

    def _known_by_now(self, sequence: Sequence) -> bool:
        """Whether the prefix index finds as much as a swapped sequence has on the host, which is forgotten
        then."""
        known = len(self.tables.match(sequence)) * self.config.block_size
        if known >= sequence.computed[TARGET]:
            self.swap.forget(sequence)
            sequence.computed = [0] * self.tables.planes
        return not sequence.swapped

    def _swap_in(self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]) -> bool:
        """Let a swapped sequence come back, if there is room now; it goes on with the next step."""
        found = self.tables.match(sequence)
        if not self._seated(sequence, ranked, proposals):
            return False
        wanted = self.swap.wanted(sequence, found) + 1  # and one to go on with
        while (short := wanted - self._free_beside(found) - self.swap.leaving) > 0:
            if not self._evict_below(sequence, ranked, proposals, short):
                return False
        if wanted > self._free_beside(found):
            return False
        self.evictions.blocks_back += self.swap.back(sequence, found)
        return True

    def take_reserved(self) -> list[Sequence]:
        """The sequences that have got their blocks for another worker's KV since the last call."""
        reserved, self.reserved = self.reserved, []
        return reserved

    def _reserve(self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]) -> bool:
        """Blocks for all of an admitted sequence's tokens and the next; false if there are not enough."""
        rows = sequence.pending + 1
        while (short := self.tables.shortage(sequence, rows) - self.swap.leaving) > 0:
            if not self._evict_below(sequence, ranked, proposals, short):
                self.tables.drop(sequence)
                return False
        if self.tables.shortage(sequence, rows):
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
        rows = min(self._wanted(sequence), budget, chunk.tokens)
        if not self.tables.writable(sequence, rows):
            rows = self._find_room(sequence, rows, ranked, proposals)
        nodes = self._nodes(sequence, rows) if self.drafting else 0
        return Proposal(sequence, rows, min(rows, chunk.due), nodes, cached) if rows else None

    def _find_room(
        self, sequence: Sequence, rows: int, ranked: list[Sequence], proposals: Mapping[int, Proposal]
    ) -> int:
        """Blocks for up to `rows` tokens; returns for how many."""
        while (short := self.tables.shortage(sequence, rows) - self.swap.leaving) > 0:
            if not self._evict_below(sequence, ranked, proposals, short):
                break
        rows = min(rows, self.tables.room(sequence))
        if rows:
            self.tables.grow(sequence, rows)
        return rows

    def room_for(self, proposal: Proposal, nodes: int) -> int:
        """Blocks for up to `nodes` guesses behind what is proposed, where memory is free: so many."""
        nodes = min(nodes, self.tables.room(proposal.sequence) - proposal.room)
        self.tables.grow(proposal.sequence, proposal.room + nodes)
        return nodes

    def _nodes(self, sequence: Sequence, rows: int) -> int:
        """How many guesses there may be behind so many rows: only behind the last token, and while output is
        still wanted."""
        pending = sequence.pending
        if rows < pending or pending > (1 if sequence.open else SHORT_END) or len(sequence.choices) > 1:
            return 0
        if not sequence.params.speculation.enabled or sequence.handoff:
            return 0  # who hands over gives one token of each choice
        wanted = sequence.outputs_left(self.config.max_model_len) - 1
        most = min(self.config.draft_nodes, sequence.params.speculation.max_nodes)
        return max(0, min(most, wanted))

    def _below(
        self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal]
    ) -> list[Sequence]:
        """Running sequences that rank below this one and are not part of the step yet. For one that another
        worker holds blocks for, these are also those that wait for theirs: or both workers might wait for
        each other's blocks for ever."""
        lower = ranked[ranked.index(sequence) + 1 :]
        if sequence.granted:
            lower += [s for s in self.sequences.values() if s.held and s.handoff and not s.granted]
        return [s for s in lower if s.blocks and s.id not in proposals and s.id not in self.swap.moved]

    def _evict_below(
        self, sequence: Sequence, ranked: list[Sequence], proposals: Mapping[int, Proposal], short: int
    ) -> bool:
        """Evict one that ranks lower, if there is any, where `short` blocks are missing."""
        below = self._below(sequence, ranked, proposals)
        if below:
            resting = [s for s in below if s.open and not self._wanted(s)]
            self.preempt(_best_fit(resting, short) if resting else below[-1])
        return bool(below)

    def _preempt_lowest(self, ranked: list[Sequence]) -> None:
        """Only one that got a token since its last preemption, so that all end some day."""
        moved = [s for s in ranked if s.running and s.outputs > s.preempted_at]
        if moved:
            self.preempt(moved[-1])


def _best_fit(resting: list[Sequence], short: int) -> Sequence:
    """The smallest that gives up so many blocks, or else the largest: what is copied out takes its time."""
    enough = [sequence for sequence in resting if len(sequence.blocks) >= short]
    return (min if enough else max)(enough or resting, key=lambda sequence: len(sequence.blocks))


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
