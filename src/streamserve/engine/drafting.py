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
        observer: Observer,
        averages: RunningAverages,
        journal: Journal,
    ) -> None:
        self._drafter = drafter
        self.speculation = speculation
        self._scheduler = scheduler
        self._config = config
        self._clock = clock
        self._wait = wait
        self._observer = observer
        self._averages = averages
        self._journal = journal

    def trees(self, proposals: list[Proposal]) -> dict[int, TokenTree]:
        """Return the trees worth verifying, of the proposals that may have draft tokens; none without a
        drafter."""
        if self._drafter is None:
            return {}
        if self._scheduler.released:
            self._drafter.release(self._scheduler.released)
        query_tokens = sum(proposal.slots for proposal in proposals)
        kv_tokens = sum(proposal.sequence.kv.computed[TARGET] for proposal in proposals)
        decoding = sum(proposal.slots == proposal.sequence.pending for proposal in proposals)
        worth = self.speculation.worth_catching_up(decoding, kv_tokens)
        eligible = [p for p in proposals if p.nodes and self._worth_catching_up(p.sequence, worth)]
        budget = self._config.max_num_batched_tokens - len(eligible)
        drafted_ids = {proposal.sequence.id for proposal in eligible}
        requirements = {
            p.sequence.id: p.sequence.requirement
            for p in proposals
            if p.sequence.id in drafted_ids or self._latency_sensitive(p.sequence)
        }
        shapes = self.speculation.shapes(
            [_candidate(proposal) for proposal in eligible],
            query_tokens - len(eligible),
            kv_tokens,
            min(self._config.draft_nodes, budget // max(len(eligible), 1)),
            [requirement for id, requirement in requirements.items() if id not in drafted_ids],
            len(self._scheduler.allocator.running()) / self._config.max_num_seqs,
        )
        shapes = [self._allocate(p, shape) for p, shape in zip(eligible, shapes, strict=True)]
        requests = {
            proposal.sequence.id: self._request(proposal.sequence, shape)
            for proposal, shape in zip(eligible, shapes, strict=True)
            if shape != PLAIN
        }
        if not requests:
            return {}
        self._enter(requests)
        started = self._clock()
        self._drafter.begin(list(requests.values()))
        self._observer.on_event("mid-draft")
        collected = self._drafter.collect(started + self._wait)
        trees = {id: tree for id, tree in collected.items() if id in requests and _fits(tree, requests[id])}
        spent = self._clock() - started
        catch_up = sum(_unread(request, self._drafter.group) for request in requests.values())
        self.speculation.record_drafting(shapes, catch_up, spent)
        for id in trees:
            if self._drafter.group == DRAFT:
                self._scheduler.sequences[id].kv.computed[DRAFT] = _length(requests[id])
        sampled = {id: not request.params.greedy for id, request in requests.items()}
        requested = {id: Shape(request.depth, request.width) for id, request in requests.items()}
        chosen = self.speculation.choose(
            trees, sampled, query_tokens, requirements, kv_tokens, spent, budget, requested
        )
        self.speculation.counters.select_seconds += self._clock() - started - spent
        return chosen

    def catch_up_prompts(self, proposals: list[Proposal]) -> None:
        """Let a draft model compute KV of prompt tokens that the target has computed, at most a chunk a step:
        reading a whole prompt at once would delay the other requests' next tokens."""
        if self._catches_up:
            prompts = [
                p.sequence for p in proposals if p.sequence.pending > 1 and not p.sequence.transfer.role.sends
            ]
            ends = [(sequence, sequence.kv.computed[TARGET]) for sequence in prompts]
            self._catch_up(ends, self._config.max_chunk)

    def read_ahead(self, plan: StepPlan) -> None:
        """For prompts that are handed over, let a draft model compute KV of the tokens that this step
        computes: its KV is sent with the target's."""
        if self._catches_up:
            spans = [(self._scheduler.sequences[span.sequence], span) for span in plan.spans]
            ends = [(s, span.start + len(span.tokens)) for s, span in spans if s.transfer.role.sends]
            self._catch_up(ends, sum(end for _, end in ends))

    def _catch_up(self, ends: list[tuple[Sequence, int]], left: int) -> None:
        """Let the draft model read each sequence up to its end, `left` tokens in all."""
        requests = []
        for sequence, last in ends:
            known = sequence.kv.computed[DRAFT]
            end = min(last, known + left)
            if sequence.params.speculation.enabled and max(known, sequence.synced) < end:
                requests.append(self._request(sequence, PLAIN, end))
                left -= end - known
        if requests:
            self._read(requests)

    def _read(self, requests: list[DraftRequest]) -> None:
        assert self._drafter is not None
        self._enter(
            [request.id for request in requests], sum(len(request.new_tokens) for request in requests)
        )
        started = self._clock()
        self._drafter.begin(requests)
        collected = self._drafter.collect(started + self._wait)
        self.speculation.counters.draft_seconds += self._clock() - started
        for request in requests:
            if request.id in collected:
                self._scheduler.sequences[request.id].kv.computed[DRAFT] = _length(request)

    def _enter(self, ids: Iterable[int], query_tokens: int = 0) -> None:
        """Write to the journal that the drafter is about to work for these sequences. Reading
        `query_tokens` tokens is predicted to take it no longer than the target."""
        members = [self._scheduler.sequences[id] for id in ids]
        self._journal.enter(
            "draft", members, self.speculation.step_cost(query_tokens, 0) if query_tokens else 0.0
        )

    @property
    def _catches_up(self) -> bool:
        """Whether there is a draft model with its own KV that should read prompts."""
        return self._drafter is not None and self._drafter.group == DRAFT and self.speculation.is_drafting

    def _worth_catching_up(self, sequence: Sequence, worth: Callable[[int, float], bool]) -> bool:
        """Whether a draft model that has not read all of the text should do so, to draft for the expected
        output."""
        if self._drafter is None or self._drafter.group != DRAFT:
            return True
        left = min(sequence.outputs_left(self._config.max_model_len), self._averages.output)
        return worth(len(sequence.tokens) - sequence.kv.computed[DRAFT], left)

    def _allocate(self, proposal: Proposal, shape: Shape) -> Shape:
        """Allocate slots for the shape's nodes; returns the shape, truncated to the slots there are."""
        if shape == PLAIN:
            return PLAIN
        return fit(shape, shape.depth, self._scheduler.allocate_draft_slots(proposal, shape.nodes))

    def _latency_sensitive(self, sequence: Sequence) -> bool:
        """Whether the sequence decodes and has a stake in the duration of this step. A sequence that gets its
        last token, without a target, has no further steps to be slowed down in: it does not limit other
        requests' draft tokens."""
        goes_on = sequence.outputs_left(self._config.max_model_len) > 1
        return sequence.pending == 1 and (goes_on or sequence.params.slo.tpot_ms is not None)

    def _request(self, sequence: Sequence, shape: Shape, end: int | None = None) -> DraftRequest:
        """Return a request for a tree after all tokens, or for reading those before `end`. Marks the tokens
        as synced."""
        group = self._drafter.group if self._drafter else None
        new, retained = sequence.tokens[sequence.synced : end], sequence.synced
        sequence.synced = retained + len(new)
        return DraftRequest(
            id=sequence.id,
            epoch=sequence.epoch,
            retained=retained,
            new_tokens=new,
            choice=sequence.choices[0],
            output=sequence.outputs,
            params=sequence.params,
            depth=shape.depth,
            width=shape.width,
            nodes=shape.nodes,
            expansion=shape.expansion,
            computed=0 if group is None else sequence.kv.computed[group],
            blocks=[] if group is None else list(sequence.kv.blocks),
        )


def _candidate(proposal: Proposal) -> Candidate:
    sequence = proposal.sequence
    depth = sequence.params.speculation.max_depth
    return Candidate(depth, proposal.nodes, sequence.requirement, sequence.priority, sequence.id)


def _fits(tree: TokenTree, request: DraftRequest) -> bool:
    """Whether a tree matches its request: a late answer or another sequence's tree is dropped."""
    return (
        len(tree) - 1 <= request.nodes
        and bool(request.new_tokens)
        and tree.tokens[0] == request.new_tokens[-1]
    )


def _unread(request: DraftRequest, group: int | None) -> int:
    """Return how many tokens the drafter has to read before it drafts."""
    return len(request.new_tokens) if group is None else _length(request) - request.computed


def _length(request: DraftRequest) -> int:
    """Return how many committed tokens the request covers."""
    return request.retained + len(request.new_tokens)
