"""Batch candidates of a step: the service order, and the maximum query tokens of each sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from msgspec.structs import replace

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import TARGET
from streamserve.engine.reservations import may_fail_to_start
from streamserve.engine.sequence import EngineSequence, MemoryClaim
from streamserve.engine.status import SequenceStatus, TransferRole
from streamserve.scheduling.feasibility import Load
from streamserve.scheduling.ordering import BatchCap, Order, rank, service_order
from streamserve.scheduling.prefill import DecodeBatch, PrefillChunk, chunks
from streamserve.scheduling.request import RequestView
from streamserve.scheduling.slo_admission import admit, aging_in, has_begun, needs_admission
from streamserve.speculation.controller import Speculation
from streamserve.speculation.outlook import RELIABLE_LEVELS, Means
from streamserve.speculation.policies import MAX_DEPTH
from streamserve.speculation.slo import NO_REQUIREMENT

INITIAL_OUTPUT = 64.0
"""Assumed output length in tokens until an output has ended."""
STREAM_BUDGETS = 4
"""A step considers prompt streams with about this many token budgets to compute in total: there may be
hundreds of streams."""
RECENT_WEIGHT = 0.05
"""Weight of the latest observation in a running average."""

Prefilling = tuple[EngineSequence, RequestView]
"""A sequence that does not decode yet, and its view."""


@dataclass
class RunningAverages:
    """Running averages of one engine.

    * `output`: tokens of an output.
    * `step`: tokens that a step yields for each decoding sequence.
    * `prompts`: prompt tokens in a step.
    * `draft_tokens`: draft tokens in a step for each decoding sequence.
    * `drafting`: seconds of drafting before a step.
    """

    output: float = INITIAL_OUTPUT
    step: float = 1.0
    prompts: float = 0.0
    draft_tokens: float = 0.0
    drafting: float = 0.0

    def ended(self, outputs: int) -> None:
        """Record the length of an output that has ended."""
        self.output += RECENT_WEIGHT * (outputs - self.output)

    def stepped(self, decoding: int, tokens: int, prompts: int, draft_tokens: int, drafting: float) -> None:
        """Record a step. It yielded `tokens` for `decoding` sequences, verified `draft_tokens` that took
        `drafting` seconds to draft, and computed `prompts` prompt tokens in the same batch."""
        self.prompts += RECENT_WEIGHT * (prompts - self.prompts)
        if decoding:
            self.step += RECENT_WEIGHT * (tokens / decoding - self.step)
            self.draft_tokens += RECENT_WEIGHT * (draft_tokens / decoding - self.draft_tokens)
            self.drafting += RECENT_WEIGHT * (drafting - self.drafting)


@dataclass(frozen=True)
class BatchCandidates:
    """The batch candidates of one step.

    * `ranked`: the order in which sequences keep sequence slots and memory, highest rank first.
    * `service_order`: the sequences with something to compute, in the order in which they get query tokens.
    * `budget`: maximum query tokens of the step.
    * `chunks`: the chunk of a prompt by sequence id; without an entry it is limited by the maximum chunk
      only.
    * `exclusive`: no sequence decodes in a batch with a prompt.
    * `defer_streams`: no prompt stream is computed in a batch with a complete prompt.
    * `idle`: nothing is left to compute but the tails of prompt streams.
    * `deferred_handovers`: sequences that must not receive their KV from another worker yet, because requests
      would miss their latency targets if these sequences decoded here.
    """

    ranked: list[EngineSequence]
    service_order: list[EngineSequence]
    budget: int
    chunks: dict[int, PrefillChunk]
    exclusive: bool = False
    defer_streams: bool = False
    idle: bool = False
    deferred_handovers: Sequence[EngineSequence] = ()

    def deferred(self, sequence: EngineSequence) -> bool:
        """Whether the sequence is deferred: it is served only after complete prompts."""
        return self.defer_streams and sequence.stream.open


def batch_candidates(
    sequences: Sequence[EngineSequence],
    expected: Sequence[EngineSequence],
    config: EngineConfig,
    order: Order,
    now: float,
    speculation: Speculation,
    averages: RunningAverages,
) -> BatchCandidates:
    """Return the batch candidates of a step that begins at `now`. The `expected` sequences are not
    candidates: they will decode here when their KV has landed."""
    cost, budget = speculation.step_cost, config.max_num_batched_tokens
    todo = [sequence.todo(idle=False) for sequence in sequences]
    if idle := not any(todo):
        todo = [sequence.todo(idle) for sequence in sequences]
    token_seconds = cost(config.max_chunk, 0) / config.max_chunk
    views = [
        request_view(sequence, left, now, token_seconds) if left else _idle_view(sequence, now)
        for sequence, left in zip(sequences, todo, strict=True)
    ]
    ranking = rank(order, views, now)
    serving = service_order(order, views, [i for i in ranking if todo[i]], now)
    if order.cap:
        budget = _capped_budget(order.cap, [views[i] for i in serving], cost, budget)
    prefilling = [(sequences[i], views[i]) for i in serving if not views[i].decoding]
    present = views + [replace(request_view(s, 1, now, 0.0), decoding=True) for s in expected]
    deferred = (
        _deferred_handovers(prefilling, present, now, speculation, averages) if order.by_targets else []
    )
    limits = _chunk_limits(prefilling, present, order, config, now, speculation, averages)
    return BatchCandidates(
        ranked=[sequences[i] for i in ranking],
        service_order=[sequences[i] for i in serving],
        budget=budget,
        chunks=limits | {sequence.id: PrefillChunk(0, 0) for sequence in deferred},
        exclusive=order.exclusive,
        defer_streams=order.complete_first,
        idle=idle,
        deferred_handovers=deferred,
    )


def _deferred_handovers(
    prefilling: list[Prefilling],
    views: list[RequestView],
    now: float,
    speculation: Speculation,
    averages: RunningAverages,
) -> list[EngineSequence]:
    """Return the sequences in `prefilling` whose KV another worker computes, and that SLO admission does not
    let decode here yet. `views` has the views of all sequences of the engine."""
    handovers = [
        (sequence, replace(view, remaining=1))  # nothing of these prompts is computed here
        for sequence, view in prefilling
        if sequence.transfer.role is TransferRole.RECEIVER and needs_admission(view)
    ]
    if not handovers:
        return []
    kv_tokens = sum(view.computed for view in views if view.remaining)
    admitted = _admitted_prompts(
        handovers, views, now, lambda: speculation.means(kv_tokens, RELIABLE_LEVELS), round(averages.prompts)
    )
    begun = {sequence.id for sequence, _ in admitted}
    return [sequence for sequence, _ in handovers if sequence.id not in begun]


def _chunk_limits(
    prefilling: list[Prefilling],
    views: list[RequestView],
    order: Order,
    config: EngineConfig,
    now: float,
    speculation: Speculation,
    averages: RunningAverages,
) -> dict[int, PrefillChunk]:
    """Return the chunks that an order gives the sequences in `prefilling`, by sequence id."""
    startable = [
        (sequence, view)
        for sequence, view in prefilling
        if not sequence.passed_over and sequence.transfer.role is not TransferRole.RECEIVER
    ]
    limits: dict[int, PrefillChunk] = {}
    if order.by_targets and prefilling:
        if startable:
            limits = _slo_chunks(startable, views, config, now, speculation, averages)
        limits |= _tentative_chunks(prefilling)
    if order.complete_first:
        limits |= _edit_stable_chunks(startable, limits, config.max_chunk)
    return limits


def request_view(sequence: EngineSequence, todo: int, now: float, token_seconds: float) -> RequestView:
    """Return the view of a sequence that has `todo` tokens to compute, each in about `token_seconds`. There
    may be hundreds of sequences in a step, so properties are read only where they can differ from their
    defaults."""
    kv, stream, submitted = sequence.kv, sequence.stream, sequence.submitted
    computed, is_open, finished_at = kv.computed[TARGET], stream.open, stream.finished_at
    length, running = len(sequence.tokens), sequence.status is SequenceStatus.RUNNING
    outputs = length - sequence.prompt_length
    streamed = is_open or finished_at is not None
    requirement = sequence.requirement if outputs else NO_REQUIREMENT
    return RequestView(
        arrival=submitted.arrival,
        priority=submitted.priority,
        remaining=todo,
        computed=computed,
        length=length,
        outputs=outputs,
        decodes_here=sequence.decodes,
        cached=kv.cached,
        prefill_seconds=(length - computed) * token_seconds if streamed else 0.0,
        running=running,
        decoding=running and length == computed + 1 and (not is_open or submitted.answer_early),
        complete=not is_open,
        last_chunk_at=sequence.stream.last_chunk_at,
        completed_at=submitted.arrival if finished_at is None else finished_at,
        streamed=streamed,
        edit_stability=sequence.edit_stability if is_open else 0,
        deadline=None if outputs or is_open else sequence.deadline,
        tpot=requirement.tpot if outputs else sequence.tpot(now),
        requirement=requirement,
        aged_in=sequence.aged_in,
        idle=stream.claim is not MemoryClaim.ANY,
    )


def _idle_view(sequence: EngineSequence, now: float) -> RequestView:
    """Return the view of a sequence with nothing to compute now. Idle prompt streams are the first to lose
    their memory."""
    return RequestView(
        arrival=sequence.submitted.arrival,
        priority=sequence.submitted.priority,
        computed=sequence.kv.computed[TARGET],
        complete=not sequence.stream.open,
        last_chunk_at=sequence.stream.last_chunk_at,
        completed_at=sequence.completed_at,
        tpot=sequence.tpot(now),
        idle=sequence.stream.open,
    )


def _capped_budget(
    cap: BatchCap, serving: list[RequestView], cost: Callable[[int, int], float], budget: int
) -> int:
    """Return the maximum query tokens of a step by an order's `cap`."""
    decoding = [view for view in serving if view.decoding]
    # Sums of KV tokens in service order: a smaller step leaves out the last decoding sequences.
    kv_tokens = list(accumulate((view.computed for view in decoding), initial=0))
    return cap(
        [view.requirement for view in decoding],
        lambda query_tokens: cost(query_tokens, kv_tokens[min(query_tokens, len(decoding))]),
        budget,
    )


def _slo_chunks(
    prompts: list[Prefilling],
    views: list[RequestView],
    config: EngineConfig,
    now: float,
    speculation: Speculation,
    averages: RunningAverages,
) -> dict[int, PrefillChunk]:
    """Return the chunks of `prompts` that latency targets allow, by sequence id. `views` has the views of all
    sequences of the engine."""
    decoding = [view for view in views if view.decoding and view.running]
    requirements = [view.requirement for view in decoding]
    kv_tokens = sum(view.computed for view in views if view.remaining)
    draft_tokens = round(len(requirements) * averages.draft_tokens)
    drafting = averages.drafting if draft_tokens else 0.0
    decode_batch = DecodeBatch(
        requirements,
        cache(lambda query_tokens: drafting + speculation.step_cost(query_tokens + draft_tokens, kv_tokens)),
        config.max_num_batched_tokens,
        config.max_chunk,
        now,
        averages.step,
        [view.priority for view in decoding],
    )
    admitted = _admitted_prompts(
        prompts, views, now, lambda: speculation.means(kv_tokens, RELIABLE_LEVELS), round(averages.prompts)
    )
    complete = [entry for entry in admitted if entry[1].complete]
    streams = _first_prompts(
        [entry for entry in admitted if not entry[1].complete], STREAM_BUDGETS * config.max_num_batched_tokens
    )
    limits = {sequence.id: PrefillChunk(0, 0) for sequence, _ in prompts}
    for group in filter(None, (complete, streams)):
        planned = chunks([view for _, view in group], decode_batch, averages.output, config.prefill_share)
        limits |= {sequence.id: chunk for (sequence, _), chunk in zip(group, planned, strict=True)}
    return limits


def _first_prompts(prompts: list[Prefilling], tokens: int) -> list[Prefilling]:
    """Return the first prompts that together have `tokens` tokens to compute, and all prompts that hold
    memory. Without the prompts that hold memory, no prompt might be computed: the first prompts may be
    unable to start while the memory is held."""
    sums = accumulate(view.remaining for _, view in prompts)
    first = 1 + sum(1 for so_far in sums if so_far < tokens)
    return [entry for number, entry in enumerate(prompts) if number < first or entry[1].running]


def _admitted_prompts(
    prompts: list[Prefilling],
    views: list[RequestView],
    now: float,
    means: Callable[[], Means],
    others: int,
) -> list[Prefilling]:
    """Return the `prompts` that continue or may begin. A prompt may not begin if other requests would miss
    their targets by that. One such prompt at a time is aged in after its maximum wait. A step has `others`
    prompt tokens on average."""
    waiting = [entry for entry in prompts if needs_admission(entry[1])]
    if not waiting or all(view.tpot is None for view in views):
        return prompts
    present = [view for _, view in prompts if has_begun(view)] + [view for view in views if view.decoding]
    arriving = [view for _, view in waiting]
    if not any(view.aged_in for view in views) and (aged := aging_in(arriving, now)) is not None:
        waiting[aged][0].aged_in = True
        arriving[aged] = replace(arriving[aged], aged_in=True)
    decisions = admit(arriving, present, now, means(), others)
    rejected = {
        sequence.id for (sequence, _), admitted in zip(waiting, decisions, strict=True) if not admitted
    }
    return [entry for entry in prompts if entry[0].id not in rejected]


def _tentative_chunks(prefilling: list[Prefilling]) -> dict[int, PrefillChunk]:
    """Return chunks of one token for the sequences that may fail to start, by sequence id. The tokens of a
    larger chunk would be lost to the sequences that they wait for."""
    return {sequence.id: PrefillChunk(1, 1) for sequence, _ in prefilling if may_fail_to_start(sequence)}


def _edit_stable_chunks(
    prompts: list[Prefilling], limits: dict[int, PrefillChunk], max_chunk: int
) -> dict[int, PrefillChunk]:
    """Return chunks for the prompt streams among `prompts`, by sequence id: within `limits`, and without
    tokens that are less edit-stable than the first one."""
    stable = {}
    for sequence, view in prompts:
        if not view.complete:
            chunk = limits.get(sequence.id) or PrefillChunk(max_chunk, 1)
            tokens = min(chunk.tokens, sequence.edit_stable_tokens)
            stable[sequence.id] = PrefillChunk(tokens, min(tokens, chunk.due))
    return stable


def workload(
    sequences: Sequence[EngineSequence],
    config: EngineConfig,
    order: Order,
    arriving: EngineSequence,
    speculation: Speculation,
    averages: RunningAverages,
) -> Load:
    """Return the load of `sequences`, by which the feasibility of the sequence `arriving` is judged. Its
    prompt is complete."""
    deadline = arriving.deadline
    prompts = [sequence for sequence in sequences if not sequence.outputs]
    if order.by_targets and deadline is not None:
        prompts = [
            sequence
            for sequence in prompts
            if sequence.deadline is not None and sequence.deadline <= deadline
        ]
    kv_tokens = sum(sequence.kv.computed[TARGET] for sequence in sequences)
    return Load(
        decoding=sum(map(_decodes_now, sequences)),
        queued_tokens=sum(sequence.todo(idle=False) for sequence in prompts),
        max_prompt_tokens=min(config.max_chunk, config.max_num_batched_tokens),
        mean_output=averages.output,
        means=speculation.means(kv_tokens, MAX_DEPTH),
    )


def _decodes_now(sequence: EngineSequence) -> bool:
    """Whether a sequence decodes on this worker, or will when its KV has landed."""
    expected = sequence.status is SequenceStatus.AWAITING_KV and sequence.decodes
    return bool(sequence.kv.blocks) and (sequence.outputs > 0 or expected)
