"""The status of a sequence, its legal changes, and its role in a KV transfer.

    ┌─────────┐ ─── admitted ────────────────────────────────────▶ ┌─────────┐
    │         │ ◀── evicted or truncated ───────────────────────── │         │
    │         │                                                    │         │
    │ WAITING │ ◀── host KV dropped ─── SWAPPED ◀─ swapped out ─── │ RUNNING │
    │         │                         SWAPPED ── swapped in ───▶ │         │
    │         │                                                    │         │
    │         │ ─── blocks reserved ──▶ AWAITING_KV ─ KV landed ─▶ │         │
    └─────────┘                                                    └─────────┘
         ▲                                                              │ first token is out
         │                                                              ▼
         └── reservation received ── AWAITING_RESERVATION ◀─ evicted ─ SENDING

A sequence is WAITING at first and may be removed in any status. Steps compute WAITING, RUNNING and SWAPPED
sequences; the others wait for another worker.
"""

from enum import Enum


class SequenceStatus(Enum):
    """The memory that a sequence holds, and the event that it waits for.

    * WAITING: it holds no KV.
    * RUNNING: it holds blocks. It is computed, or its blocks are being filled from the host pool.
    * SWAPPED: its KV is in host blocks.
    * AWAITING_KV: it holds blocks reserved for KV that another worker computes.
    * SENDING: it holds blocks with all of its KV, which is sent to another worker. No token is left to
      compute.
    * AWAITING_RESERVATION: it holds no KV. It was SENDING, and was evicted before it had a transfer
      reservation.

    `schedulable`: whether it takes part in steps. `holds_blocks`: whether it holds KV blocks between steps.
    """

    WAITING = ("waiting", True, False)
    RUNNING = ("running", True, True)
    SWAPPED = ("swapped", True, False)
    AWAITING_KV = ("awaiting KV", False, True)
    SENDING = ("sending", False, True)
    AWAITING_RESERVATION = ("awaiting reservation", False, False)

    def __init__(self, label: str, schedulable: bool, holds_blocks: bool) -> None:
        self.label = label
        self.schedulable = schedulable
        self.holds_blocks = holds_blocks


TRANSITIONS: dict[SequenceStatus, tuple[SequenceStatus, ...]] = {
    SequenceStatus.WAITING: (SequenceStatus.RUNNING, SequenceStatus.AWAITING_KV),
    SequenceStatus.RUNNING: (SequenceStatus.WAITING, SequenceStatus.SWAPPED, SequenceStatus.SENDING),
    SequenceStatus.SWAPPED: (SequenceStatus.RUNNING, SequenceStatus.WAITING),
    SequenceStatus.AWAITING_KV: (SequenceStatus.RUNNING,),
    SequenceStatus.SENDING: (SequenceStatus.AWAITING_RESERVATION,),
    SequenceStatus.AWAITING_RESERVATION: (SequenceStatus.WAITING,),
}
"""The statuses that may follow each status."""


class TransferRole(Enum):
    """The part of a sequence in a KV transfer between workers.

    * LOCAL: it takes no part, or its KV has landed here.
    * SENDER: its KV is sent to the worker that will decode it. It is computed here up to its first token.
    * COPY: its KV, all of which is cached here, is copied into another worker's cache. It computes nothing.
    * RECEIVER: its KV comes from the worker that computes its prompt.

    `sends`: whether this worker sends its KV.
    """

    LOCAL = ("local", False)
    SENDER = ("sender", True)
    COPY = ("copy", True)
    RECEIVER = ("receiver", False)

    def __init__(self, label: str, sends: bool) -> None:
        self.label = label
        self.sends = sends
