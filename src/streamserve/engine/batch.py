"""Batch candidates of a step: the service order, and the query tokens that each may have."""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from streamserve.engine.plan import TARGET
from streamserve.engine.reservations import may_fail_to_start
from streamserve.engine.sequence import Sequence
from streamserve.engine.status import SequenceStatus, TransferRole
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import Submit
from streamserve.scheduling.feasibility import Load
from streamserve.scheduling.ordering import (
    CAPPED,
    COMPLETE_FIRST,
    EXCLUSIVE,
    MAX_WAIT,
    Candidate,
    batch_cap,
    rank,
    service_order,
)
from streamserve.scheduling.prefill import Chunk, DecodeBatch, Prompt, chunks
from streamserve.scheduling.slo_admission import Request, admit
from streamserve.speculation.controller import Speculation
from streamserve.speculation.slo import LatencyRequirement

INITIAL_OUTPUT = 64.0
"""Assumed output length in tokens until an output has ended."""
GRACE = MAX_WAIT / 10
"""Seconds that a prompt waits at least for other requests' targets, before it is admitted at their cost."""
STREAM_BUDGETS = 4
"""The prompt streams considered in a step hold about this many token budgets: there may be hundreds of
streams."""
RECENT_WEIGHT = 0.05
"""Weight of the latest observation in a running average."""


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
        """Record an output that has ended."""
        self.output += RECENT_WEIGHT * (outputs - self.output)

    def stepped(self, decoding: int, tokens: int, prompts: int, draft_tokens: int, drafting: float) -> None:
        """Record a step. It yielded `tokens` for `decoding` sequences by `draft_tokens`, which took
        `drafting` seconds before it, and computed `prompts` prompt tokens in the same batch."""
        self.prompts += RECENT_WEIGHT * (prompts - self.prompts)
        if decoding:
            self.step += RECENT_WEIGHT * (tokens / decoding - self.step)
            self.draft_tokens += RECENT_WEIGHT * (draft_tokens / decoding - self.draft_tokens)
            self.drafting += RECENT_WEIGHT * (drafting - self.drafting)


@dataclass(frozen=True)
class BatchCandidates:
    """The batch candidates of one step.

    * `ranked`: the order in which sequences keep sequence slots and memory, highest rank first.
    * `service_order`: the sequences with something to compute, in the order in which they get query tokens,
      of `budget` in all.
    * `chunks`: bounds of the prompt tokens, by sequence id; sequences not in it are bounded only by the
      maximum chunk.
    * `exclusive`: no sequence decodes in a batch with a prompt.
    * `defer_streams`: no prompt stream is computed in a batch with a complete prompt.
    * `idle`: nothing is left to compute but the tails of prompt streams.
    """

    ranked: list[Sequence]
    service_order: list[Sequence]
    budget: int
    chunks: dict[int, Chunk]
    exclusive: bool = False
    defer_streams: bool = False
    idle: bool = False

    def deferred(self, sequence: Sequence) -> bool:
        """Whether the sequence is deferred: it only gets what complete prompts leave."""
        return self.defer_streams and sequence.stream.open


def batch_candidates(
    sequences: List[Sequence],
    config: EngineConfig,
    now: float,
    speculation: Speculation,
    averages: RunningAverages,
) -> BatchCandidates:
    """Return the batch candidates of a step that begins at `now`."""
    cost, order, budget = speculation.step_cost, config.order, config.max_num_batched_tokens
    defer_streams, token_seconds = order in COMPLETE_FIRST, cost(config.max_chunk, 0) / config.max_chunk
    todo = [sequence.todo(idle=False) for sequence in sequences]
    if idle := not any(todo):
        todo = [sequence.todo(idle) for sequence in sequences]
    candidates = [
        _candidate(sequence, token_seconds) if left else _idle_candidate(sequence)
        for sequence, left in zip(sequences, todo, strict=True)
    ]
    ranking = rank(order, candidates, now)
    serving = service_order(order, candidates, [i for i in ranking if todo[i]], now)
    ordered = [sequences[i] for i in serving]
    requirements = [candidate.requirement for candidate in candidates if candidate.decoding]
    if order in CAPPED:
        budget = _capped_budget(ordered, requirements, cost, budget)
    prefilling = [sequences[i] for i in serving if not candidates[i].decoding]
    prompts = [
        sequence
        for sequence in prefilling
        if not sequence.passed_over and sequence.transfer.role is not TransferRole.RECEIVER
    ]
    limits: dict[int, Chunk] = {}
    if order == "slo":
        if prompts:
            step = _Step(sequences, ordered, requirements, now, idle)
            limits = _slo_chunks(step, prompts, config, speculation, averages)
        # Tokens planned for a sequence that cannot start would be lost to the sequences it waits for. So it
        # gets one token, in case it can start after all.
        limits |= {sequence.id: Chunk(1, 1) for sequence in prefilling if may_fail_to_start(sequence)}
    if defer_streams:
        limits |= {
            sequence.id: _edit_stable_chunk(sequence, limits.get(sequence.id), config)
            for sequence in prompts
            if sequence.stream.open
        }
    ranked = [sequences[i] for i in ranking]
    return BatchCandidates(ranked, ordered, budget, limits, order == EXCLUSIVE, defer_streams, idle)


@dataclass(frozen=True)
class _Step:
    """A step at `now`, over `sequences`.

    * `ordered`: those that have something to compute, in service order.
    * `requirements`: of those that decode.
    * `idle`: as in BatchCandidates.
    """

    sequences: List[Sequence]
    ordered: list[Sequence]
    requirements: list[LatencyRequirement]
    now: float
    idle: bool


def _capped_budget(
    ordered: list[Sequence],
    requirements: list[LatencyRequirement],
    cost: Callable[[int, int], float],
    budget: int,
) -> int:
    """Return the query tokens of a step that lets the decoding sequences meet their requirements, `budget` at
    most."""
    decoding = (sequence.kv.computed[TARGET] for sequence in ordered if sequence.decoding)
    kv_tokens = list(accumulate(decoding, initial=0))
    return batch_cap(
        requirements,
        lambda query_tokens: cost(query_tokens, kv_tokens[min(query_tokens, len(kv_tokens) - 1)]),
        budget,
    )


def _slo_chunks(
    step: _Step,
    prompts: list[Sequence],
    config: EngineConfig,
    speculation: Speculation,
    averages: RunningAverages,
) -> dict[int, Chunk]:
    """Return the chunks of the `prompts`, by sequence id, that let the decoding sequences meet their
    requirements; no tokens for prompts that are not admitted."""
    limits = {sequence.id: Chunk(0, 0) for sequence in prompts}
    cost, budget = speculation.step_cost, config.max_num_batched_tokens
    kv_tokens = sum(sequence.kv.computed[TARGET] for sequence in step.ordered)
    draft_tokens = round(len(step.requirements) * averages.draft_tokens)
    drafting = averages.drafting if draft_tokens else 0.0
    decode_batch = DecodeBatch(
        step.requirements,
        cache(lambda query_tokens: drafting + cost(query_tokens + draft_tokens, kv_tokens)),
        budget, config.max_chunk, averages.step,
    )  # fmt: skip
    prompts = _admitted_prompts(step.sequences, prompts, step.now, speculation, kv_tokens, averages)
    for open in (False, True):  # prompt streams after complete prompts
        group = [sequence for sequence in prompts if sequence.stream.open == open]
        group = _first_prompts(group, STREAM_BUDGETS * budget, step.idle) if open else group
        if not group:
            continue
        inputs = [_prompt(sequence, step.now, step.idle) for sequence in group]
        planned = chunks(inputs, decode_batch, averages.output, config.prefill_share)
        limits |= {sequence.id: chunk for sequence, chunk in zip(group, planned, strict=True)}
    return limits


def _first_prompts(prompts: list[Sequence], tokens: int, idle: bool) -> list[Sequence]:
    """Return the first prompts that together have `tokens` tokens to compute."""
    sums = accumulate(sequence.todo(idle) for sequence in prompts)
    return prompts[: 1 + sum(1 for so_far in sums if so_far < tokens)]


def _admitted_prompts(
    sequences: List[Sequence],
    prompts: List[Sequence],
    now: float,
    speculation: Speculation,
    kv_tokens: int,
    averages: RunningAverages,
) -> list[Sequence]:
    """Return those of the `prompts` that continue or begin: all but those that would make other requests miss
    their targets. One of the latter at a time is aged in when it has reached the maximum wait."""
    waiting = [sequence for sequence in prompts if _needs_admission(sequence)]
    if not waiting or all(sequence.params.slo.tpot_ms is None for sequence in sequences):
        return list(prompts)
    begun = [
        sequence
        for sequence in prompts
        if not (_needs_admission(sequence) or sequence.stream.open or sequence.transfer.role.sends)
    ]
    present = [
        _request(sequence, now)
        for sequence in (*begun, *(sequence for sequence in sequences if sequence.decoding))
    ]
    any_aged_in = any(sequence.aged_in for sequence in sequences)
    requests = []
    for sequence in waiting:
        timely = sequence.deadline is not None and not sequence.late(now)
        aged_in = sequence.aged_in or not (any_aged_in or timely or now - sequence.arrival <= GRACE)
        any_aged_in = any_aged_in or aged_in
        requests.append(_request(sequence, now, aged_in))
        sequence.aged_in = aged_in
    means = speculation.means(kv_tokens, round(averages.prompts))
    decisions = admit(requests, present, means)
    rejected = {sequence.id for sequence, admitted in zip(waiting, decisions, strict=True) if not admitted}
    return [sequence for sequence in prompts if sequence.id not in rejected]


def _request(sequence: Sequence, now: float, aged_in: bool = False) -> Request:
    if sequence.decoding:
        return Request(sequence.tpot(now), priority=sequence.priority)
    deadline = sequence.deadline
    due_in = None if deadline is None or deadline <= now else deadline - now
    return Request(sequence.tpot(now), sequence.todo(idle=False), due_in, sequence.priority, aged_in)


def _needs_admission(sequence: Sequence) -> bool:
    """Whether a prompt has not begun yet and will decode on this worker once it is computed."""
    return not (
        sequence.status is SequenceStatus.RUNNING
        or sequence.outputs
        or sequence.stream.open
        or sequence.transfer.role.sends
    )


def workload(
    sequences: List[Sequence],
    config: EngineConfig,
    message: Submit,
    speculation: Speculation,
    averages: RunningAverages,
) -> Load:
    """Return the load before and together with a request that arrives now."""
    ttft = message.params.slo.ttft_ms
    deadline = None if ttft is None else message.arrival + ttft / 1000
    prompts = [sequence for sequence in sequences if not sequence.outputs]
    if config.order == "slo" and deadline is not None:
        prompts = [
            sequence
            for sequence in prompts
            if sequence.deadline is not None and sequence.deadline <= deadline
        ]
    kv_tokens = sum(sequence.kv.computed[TARGET] for sequence in sequences)
    draft_seconds, acceptance, max_depth = speculation.single_request_estimates()
    return Load(
        decoding=sum(bool(sequence.kv.blocks and sequence.outputs) for sequence in sequences),
        queued_tokens=sum(sequence.todo(idle=False) for sequence in prompts),
        step_seconds=lambda query_tokens: speculation.step_cost(query_tokens, kv_tokens),
        max_prompt_tokens=min(config.max_chunk, config.max_num_batched_tokens),
        mean_output=averages.output,
        draft_seconds=draft_seconds,
        acceptance=acceptance,
        max_depth=max_depth,
    )


def _idle_candidate(sequence: Sequence) -> Candidate:
    """Return the candidate for a sequence with nothing to compute now: only what its rank depends on. Idle
    prompt streams are the first to lose their memory."""
    return Candidate(
        arrival=sequence.arrival,
        priority=sequence.priority,
        computed=sequence.kv.computed[TARGET],
        complete=not sequence.stream.open,
        last_chunk_at=sequence.stream.last_chunk_at,
        completed_at=sequence.completed_at,
        idle=sequence.stream.open,
    )


def _candidate(sequence: Sequence, token_seconds: float) -> Candidate:
    stream, computed = sequence.stream, sequence.kv.computed[TARGET]
    remaining = len(sequence.tokens) - computed
    if stream.open and not stream.early:  # there may be hundreds: this path is cheap
        return Candidate(
            arrival=sequence.arrival,
            priority=sequence.priority,
            remaining=remaining,
            prefill_seconds=remaining * token_seconds,
            computed=computed,
            running=sequence.status is SequenceStatus.RUNNING,
            complete=False,
            last_chunk_at=stream.last_chunk_at,
            completed_at=sequence.arrival,
            edit_stability=sequence.edit_stability,
        )
    return Candidate(
        arrival=sequence.arrival,
        priority=sequence.priority,
        remaining=remaining,
        prefill_seconds=remaining * token_seconds if sequence.streamed else 0.0,
        computed=computed,
        running=sequence.status is SequenceStatus.RUNNING,
        decoding=sequence.decoding,
        complete=not stream.open,
        last_chunk_at=stream.last_chunk_at,
        completed_at=sequence.completed_at,
        edit_stability=sequence.edit_stability if stream.open else 0,
        deadline=sequence.deadline,
        requirement=sequence.requirement,
    )


def _edit_stable_chunk(sequence: Sequence, chunk: Chunk | None, config: EngineConfig) -> Chunk:
    """Limit a prompt stream's chunk to tokens that are as edit-stable as its first one."""
    chunk = chunk or Chunk(config.max_chunk, 1)
    tokens = min(chunk.tokens, sequence.edit_stable_tokens)
    return Chunk(tokens, min(tokens, chunk.due))


def _prompt(sequence: Sequence, now: float, idle: bool) -> Prompt:
    deadline = sequence.deadline
    due_in = None if deadline is None else deadline - now
    waited = 0.0 if sequence.stream.open else max(0.0, now - sequence.completed_at)
    running = sequence.status is SequenceStatus.RUNNING
    planned = 0 if running else sequence.kv.cached
    remaining = max(1, sequence.todo(idle) - planned)
    length = max(remaining, len(sequence.tokens) - sequence.kv.cached)
    return Prompt(remaining, length, waited, due_in, running, sequence.streamed)
