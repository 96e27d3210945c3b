"""Invariants of an engine after every step, and of every plan: the `check` setting asserts them.

    plan    query tokens within the budget; each has a slot; written blocks belong to their sequence alone
    pool    references = holders of the block: tables, copies to the host, transfers, quarantine
    group   computed ≤ slots held, in every KV cache group; a host block belongs to one sequence
    status  a sequence runs, or is swapped, or holds no KV; its transfer role is one of those that exist

Serving does not need these checks: they find a wrong count where it is made, not where it shows.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from streamserve.engine.block_tables import BlockTables
from streamserve.engine.kv_transfer import KVTransferManager
from streamserve.engine.plan import TARGET, StepPlan
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence


class InvariantError(AssertionError):
    """An engine invariant is violated; the message says which."""


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """Check the plan of a step. Raises InvariantError if it asks for what a step must not do."""
    _raise_first(_plan_faults(plan, scheduler))


def check_state(scheduler: Scheduler, transfers: KVTransferManager) -> None:
    """Check the engine's counts between steps. Raises InvariantError if one is wrong."""
    _raise_first(_state_faults(scheduler, transfers))


def _raise_first(faults: Iterable[str]) -> None:
    for fault in faults:
        raise InvariantError(fault)


def _plan_faults(plan: StepPlan, scheduler: Scheduler) -> Iterator[str]:
    config, tables = scheduler.config, scheduler.tables
    query_tokens = sum(span.query_tokens for span in plan.spans)
    if query_tokens > config.max_num_batched_tokens:
        yield f"the step has {query_tokens} query tokens, more than {config.max_num_batched_tokens}"
    slots = sum(len(scheduler.sequences[span.sequence].choices) for span in plan.spans)
    if slots > config.max_num_seqs:
        yield f"the step has {slots} output choices, more than {config.max_num_seqs}"
    writers: Counter[int] = Counter()
    for span in plan.spans:
        if span.start + span.query_tokens > len(span.blocks) * config.block_size:
            yield f"sequence {span.sequence} has no slot for all of its {span.query_tokens} query tokens"
            continue
        last = tables.blocks_for(span.start + span.query_tokens)
        writers.update(span.blocks[span.start // config.block_size : last])
    copied = {block for pair in plan.swap_out for block in pair[:1]} | {block for _, block in plan.swap_in}
    for block, count in writers.items():
        if count > 1 or not tables.pool.writable(block):
            yield f"block {block} is written, but is not its sequence's alone"
        if block in copied:
            yield f"block {block} is written while it is swapped"


def _state_faults(scheduler: Scheduler, transfers: KVTransferManager) -> Iterator[str]:
    sequences = scheduler.sequences.values()
    holders = Counter(block for sequence in sequences for block in sequence.blocks)
    holders.update(transfers.held_blocks())
    yield from scheduler.tables.pool.faults(holders)
    yield from scheduler.swap.faults(sequence.swapped for sequence in sequences)
    yield from transfers.faults()
    for sequence in sequences:
        for fault in _sequence_faults(sequence, scheduler.tables):
            yield f"sequence {sequence.id} of {sequence.request}: {fault}"
    taken = Counter((s.request, s.attempt, choice) for s in sequences for choice in s.choices)
    yield from (f"{key} is computed by {count} sequences" for key, count in taken.items() if count > 1)


def _sequence_faults(sequence: Sequence, tables: BlockTables) -> Iterator[str]:
    size, computed = tables.block_size, sequence.computed
    if sequence.blocks and sequence.swapped:
        yield "it holds blocks and is swapped"
    if len(computed) != tables.groups:
        yield f"it counts {len(computed)} KV groups of {tables.groups}"
    slots = (len(sequence.blocks) or len(sequence.swapped)) * size
    if max(computed) > slots:
        yield f"{computed} tokens are computed, but there are {slots} slots"
    if max(computed) > len(sequence.tokens):
        yield f"{computed} tokens are computed of {len(sequence.tokens)}"
    if sequence.prompt_length > len(sequence.tokens) or not sequence.choices:
        yield f"it has {len(sequence.tokens)} tokens for choices {sequence.choices}"
    if len(sequence.hashes) * size > len(sequence.tokens):
        yield f"{len(sequence.hashes)} blocks have hashes, of {len(sequence.tokens)} tokens"
    if (sequence.handoff and sequence.reserved) or (sequence.granted and not sequence.handoff):
        yield "it hands its KV over and receives it, or holds a reservation without handing over"
    if sequence.held and not (sequence.handoff or sequence.reserved):
        yield "it is excluded from steps without a transfer"
    if sequence.reserved and sequence.held and len(sequence.blocks) * size <= computed[TARGET]:
        yield "its reservation has no blocks"
