"""Invariants of every plan, and of an engine after every step. The `check` setting asserts them.

    plan    query tokens within the budget; each has a slot; written blocks belong to their sequence alone
    pool    references = holders of the block: tables, copies to the host, transfers, quarantine
    group   computed ≤ slots held, in every KV cache group; a host block belongs to one sequence
    status  it agrees with the blocks and host blocks held, the transfer role and the reservation
    advance a step computes something if any sequence can be computed (progress.py)

Serving does not need these checks. They show an error in the step that makes it, not where it causes harm.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from streamserve.contracts.plan import TARGET, StepPlan
from streamserve.engine.block_tables import BlockTables
from streamserve.engine.kv_transfer import KVTransferManager
from streamserve.engine.progress import could_compute
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import SequenceStatus, TransferRole


class InvariantError(AssertionError):
    """An engine invariant is violated; the message says which."""


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """Check the plan of a step. Raises InvariantError if it violates an invariant."""
    _raise_first(_plan_faults(plan, scheduler))


def check_state(scheduler: Scheduler, transfers: KVTransferManager) -> None:
    """Check the engine's state between steps. Raises InvariantError if it violates an invariant."""
    _raise_first(_state_faults(scheduler, transfers))


def check_advance(scheduler: Scheduler, transfers: KVTransferManager) -> None:
    """Check, after a step that computed nothing, that no sequence could have been computed. Raises
    InvariantError, with a description of all sequences."""
    if could := could_compute(scheduler, transfers):
        numbers = ", ".join(str(sequence.id) for sequence in could)
        described = "; ".join(map(_described, scheduler.sequences.values()))
        raise InvariantError(f"a step computed nothing, though {numbers} could be computed: {described}")


def _described(sequence: EngineSequence) -> str:
    return (
        f"{sequence.id} of {sequence.request}: {sequence.status.label}, "
        f"priority {sequence.submitted.priority}, {len(sequence.kv.blocks)} blocks, "
        f"{sequence.pending} of {len(sequence.tokens)} tokens pending"
    )


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
    holders = Counter(block for sequence in sequences for block in sequence.kv.blocks)
    holders.update(transfers.held_blocks())
    yield from scheduler.tables.pool.faults(holders)
    yield from scheduler.swap.faults(sequence.kv.host_blocks for sequence in sequences)
    yield from transfers.faults()
    for sequence in sequences:
        for fault in _sequence_faults(sequence, scheduler.tables):
            yield f"sequence {sequence.id} of {sequence.request}: {fault}"
    taken = Counter((s.request, s.attempt, choice) for s in sequences for choice in s.choices)
    yield from (f"{key} is computed by {count} sequences" for key, count in taken.items() if count > 1)


def _sequence_faults(sequence: EngineSequence, tables: BlockTables) -> Iterator[str]:
    size, computed = tables.block_size, sequence.kv.computed
    if len(computed) != tables.groups:
        yield f"it counts {len(computed)} KV groups of {tables.groups}"
    slots = (len(sequence.kv.blocks) or len(sequence.kv.host_blocks)) * size
    if max(computed) > slots:
        yield f"{computed} tokens are computed, but there are {slots} slots"
    if max(computed) > len(sequence.tokens):
        yield f"{computed} tokens are computed of {len(sequence.tokens)}"
    if sequence.prompt_length > len(sequence.tokens) or not sequence.choices:
        yield f"it has {len(sequence.tokens)} tokens for choices {sequence.choices}"
    if len(sequence.kv.hashes) * size > len(sequence.tokens):
        yield f"{len(sequence.kv.hashes)} blocks have hashes, of {len(sequence.tokens)} tokens"
    yield from _status_faults(sequence, size)


def _status_faults(sequence: EngineSequence, block_size: int) -> Iterator[str]:
    """Yield the contradictions between the status and the blocks, host blocks, role and reservation."""
    status, role, kv = sequence.status, sequence.transfer.role, sequence.kv
    if bool(kv.blocks) != status.holds_blocks:
        yield f"it is {status.label} with {len(kv.blocks)} blocks"
    if bool(kv.host_blocks) != (status is SequenceStatus.SWAPPED):
        yield f"it is {status.label} with {len(kv.host_blocks)} host blocks"
    if status is SequenceStatus.AWAITING_KV and role is not TransferRole.RECEIVER:
        yield f"it is {status.label}, but its role is {role.label}"
    if status in (SequenceStatus.SENDING, SequenceStatus.AWAITING_RESERVATION) and not role.sends:
        yield f"it is {status.label}, but its role is {role.label}"
    if role is TransferRole.RECEIVER and status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED):
        yield f"it is {status.label}, but its KV has not landed"
    if sequence.transfer.has_reservation and not role.sends:
        yield f"it holds a transfer reservation, but its role is {role.label}"
    if sequence.transfer.has_reservation and status is SequenceStatus.AWAITING_RESERVATION:
        yield "it awaits the transfer reservation that it holds"
    if status is SequenceStatus.AWAITING_KV and len(kv.blocks) * block_size <= kv.computed[TARGET]:
        yield "its reservation has no blocks"
