"""Drafting for a step: request trees, collect the trees that arrive in time, and select the nodes that are
worth verifying."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from streamserve.contracts.plan import (
    DRAFT,
    TARGET,
    CompilingDrafter,
    DeviceDrafter,
    Drafter,
    DraftRequest,
    RemoteDraft,
    StepPlan,
)
from streamserve.contracts.tree import TokenTree
from streamserve.engine.batch import RunningAverages
from streamserve.engine.observer import Journal, Observer
from streamserve.engine.scheduler import Proposal, Scheduler
from streamserve.engine.sequence import EngineSequence
from streamserve.speculation.controller import NO_CANDIDATES, Round, Speculation, SpeculationBatch
from streamserve.speculation.outlook import Candidate
from streamserve.speculation.shapes import PLAIN, TreeShape, fit

DRAFT_AHEAD = True
"""Whether a device drafts for the next step before the host knows the results of the present one."""


@dataclass(frozen=True)
class _PendingTrees:
    """Trees that a step verifies before the host knows them: their requests and shapes, the number of tokens
    that the draft model had to read first (`catch_up`), and when drafting began."""

    requests: dict[int, DraftRequest]
    shapes: list[TreeShape]
    catch_up: int
    started: float


class Drafting:
    """Requests trees from `drafter`, if there is one, for the sequences of `scheduler`. A tree that arrives
    more than `wait` seconds after its request is not used in this step."""

    def __init__(
        self,
        drafter: Drafter | None,
        speculation: Speculation,
        scheduler: Scheduler,
        clock: Callable[[], float],
        wait: float,
        observer: Observer,
        averages: RunningAverages,
        journal: Journal,
    ) -> None:
        self._drafter = drafter
        self._device_drafter = drafter if isinstance(drafter, DeviceDrafter) else None
        self.speculation = speculation
        self._scheduler = scheduler
        self._config = scheduler.config
        self._clock = clock
        self._wait = wait
        self._observer = observer
        self._averages = averages
        self._journal = journal
        self._pending: _PendingTrees | None = None
        self._collected = 0.0
        """When the last step with pending trees ended. Drafting ahead of its results began then."""
        self._read: dict[int, tuple[int, int]] = {}
        """Epoch and length of each sequence's latest request, for a drafter without KV."""

    def draft(self, proposals: list[Proposal]) -> tuple[Round, dict[int, TokenTree]]:
        """Begin the step's round of speculation; returns it, and the trees that are worth verifying, by
        sequence id. Without a drafter there are none."""
        if self._drafter is None:
            return self.speculation.begin(NO_CANDIDATES), {}
        if self._scheduler.released:
            self._drafter.release(self._scheduler.released)
            for id in self._scheduler.released:
                self._read.pop(id, None)
        eligible, round = self._begin(proposals)
        shapes = [self._allocate(p, shape) for p, shape in zip(eligible, round.shapes, strict=True)]
        requests = {
            proposal.sequence.id: self._request(proposal.sequence, shape)
            for proposal, shape in zip(eligible, shapes, strict=True)
            if shape != PLAIN
        }
        if not requests:
            if self._device_drafter:
                self._device_drafter.forget_ahead()
            return round, {}
        self._enter(requests)
        started = self._clock()
        self._drafter.begin(list(requests.values()))
        self._observer.on_event("mid-draft")
        catch_up = sum(self._unread(request) for request in requests.values())
        if pending := self._pending_trees(proposals, round, shapes):
            ahead = self._device_drafter is not None and self._device_drafter.began_ahead
            began = self._collected if ahead else started
            self._pending = _PendingTrees(requests, shapes, catch_up, began)
            return round, pending
        trees = self._collect(requests, started)
        spent = self._clock() - started
        selected = round.select(trees, shapes, catch_up, 0.0 if self._compiled else spent)
        self.speculation.counters.select_seconds += self._clock() - started - spent
        return round, selected

    @property
    def _compiled(self) -> bool:
        return isinstance(self._drafter, CompilingDrafter) and self._drafter.compiled

    def _pending_trees(
        self, proposals: list[Proposal], round: Round, shapes: list[TreeShape]
    ) -> dict[int, TokenTree]:
        """Return the trees that the device is drafting, if they are to be verified as a whole in a step
        without prompts. That step can be launched right after the drafting. Otherwise return none."""
        decodes = all(proposal.slots == proposal.sequence.pending == 1 for proposal in proposals)
        if self._device_drafter and decodes and round.verifies_all(shapes):
            return self._device_drafter.pending_trees()
        return {}

    def draft_ahead(self, plan: StepPlan) -> bool:
        """Let the device draft for the step after `plan`, which was launched and verifies chains that the
        host does not know yet. Does nothing unless all sequences of `plan` have a chain, and free blocks
        suffice for another chain of the greatest depth. Returns whether something was compiled: then the
        step's time does not predict the time of later steps."""
        pending, spans, tables = self._pending, plan.spans, self._scheduler.tables
        if not (DRAFT_AHEAD and pending and self._device_drafter):
            return False
        if any(span.tree is None or span.sequence not in pending.requests for span in spans):
            return False
        depth, requests = max(shape.depth for shape in pending.shapes), []
        verified = [len(span.tree.tokens) - 1 for span in spans if span.tree]
        for span, nodes in zip(spans, verified, strict=True):
            sequence, slots = self._scheduler.sequences[span.sequence], 1 + nodes + depth
            if tables.free_slots(sequence) < slots:
                return False
            tables.grow(sequence, slots)
            request = pending.requests[span.sequence]
            requests.append(replace(request, depth=depth, nodes=depth, blocks=list(sequence.kv.blocks)))
        return self._device_drafter.draft_ahead(requests, verified)

    def collect_pending(self, round: Round) -> float:
        """Collect the pending trees, after the step of `round` has verified them. Returns when drafting
        ended; 0 if no trees are pending."""
        pending, self._pending = self._pending, None
        if pending is None:
            return 0.0
        self._collected = self._clock()
        trees = self._collect(pending.requests, pending.started)
        seconds = self._device_drafter.seconds if self._device_drafter else 0.0
        round.record_drafting(trees, pending.shapes, pending.catch_up, 0.0 if self._compiled else seconds)
        return pending.started + seconds

    def _begin(self, proposals: list[Proposal]) -> tuple[list[Proposal], Round]:
        """Return the proposals that may have draft tokens, and the step's round with these as candidates."""
        query_tokens = sum(proposal.slots for proposal in proposals)
        kv_tokens = sum(proposal.sequence.kv.computed[TARGET] for proposal in proposals)
        decoding = sum(proposal.slots == proposal.sequence.pending for proposal in proposals)
        worth = self.speculation.worth_catching_up(decoding, kv_tokens)
        eligible = [p for p in proposals if p.nodes and self._worth_catching_up(p.sequence, worth)]
        eligible_ids = {proposal.sequence.id for proposal in eligible}
        budget = self._config.max_num_batched_tokens - len(eligible)
        batch = SpeculationBatch(
            candidates=[_candidate(proposal) for proposal in eligible],
            requirements={
                p.sequence.id: p.sequence.requirement
                for p in proposals
                if p.sequence.id in eligible_ids or self._latency_sensitive(p.sequence)
            },
            query_tokens=query_tokens,
            kv_tokens=kv_tokens,
            nodes=min(self._config.draft_nodes, budget // max(len(eligible), 1)),
            budget=budget,
            load=len(self._scheduler.allocator.running()) / self._config.max_num_seqs,
        )
        return eligible, self.speculation.begin(batch)

    def _collect(self, requests: dict[int, DraftRequest], started: float) -> dict[int, TokenTree]:
        """Return the trees that arrive in time and match their requests, and record that the draft model's
        cache has the KV of all tokens of their sequences."""
        assert self._drafter is not None
        collected = self._drafter.collect(started + self._wait)
        trees = {id: tree for id, tree in collected.items() if id in requests and _fits(tree, requests[id])}
        if self._drafter.group == DRAFT:
            for id in trees:
                self._scheduler.sequences[id].kv.computed[DRAFT] = requests[id].length
        return trees

    def foresee(self, sequences: Iterable[EngineSequence]) -> None:
        """Let a remote drafter read the prompts of new or edited sequences, so that it has read them before
        the target has computed them."""
        if isinstance(self._drafter, RemoteDraft) and self.speculation.is_drafting:
            wanted = [s for s in sequences if s.params.speculation.enabled and s.tokens]
            self._drafter.foresee([self._request(sequence, PLAIN) for sequence in wanted])

    def catch_up_prompts(self, proposals: list[Proposal]) -> None:
        """Let a draft model compute KV of prompt tokens that the target has computed, at most one chunk a
        step: reading a whole prompt at once would delay other requests' next tokens."""
        if self._catches_up:
            prompts = [
                p.sequence for p in proposals if p.sequence.pending > 1 and not p.sequence.transfer.role.sends
            ]
            ends = [(sequence, sequence.kv.computed[TARGET]) for sequence in prompts]
            self._catch_up(ends, self._config.max_chunk)

    def read_ahead(self, plan: StepPlan) -> None:
        """Let a draft model compute KV of the tokens that this step computes, for prompts that are handed
        over: the draft model's KV is sent with the target's. Steps with a finished prompt stream are left
        out, because its client waits for the first token; the decode worker reads the rest."""
        spans = [(self._scheduler.sequences[span.sequence], span) for span in plan.spans]
        if self._catches_up and all(sequence.stream.finished_at is None for sequence, _ in spans):
            ends = [(s, span.start + len(span.tokens)) for s, span in spans if s.transfer.role.sends]
            self._catch_up(ends, sum(end for _, end in ends))

    def _catch_up(self, ends: list[tuple[EngineSequence, int]], left: int) -> None:
        """Let the draft model read each sequence up to its end in `ends`, at most `left` tokens in all."""
        requests = []
        for sequence, last in ends:
            known = sequence.kv.computed[DRAFT]
            end = min(last, known + left)
            if sequence.params.speculation.enabled and known < end:
                requests.append(self._request(sequence, PLAIN, end))
                left -= end - known
        if requests:
            self._compute_kv(requests)

    def _compute_kv(self, requests: list[DraftRequest]) -> None:
        assert self._drafter is not None
        self._enter(
            [request.id for request in requests],
            sum(request.length - request.computed for request in requests),
        )
        started = self._clock()
        self._drafter.begin(requests)
        collected = self._drafter.collect(started + self._wait)
        self.speculation.counters.draft_seconds += self._clock() - started
        for request in requests:
            if request.id in collected:
                self._scheduler.sequences[request.id].kv.computed[DRAFT] = request.length

    def _enter(self, ids: Iterable[int], query_tokens: int = 0) -> None:
        """Record in the journal that the drafter is about to work for these sequences. The prediction for
        reading `query_tokens` is an upper bound: the target's seconds."""
        members = [self._scheduler.sequences[id] for id in ids]
        self._journal.enter(
            "draft", members, self.speculation.step_cost(query_tokens, 0) if query_tokens else 0.0
        )

    @property
    def _catches_up(self) -> bool:
        """Whether there is a draft model with its own KV, and it should read prompts."""
        return self._drafter is not None and self._drafter.group == DRAFT and self.speculation.is_drafting

    def _worth_catching_up(self, sequence: EngineSequence, worth: Callable[[int, float], bool]) -> bool:
        """Whether the draft model should read the part of the text that it has not read, in order to draft
        for the expected output."""
        if self._drafter is None or self._drafter.group != DRAFT:
            return True
        left = min(sequence.outputs_left(self._config.max_model_len), self._averages.output)
        return worth(len(sequence.tokens) - sequence.kv.computed[DRAFT], left)

    def _allocate(self, proposal: Proposal, shape: TreeShape) -> TreeShape:
        """Allocate slots for the shape's nodes; returns the shape, truncated to the allocated slots."""
        if shape == PLAIN:
            return PLAIN
        return fit(shape, shape.depth, self._scheduler.allocate_draft_slots(proposal, shape.nodes))

    def _latency_sensitive(self, sequence: EngineSequence) -> bool:
        """Whether the sequence decodes, and the seconds of this step matter to it. They do not matter to a
        sequence without a target that gets its last token: it does not limit other requests' draft tokens."""
        goes_on = sequence.outputs_left(self._config.max_model_len) > 1
        return sequence.pending == 1 and (goes_on or sequence.params.slo.tpot_ms is not None)

    def _request(self, sequence: EngineSequence, shape: TreeShape, end: int | None = None) -> DraftRequest:
        """Return a request for a tree after all tokens, or for reading the tokens before `end`."""
        group = self._drafter.group if self._drafter else None
        return DraftRequest(
            id=sequence.id,
            epoch=sequence.epoch,
            tokens=sequence.tokens,
            length=len(sequence.tokens) if end is None else end,
            choice=sequence.choices[0],
            output=sequence.outputs,
            params=sequence.params,
            depth=shape.depth,
            width=shape.width,
            nodes=shape.nodes,
            expansion=shape.expansion,
            computed=0 if group is None else sequence.kv.computed[group],
            blocks=[] if group is None else list(sequence.kv.blocks),
            adapter=sequence.submitted.adapter,
            need=_seconds_to_next_token(sequence),
        )

    def _unread(self, request: DraftRequest) -> int:
        """Return the number of tokens that the drafter has to read before it drafts. A drafter without KV has
        read the tokens of the sequence's latest request, if the epoch is the same."""
        if self._drafter is not None and self._drafter.group is not None:
            return request.length - request.computed
        epoch, length = self._read.get(request.id, (request.epoch, 0))
        self._read[request.id] = request.epoch, request.length
        return request.length - length if epoch == request.epoch else request.length


def _candidate(proposal: Proposal) -> Candidate:
    sequence = proposal.sequence
    depth = sequence.params.speculation.max_depth
    return Candidate(
        depth,
        proposal.nodes,
        sequence.requirement,
        sequence.submitted.priority,
        sequence.id,
        not sequence.params.greedy,
    )


def _seconds_to_next_token(sequence: EngineSequence) -> float | None:
    """Return the seconds until the next token is due for its target; None without a target."""
    slack = sequence.requirement.slack(1.0)
    return None if slack == inf else max(0.0, slack)


def _fits(tree: TokenTree, request: DraftRequest) -> bool:
    """Whether a tree matches its request. Late answers and trees of other sequences do not."""
    return len(tree) - 1 <= request.nodes and tree.tokens[0] == request.tokens[request.length - 1]
