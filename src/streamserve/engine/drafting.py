"""Drafting for a step: requests trees, collects those that arrive in time, and selects what is worth
verifying."""

from collections.abc import Callable, Iterable

from streamserve.engine.batch import RunningAverages
from streamserve.engine.observer import Journal, Observer
from streamserve.engine.plan import DRAFT, TARGET, Drafter, DraftRequest, StepPlan
from streamserve.engine.scheduler import Proposal, Scheduler
from streamserve.engine.sequence import Sequence
from streamserve.protocol.config import EngineConfig
from streamserve.speculation.controller import Speculation
from streamserve.speculation.outlook import Candidate
from streamserve.speculation.shapes import PLAIN, Shape, fit
from streamserve.speculation.tree import TokenTree


class Drafting:
    """Requests trees from `drafter`, if there is one, for the sequences of `scheduler`. A tree that has not
    arrived `wait` seconds after its request is not used in this step."""

    def __init__(
        self,
        drafter: Drafter | None,
        speculation: Speculation,
        scheduler: Scheduler,
        config: EngineConfig,
        clock: Callable[[], float],
        wait: float,
        watch: Observer,
        pace: RunningAverages,
        journal: Journal,
    ) -> None:
        self._drafter = drafter
        self.speculation = speculation
        self._scheduler = scheduler
        self._config = config
        self._clock = clock
        self._wait = wait
        self._watch = watch
        self._pace = pace
        self._journal = journal

    def trees(self, proposals: list[Proposal]) -> dict[int, TokenTree]:
        """Return the trees worth verifying, of the proposals that may have draft tokens; none without a
        drafter."""
        if self._drafter is None:
            return {}
        if self._scheduler.released:
            self._drafter.release(self._scheduler.released)
        rows = sum(proposal.room for proposal in proposals)
        kv_tokens = sum(proposal.sequence.computed[TARGET] for proposal in proposals)
        decoding = sum(proposal.room == proposal.sequence.pending for proposal in proposals)
        worth = self.speculation.reading(decoding, kv_tokens)
        able = [p for p in proposals if p.nodes and self._worth_reading(p.sequence, worth)]
        budget = self._config.max_num_batched_tokens - len(able)
        guessed_for = {proposal.sequence.id for proposal in able}
        needs = {
            p.sequence.id: p.sequence.need
            for p in proposals
            if p.sequence.id in guessed_for or self._minds(p.sequence)
        }
        shapes = self.speculation.shapes(
            [_candidate(proposal) for proposal in able],
            rows - len(able),
            kv_tokens,
            min(self._config.draft_nodes, budget // max(len(able), 1)),
            [need for id, need in needs.items() if id not in guessed_for],
            len(self._scheduler.room.running()) / self._config.max_num_seqs,
        )
        shapes = [self._with_room(p, shape) for p, shape in zip(able, shapes, strict=True)]
        asked = {
            proposal.sequence.id: self._ask(proposal.sequence, shape)
            for proposal, shape in zip(able, shapes, strict=True)
            if shape != PLAIN
        }
        if not asked:
            return {}
        self._enter(asked)
        started = self._clock()
        self._drafter.begin(list(asked.values()))
        self._watch.moment("mid-draft")
        found = self._drafter.collect(started + self._wait)
        trees = {id: tree for id, tree in found.items() if id in asked and _fits(tree, asked[id])}
        spent = self._clock() - started
        catch_up = sum(_unread(request, self._drafter.plane) for request in asked.values())
        self.speculation.drafted(shapes, catch_up, spent)
        for id in trees:
            if self._drafter.plane == DRAFT:
                self._scheduler.sequences[id].computed[DRAFT] = _length(asked[id])
        sampled = {id: not request.params.greedy for id, request in asked.items()}
        wanted = {id: Shape(request.depth, request.width) for id, request in asked.items()}
        chosen = self.speculation.choose(trees, sampled, rows, needs, kv_tokens, spent, budget, wanted)
        self.speculation.counters.select_seconds += self._clock() - started - spent
        return chosen

    def read_along(self, proposals: list[Proposal]) -> None:
        """Let a draft model compute KV of prompt tokens that the target has computed, at most a chunk a step:
        reading a whole prompt at once would delay the other requests' next tokens."""
        if self._reads:
            prompts = [p.sequence for p in proposals if p.sequence.pending > 1 and not p.sequence.handoff]
            ends = [(sequence, sequence.computed[TARGET]) for sequence in prompts]
            self._catch_up(ends, self._config.max_chunk)

    def read_ahead(self, plan: StepPlan) -> None:
        """For prompts that are handed over, let a draft model compute KV of the tokens that this step
        computes: its KV is sent with the target's."""
        if self._reads:
            spans = [(self._scheduler.sequences[span.sequence], span) for span in plan.spans]
            ends = [(s, span.start + len(span.tokens)) for s, span in spans if s.handoff]
            self._catch_up(ends, sum(end for _, end in ends))

    def _catch_up(self, ends: list[tuple[Sequence, int]], left: int) -> None:
        """Let the draft model read each sequence up to its end, `left` tokens in all."""
        asked = []
        for sequence, last in ends:
            known = sequence.computed[DRAFT]
            end = min(last, known + left)
            if sequence.params.speculation.enabled and max(known, sequence.told) < end:
                asked.append(self._ask(sequence, PLAIN, end))
                left -= end - known
        if asked:
            self._read(asked)

    def _read(self, asked: list[DraftRequest]) -> None:
        assert self._drafter is not None
        self._enter([request.id for request in asked], sum(len(request.new_tokens) for request in asked))
        started = self._clock()
        self._drafter.begin(asked)
        found = self._drafter.collect(started + self._wait)
        self.speculation.counters.draft_seconds += self._clock() - started
        for request in asked:
            if request.id in found:
                self._scheduler.sequences[request.id].computed[DRAFT] = _length(request)

    def _enter(self, ids: Iterable[int], rows: int = 0) -> None:
        """Write to the journal that the drafter is about to work for these sequences. Reading `rows` tokens
        is predicted to take it no longer than the target."""
        members = [self._scheduler.sequences[id] for id in ids]
        self._journal.enter("draft", members, self.speculation.step_cost(rows, 0) if rows else 0.0)

    @property
    def _reads(self) -> bool:
        """Whether there is a draft model with its own KV that should read prompts."""
        return self._drafter is not None and self._drafter.plane == DRAFT and self.speculation.guessing

    def _worth_reading(self, sequence: Sequence, worth: Callable[[int, float], bool]) -> bool:
        """Whether a draft model that has not read all of the text should do so, to draft for the expected
        output."""
        if self._drafter is None or self._drafter.plane != DRAFT:
            return True
        left = min(sequence.outputs_left(self._config.max_model_len), self._pace.output)
        return worth(len(sequence.tokens) - sequence.computed[DRAFT], left)

    def _with_room(self, proposal: Proposal, shape: Shape) -> Shape:
        """Allocate slots for the shape's nodes; returns the shape, truncated to the slots there are."""
        if shape == PLAIN:
            return PLAIN
        return fit(shape, shape.depth, self._scheduler.room_for(proposal, shape.nodes))

    def _minds(self, sequence: Sequence) -> bool:
        """Whether the sequence decodes and has a stake in the duration of this step. A sequence that gets its
        last token, without a target, has no further steps to be slowed down in: it does not limit other
        requests' draft tokens."""
        goes_on = sequence.outputs_left(self._config.max_model_len) > 1
        return sequence.pending == 1 and (goes_on or sequence.params.slo.tpot_ms is not None)

    def _ask(self, sequence: Sequence, shape: Shape, end: int | None = None) -> DraftRequest:
        """Return a request for a tree after all tokens, or for reading those before `end`. Marks the tokens
        as synced."""
        plane = self._drafter.plane if self._drafter else None
        new, keep = sequence.tokens[sequence.told : end], sequence.told
        sequence.told = keep + len(new)
        return DraftRequest(
            id=sequence.id,
            epoch=sequence.epoch,
            keep=keep,
            new_tokens=new,
            choice=sequence.choices[0],
            output=sequence.outputs,
            params=sequence.params,
            depth=shape.depth,
            width=shape.width,
            nodes=shape.nodes,
            expansion=shape.expansion,
            computed=0 if plane is None else sequence.computed[plane],
            blocks=[] if plane is None else list(sequence.blocks),
        )


def _candidate(proposal: Proposal) -> Candidate:
    sequence = proposal.sequence
    depth = sequence.params.speculation.max_depth
    return Candidate(depth, proposal.nodes, sequence.need, sequence.priority, sequence.id)


def _fits(tree: TokenTree, request: DraftRequest) -> bool:
    """Whether a tree matches its request: a late answer or another sequence's tree is dropped."""
    return (
        len(tree) - 1 <= request.nodes
        and bool(request.new_tokens)
        and tree.tokens[0] == request.new_tokens[-1]
    )


def _unread(request: DraftRequest, plane: int | None) -> int:
    """Return how many tokens the drafter has to read before it drafts."""
    return len(request.new_tokens) if plane is None else _length(request) - request.computed


def _length(request: DraftRequest) -> int:
    """Return how many committed tokens the request covers."""
    return request.keep + len(request.new_tokens)
