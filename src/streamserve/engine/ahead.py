"""Plan a step before the results of the previous step are known, so that a device need not wait for the host
(async scheduling in vLLM, overlap scheduling in SGLang).

    host     plan 1 | launch 1 | plan 2 | launch 2 | results of 1, commit | plan 3 | launch 3 | results of 2 …
    device            ███████████ step 1 ███████████ ███████████ step 2 ███████████ …

The next step is known in advance if every sequence only goes on: one token each, which is on the device when
its KV is computed. A sequence that turns out to have ended has a row in one step too many. The row's result
is dropped. Its KV goes to the slot after the sequence's last token, where it can hurt no other sequence: a
block is in the prefix index only if all its slots hold computed tokens, and this slot does not. If the block
is allocated again, its new owner's step is launched later on the same device, which runs steps in order.

Nothing else is planned ahead: new requests, edits, and steps for which memory is short wait for the results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

from streamserve.contracts.plan import TARGET, UNKNOWN_TOKEN, Span, StepPlan
from streamserve.contracts.tree import root
from streamserve.engine.scheduler import Proposal, Scheduler
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import TransferRole
from streamserve.speculation.controller import Round

MAX_AHEAD = 64
"""Maximum number of steps planned ahead in a row. The step after them is planned with all results known. With
a drafter the number is smaller (Speculation.steps_between), because the policy must decide at times."""


@dataclass(frozen=True)
class Flight:
    """A planned or launched step.

    * `members`: the sequences of its spans, in order.
    * `began`: when its planning began.
    * `ahead`: its number in a row of steps planned ahead, from 1; 0 if it was planned with all results known.
    """

    plan: StepPlan
    round: Round
    proposals: Sequence[Proposal]
    members: Sequence[EngineSequence]
    began: float
    ahead: int = 0

    @cached_property
    def query_tokens(self) -> int:
        spans = self.plan.spans
        return len(spans) if self.ahead else sum(span.query_tokens for span in spans)

    @cached_property
    def kv_tokens(self) -> int:
        return sum(span.start for span in self.plan.spans)

    def standing(self, live: Mapping[int, EngineSequence]) -> list[bool]:
        """Return, for each span, whether its result is still valid: its sequence is `live` and has not been
        edited meanwhile."""
        pairs, get = zip(self.plan.spans, self.members, strict=True), live.get
        if not self.ahead:
            return [get(span.sequence) is member for span, member in pairs]
        return [
            get(span.sequence) is member
            and member.kv.computed[TARGET] == span.start == len(member.tokens) - 1
            for span, member in pairs
        ]


def plan_ahead(
    flight: Flight, scheduler: Scheduler, limit: int = MAX_AHEAD
) -> tuple[StepPlan, list[EngineSequence]] | None:
    """Return the plan of the step after `flight`, whose results are not known yet, and its sequences. Returns
    None if the step depends on these results, or `limit` steps in a row were planned ahead. Allocates the
    blocks that the step needs."""
    config = scheduler.config
    preempts = config.preempt_every and (scheduler.steps + 1) % config.preempt_every == 0
    if flight.ahead >= limit or preempts:
        return None
    if not (flight.ahead or all(map(_only_goes_on, flight.plan.spans, flight.members))):
        return None
    if flight.plan.swap_out or flight.plan.swap_in or scheduler.swap.moving or _others(flight, scheduler):
        return None
    standing = flight.standing(scheduler.sequences)
    going = [
        pair
        for pair in compress(zip(flight.plan.spans, flight.members, strict=True), standing)
        if pair[1].outputs_left(config.max_model_len) > 1
    ]
    tables, size = scheduler.tables, config.block_size
    starts = [span.start + len(span.tokens) for span, _ in going]
    full = [pair for pair, start in zip(going, starts, strict=True) if start == len(pair[1].kv.blocks) * size]
    if not going or len(full) > tables.pool.free:
        return None
    scheduler.steps += 1
    for span, sequence in full:
        tables.grow(sequence, len(span.tokens) + 1)
    unknown, tree = [UNKNOWN_TOKEN], root(UNKNOWN_TOKEN)
    spans = [
        Span(
            span.sequence, start, unknown, sequence.kv.blocks.copy(), tree, span.choices, follows=True,
            adapter=span.adapter,
        )
        for (span, sequence), start in zip(going, starts, strict=True)
    ]  # fmt: skip
    return StepPlan(scheduler.steps, [], [], [], spans), [sequence for _, sequence in going]


def _only_goes_on(span: Span, sequence: EngineSequence) -> bool:
    """Whether a sequence gets exactly one new token in the step of `span`, and the next step only has to
    compute this token, unless the sequence ends with it."""
    return (
        span.tree is not None
        and len(span.tree.tokens) == 1
        and len(span.choices) == 1
        and span.prompt_logprobs is None
        and not sequence.stream.open
        and sequence.transfer.role is TransferRole.LOCAL
    )


def _others(flight: Flight, scheduler: Scheduler) -> bool:
    """Whether any sequence outside the step has something to compute."""
    members = {sequence.id for sequence in flight.members}
    return not members.issuperset(scheduler.sequences) and any(
        sequence.status.schedulable and sequence.todo(idle=True) > 0
        for sequence in scheduler.sequences.values()
        if sequence.id not in members
    )
