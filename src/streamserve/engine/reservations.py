"""The rule that keeps paired workers from waiting for each other's blocks for ever.

A prompt that is handed over needs blocks on two workers: on the prefill worker for its KV, on the decode
worker for the copy. It gets them in either order, so sequences could wait in a circle:

    prefill worker                                             decode worker
                    waits for                     holds
    blocks    ◀──────────────── H, a holder ─────────────────▶ blocks reserved for H
      │ held by                                                     ▲ waits for
      └──────────────────────▶  S, without reservation  ────────────┘

A *holder* is a sequence of the prefill worker with a transfer reservation: blocks of the decode worker are
kept for it until its KV has landed. The rule cuts the edge from H to the blocks that S holds: **a holder
waits neither for sequences without a reservation, nor for sequences that still wait for a reservation.** It
evicts them, whatever their ranks; S is computed again when it has its reservation. So a holder waits only for
holders that rank higher. The highest-ranked holder waits for none: it is computed, its KV lands, and its
blocks on the prefill worker become free for others.

Cache copies (KV write-backs, and the KV of a prompt stream that is still open) go in both directions. They
close no circle: a copy begins only if all its blocks are cached, so with its reservation it waits for the
wire alone. Without one it waits for blocks at the lowest rank, and holds none.

A sequence that only needs blocks for KV from another worker (TransferRole.RECEIVER) is ranked like any other.
Once reserved, its blocks are not evicted (SequenceStatus.AWAITING_KV).
"""

from collections.abc import Iterable, Sequence

from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import SequenceStatus, TransferRole


def is_holder(sequence: EngineSequence) -> bool:
    """Whether another worker keeps blocks for the sequence's KV, and a client's request waits for this KV."""
    return sequence.transfer.has_reservation and sequence.transfer.role is not TransferRole.COPY


def evictable(
    sequence: EngineSequence, ranked: Sequence[EngineSequence], sequences: Iterable[EngineSequence]
) -> list[EngineSequence]:
    """Return the sequences that may be evicted for `sequence`; the last one is evicted first. A holder may
    evict all sequences except higher-ranked holders. Any other sequence may evict lower-ranked sequences that
    are not holders. `ranked` has the schedulable sequences, highest rank first; `sequences` has all sequences
    of the worker."""
    index = ranked.index(sequence)
    if is_holder(sequence):
        below = [other for other in ranked[:index] if not is_holder(other)] + list(ranked[index + 1 :])
    else:
        below = [other for other in ranked[index + 1 :] if not is_holder(other)]
    # A sequence that got its reservation in this step is AWAITING_KV: another worker will write its blocks.
    below = [other for other in below if other.status.schedulable]
    if sequence.transfer.has_reservation:
        below += [other for other in sequences if _awaits_reservation(other)]
    return below


def outranks(other: EngineSequence, sequence: EngineSequence, ranks_higher: bool) -> bool:
    """Whether `other` gets blocks before `sequence`. Holders come before other sequences; between two holders
    or two other sequences `ranks_higher` says whether `other` ranks higher."""
    holds = is_holder(other)
    return holds if holds != is_holder(sequence) else ranks_higher


def is_admitted_first(sequence: EngineSequence) -> bool:
    """Whether the sequence may start even if a sequence that must not be overtaken has to wait. Sequences
    with a transfer reservation may: others may be waiting for the blocks reserved for them."""
    return sequence.transfer.has_reservation


def waits_for_prefix(sequence: EngineSequence) -> bool:
    """Whether the sequence waits if another sequence is about to compute its next block. A sequence with a
    reservation waits for no other, and a sequence that receives its KV computes nothing."""
    transfer = sequence.transfer
    return not transfer.has_reservation and transfer.role is not TransferRole.RECEIVER


def may_fail_to_start(sequence: EngineSequence) -> bool:
    """Whether a sequence that has query tokens in the plan may fail to start, so that the tokens would be
    lost. It could not start last time, or it has a reservation, with which it tries to start even while
    others have to wait."""
    if sequence.transfer.role is TransferRole.RECEIVER:
        return False
    has_reservation = sequence.transfer.has_reservation
    return sequence.passed_over or (has_reservation and sequence.status is not SequenceStatus.RUNNING)


def status_when_dropped(sequence: EngineSequence) -> SequenceStatus:
    """Return the new status of a sequence whose KV is evicted and dropped. A SENDING sequence, whose first
    token is out, is computed again only when it has its transfer reservation."""
    if sequence.status is SequenceStatus.SENDING:
        return SequenceStatus.AWAITING_RESERVATION
    return SequenceStatus.WAITING


def take_reservation(sequence: EngineSequence) -> None:
    """Give a sequence its transfer reservation. If its KV was dropped while it waited for the reservation,
    the next steps compute it again."""
    sequence.transfer.has_reservation = True
    if sequence.status is SequenceStatus.AWAITING_RESERVATION:
        sequence.become(SequenceStatus.WAITING)
        sequence.state_stale = True


def _awaits_reservation(sequence: EngineSequence) -> bool:
    sending = sequence.status is SequenceStatus.SENDING and not sequence.transfer.has_reservation
    return sending and sequence.transfer.role is not TransferRole.COPY
