"""Batch candidates of a step: the service order, and the query tokens that each may have."""

from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from streamserve.engine.plan import TARGET
from streamserve.engine.sequence import Sequence
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import Submit
from streamserve.scheduling.feasibility import Load
from streamserve.scheduling.ordering import (
    CAPPED,
    COMPLETE_FIRST,
    EXCLUSIVE,
    PATIENCE,
    Candidate,
    batch_cap,
    rank,
    turns,
)
from streamserve.scheduling.prefill import Chunk, Company, Prompt, chunks
from streamserve.scheduling.slo_admission import Request, admitted
from streamserve.speculation.controller import Speculation

FIRST_OUTPUT = 64.0
"""Assumed output length in tokens until an output has ended."""
GRACE = PATIENCE / 10
"""Seconds that a prompt waits at least for other requests' targets, before it is admitted at their cost."""
ENOUGH = 4
"""The prompt streams considered in a step hold about this many token budgets: there may be hundreds of
streams."""
RECENT = 0.05
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

    output: float = FIRST_OUTPUT
    step: float = 1.0
    prompts: float = 0.0
    draft_tokens: float = 0.0
    drafting: float = 0.0

    def ended(self, outputs: int) -> None:
        """Record an output that has ended."""
        self.output += RECENT * (outputs - self.output)

    def stepped(self, decoding: int, tokens: int, prompts: int, draft_tokens: int, drafting: float) -> None:
        """Record a step. It yielded `tokens` for `decoding` sequences by `draft_tokens`, which took
        `drafting` seconds before it, and computed `prompts` prompt tokens in the same batch."""
        self.prompts += RECENT * (prompts - self.prompts)
        if decoding:
            self.step += RECENT * (tokens / decoding - self.step)
            self.draft_tokens += RECENT * (draft_tokens / decoding - self.draft_tokens)
            self.drafting += RECENT * (drafting - self.drafting)


@dataclass(frozen=True)
class BatchCandidates:
    """The batch candidates of one step.

    * `ranked`: the order in which sequences keep sequence slots and memory, highest rank first.
    * `turns`: the service order, in which sequences with something to compute get query tokens, of `budget`
      in all.
    * `chunks`: bounds of the prompt tokens, by sequence id; sequences not in it are bounded only by the
      maximum chunk.
    * `exclusive`: no sequence decodes in a batch with a prompt.
    * `apart`: no prompt stream is computed in a batch with a complete prompt.
    * `idle`: nothing is left to compute but the tails of prompt streams.
    """

    ranked: list[Sequence]
    turns: list[Sequence]
    budget: int
    chunks: dict[int, Chunk]
    exclusive: bool = False
    apart: bool = False
    idle: bool = False

    def later(self, sequence: Sequence) -> bool:
        """Whether the sequence is deferred: it only gets what complete prompts leave."""
        return self.apart and sequence.open


def batch_candidates(
    sequences: List[Sequence],
    config: EngineConfig,
    now: float,
    speculation: Speculation,
    pace: RunningAverages,
) -> BatchCandidates:
    """Return the batch candidates of a step that begins at `now`."""
    cost, order, budget = speculation.step_cost, config.order, config.max_num_batched_tokens
    apart, token_seconds = order in COMPLETE_FIRST, cost(config.max_chunk, 0) / config.max_chunk
    todo = [sequence.todo(idle=False) for sequence in sequences]
    if idle := not any(todo):
        todo = [sequence.todo(idle) for sequence in sequences]
    candidates = [
        _candidate(sequence, token_seconds) if left else _resting(sequence)
        for sequence, left in zip(sequences, todo, strict=True)
    ]
    ranking = rank(order, candidates, now)
    ranked = [sequences[i] for i in ranking]
    needs = [candidate.need for candidate in candidates if candidate.decoding]
    taking = turns(order, candidates, [i for i in ranking if todo[i]], now)
    working = [sequences[i] for i in taking]
    prompts = [sequences[i] for i in taking if not candidates[i].decoding]
    prompts = [one for one in prompts if not (one.reserved or one.waits)]
    kv_tokens = sum(sequence.computed[TARGET] for sequence in working)
    if order in CAPPED:
        held = list(accumulate((one.computed[TARGET] for one in working if one.decoding), initial=0))
        budget = batch_cap(needs, lambda rows: cost(rows, held[min(rows, len(held) - 1)]), budget)
    wanted: dict[int, Chunk] = {}
    if order == "slo" and prompts:
        wanted = {one.id: Chunk(0, 0) for one in prompts}
        prompts = _taken_in(sequences, prompts, now, speculation, kv_tokens, pace)
        draft_tokens = round(len(needs) * pace.draft_tokens)
        drafting = pace.drafting if draft_tokens else 0.0
        company = Company(
            needs, cache(lambda rows: drafting + cost(rows + draft_tokens, kv_tokens)),
            budget, config.max_chunk, pace.step,
        )  # fmt: skip
        for open in (False, True):  # prompt streams after complete prompts
            group = [one for one in prompts if one.open == open]
            group = _first(group, ENOUGH * budget, idle) if open else group
            if not group:
                continue
            given = [_prompt(one, now, idle) for one in group]
            found = chunks(given, company, pace.output, config.prefill_share)
            wanted |= {one.id: chunk for one, chunk in zip(group, found, strict=True)}
    # Tokens planned for a sequence that cannot start would be lost to the sequences it waits for. So it gets
    # one, to begin with if it should start after all. The same holds for a sequence with a transfer
    # reservation: the running ones may be waiting for the blocks reserved for it.
    if order == "slo":
        waiting = [one for one in working if one.waits or (one.granted and not one.running)]
        wanted |= {one.id: Chunk(1, 1) for one in waiting if not one.reserved}
    if apart:
        wanted |= {one.id: _steady(one, wanted.get(one.id), config) for one in prompts if one.open}
    return BatchCandidates(ranked, working, budget, wanted, order == EXCLUSIVE, apart, idle)


def _first(prompts: list[Sequence], tokens: int, idle: bool) -> list[Sequence]:
    """Return the first prompts that together have `tokens` tokens to compute."""
    sums = accumulate(one.todo(idle) for one in prompts)
    return prompts[: 1 + sum(1 for so_far in sums if so_far < tokens)]


def _taken_in(
    sequences: List[Sequence],
    prompts: List[Sequence],
    now: float,
    speculation: Speculation,
    kv_tokens: int,
    pace: RunningAverages,
) -> list[Sequence]:
    """Return those of the `prompts` that continue or begin: all but those that would make other requests miss
    their targets. One of the latter at a time is aged in when it has reached the maximum wait."""
    waiting = [one for one in prompts if _gated(one)]
    if not waiting or all(one.params.slo.tpot_ms is None for one in sequences):
        return list(prompts)
    begun = [one for one in prompts if not (_gated(one) or one.open or one.handoff)]
    present = [_request(one, now) for one in (*begun, *(one for one in sequences if one.decoding))]
    patient = any(one.forced for one in sequences)
    asked = []
    for one in waiting:
        timely = one.deadline is not None and not one.late(now)
        forced = one.forced or not (patient or timely or now - one.arrival <= GRACE)
        patient = patient or forced
        asked.append(_request(one, now, forced))
        one.forced = forced
    means = speculation.means(kv_tokens, round(pace.prompts))
    verdict = admitted(asked, present, means)
    held = {one.id for one, goes in zip(waiting, verdict, strict=True) if not goes}
    return [one for one in prompts if one.id not in held]


def _request(sequence: Sequence, now: float, forced: bool = False) -> Request:
    if sequence.decoding:
        return Request(sequence.tpot(now), priority=sequence.priority)
    deadline = sequence.deadline
    due_in = None if deadline is None or deadline <= now else deadline - now
    return Request(sequence.tpot(now), sequence.todo(idle=False), due_in, sequence.priority, forced)


def _gated(sequence: Sequence) -> bool:
    """Whether a prompt has not begun yet and will decode on this worker once it is computed."""
    return not (sequence.running or sequence.outputs or sequence.open or sequence.handoff)


def workload(
    sequences: List[Sequence],
    config: EngineConfig,
    message: Submit,
    speculation: Speculation,
    pace: RunningAverages,
) -> Load:
    """Return the load before and together with a request that arrives now."""
    ttft = message.params.slo.ttft_ms
    deadline = None if ttft is None else message.arrival + ttft / 1000
    prompts = [one for one in sequences if not one.outputs]
    if config.order == "slo" and deadline is not None:
        prompts = [one for one in prompts if one.deadline is not None and one.deadline <= deadline]
    kv_tokens = sum(sequence.computed[TARGET] for sequence in sequences)
    draft, cover, depth = speculation.alone()
    return Load(
        decoding=sum(one.running and bool(one.outputs) for one in sequences),
        ahead=sum(one.todo(idle=False) for one in prompts),
        seconds=lambda rows: speculation.step_cost(rows, kv_tokens),
        most=min(config.max_chunk, config.max_num_batched_tokens),
        mean_output=pace.output,
        draft=draft,
        cover=cover,
        depth=depth,
    )


def _resting(sequence: Sequence) -> Candidate:
    """Return the candidate for a sequence with nothing to compute now: only what its rank depends on. Idle
    prompt streams are the first to lose their memory."""
    return Candidate(
        arrival=sequence.arrival,
        priority=sequence.priority,
        computed=sequence.computed[TARGET],
        complete=not sequence.open,
        last_chunk_at=sequence.chunk_at,
        asked_at=sequence.asked_at,
        resting=sequence.open,
    )


def _candidate(sequence: Sequence, token_seconds: float) -> Candidate:
    if sequence.open and not sequence.early:  # there may be hundreds: this path is cheap
        return Candidate(
            arrival=sequence.arrival,
            priority=sequence.priority,
            remaining=sequence.pending,
            work=sequence.pending * token_seconds,
            computed=sequence.computed[TARGET],
            running=bool(sequence.blocks),
            complete=False,
            last_chunk_at=sequence.chunk_at,
            asked_at=sequence.arrival,
            steady=sequence.steady,
        )
    return Candidate(
        arrival=sequence.arrival,
        priority=sequence.priority,
        remaining=sequence.pending,
        work=sequence.pending * token_seconds if sequence.streamed else 0.0,
        computed=sequence.computed[TARGET],
        running=sequence.running,
        decoding=sequence.decoding,
        complete=not sequence.open,
        last_chunk_at=sequence.chunk_at,
        asked_at=sequence.asked_at,
        steady=sequence.steady if sequence.open else 0,
        deadline=sequence.deadline,
        need=sequence.need,
    )


def _steady(sequence: Sequence, given: Chunk | None, config: EngineConfig) -> Chunk:
    """Limit a prompt stream's chunk to tokens that are as edit-stable as its first one."""
    given = given or Chunk(config.max_chunk, 1)
    most = min(given.tokens, sequence.steady_rows)
    return Chunk(most, min(most, given.due))


def _prompt(sequence: Sequence, now: float, idle: bool) -> Prompt:
    deadline = sequence.deadline
    due_in = None if deadline is None else deadline - now
    waited = 0.0 if sequence.open else max(0.0, now - sequence.asked_at)
    found = 0 if sequence.running else sequence.found
    remaining = max(1, sequence.todo(idle) - found)
    length = max(remaining, len(sequence.tokens) - sequence.found)
    return Prompt(remaining, length, waited, due_in, sequence.running, sequence.streamed)
