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
    """What a sequence holds.

    * WAITING: no KV.
    * RUNNING: blocks. It is computed, or its blocks are being filled from the host pool.
    * SWAPPED: host blocks that hold its KV.
    * AWAITING_KV: blocks reserved for KV that another worker computes.
    * SENDING: blocks with all of its KV, which another worker gets. It has no token left to compute.
    * AWAITING_RESERVATION: no KV. It was SENDING, and was evicted before it had a transfer reservation.

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

    * LOCAL: none, or its KV has landed here.
    * SENDER: its KV goes to the worker that will decode it. It is computed up to its first token.
    * COPY: its KV, all of it cached here, goes into another worker's cache. It computes nothing.
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
