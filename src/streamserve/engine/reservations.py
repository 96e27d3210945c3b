"""The rule that keeps paired workers from waiting for each other's blocks for ever.

A prompt that is handed over needs blocks on two workers: on the prefill worker for its KV, on the decode
worker for the copy. It gets them in either order, so sequences could wait in a circle:

    prefill worker                                             decode worker
                    waits for                     holds
    blocks    ◀──────────────── H, a holder ─────────────────▶ blocks reserved for H
      │ held by                                                     ▲ waits for
      └──────────────────────▶  S, without reservation  ────────────┘

A *holder* is a sequence of the prefill worker with a transfer reservation: blocks of the decode worker are
kept for it until its KV has landed. The rule cuts the edge from H to blocks that S holds: **a holder waits
neither for sequences that are not holders, nor for those that wait for their reservation.** It evicts them,
whatever their ranks; S is computed again when it has its reservation. So a holder waits at most for holders
that rank higher. The first of all waits for none: it is computed, its KV lands, and its blocks on the prefill
worker are free for others.

Cache copies (KV write-backs, and the KV of a prompt stream that still arrives) go in both directions, and
close no circle: a copy begins only if all its blocks are cached, so once it has its reservation it waits for
nothing but the wire. Until then it waits for blocks at the lowest rank, and holds none.

A sequence that only needs blocks for KV from another worker (TransferRole.RECEIVER) is ranked as any other;
once reserved, its blocks are not evicted (SequenceStatus.AWAITING_KV).
"""

from collections.abc import Iterable
from collections.abc import Sequence as List

from streamserve.engine.sequence import Sequence
from streamserve.engine.status import SequenceStatus, TransferRole


def is_holder(sequence: Sequence) -> bool:
    """Whether another worker keeps blocks for the sequence's KV, and a request waits for it."""
    return sequence.transfer.has_reservation and sequence.transfer.role is not TransferRole.COPY


def evictable(sequence: Sequence, ranked: List[Sequence], sequences: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences that may lose their blocks to this one: for a holder all but the holders that rank
    higher, for others those that rank lower and are no holders. The last of them is evicted first. `ranked`
    holds the sequences of the step, highest rank first; `sequences` are all of the worker's."""
    index = ranked.index(sequence)
    if is_holder(sequence):
        below = [other for other in ranked[:index] if not is_holder(other)] + list(ranked[index + 1 :])
    else:
        below = [other for other in ranked[index + 1 :] if not is_holder(other)]
    # Blocks that were reserved in this very step are promised to another worker.
    below = [other for other in below if other.status.schedulable]
    if sequence.transfer.has_reservation:
        below += [other for other in sequences if _awaits_reservation(other)]
    return below


def outranks(other: Sequence, sequence: Sequence, ranks_higher: bool) -> bool:
    """Whether another sequence gets blocks before this one: holders do before those that are none, otherwise
    the one that `ranks_higher`."""
    holds = is_holder(other)
    return holds if holds != is_holder(sequence) else ranks_higher


def is_admitted_first(sequence: Sequence) -> bool:
    """Whether the sequence may start although one that must not be overtaken has to wait: others may be
    waiting for the blocks reserved for it."""
    return sequence.transfer.has_reservation


def waits_for_prefix(sequence: Sequence) -> bool:
    """Whether the sequence waits where another one is about to compute its next block. One with a reservation
    waits for no other, and one that receives its KV computes nothing."""
    transfer = sequence.transfer
    return not transfer.has_reservation and transfer.role is not TransferRole.RECEIVER


def may_fail_to_start(sequence: Sequence) -> bool:
    """Whether query tokens planned for a sequence could be lost to those it waits for: it could not start
    last time, or others may be waiting for the blocks reserved for it."""
    if sequence.transfer.role is TransferRole.RECEIVER:
        return False
    has_reservation = sequence.transfer.has_reservation
    return sequence.passed_over or (has_reservation and sequence.status is not SequenceStatus.RUNNING)


def status_when_dropped(sequence: Sequence) -> SequenceStatus:
    """Return the status of a sequence whose KV is evicted and dropped. One that has its first token is
    computed again only when it has its transfer reservation."""
    if sequence.status is SequenceStatus.SENDING:
        return SequenceStatus.AWAITING_RESERVATION
    return SequenceStatus.WAITING


def take_reservation(sequence: Sequence) -> None:
    """Give a sequence its transfer reservation. If its KV was dropped, it is computed again from now on."""
    sequence.transfer.has_reservation = True
    if sequence.status is SequenceStatus.AWAITING_RESERVATION:
        sequence.become(SequenceStatus.WAITING)
        sequence.state_stale = True


def _awaits_reservation(sequence: Sequence) -> bool:
    sending = sequence.status is SequenceStatus.SENDING and not sequence.transfer.has_reservation
    return sending and sequence.transfer.role is not TransferRole.COPY
