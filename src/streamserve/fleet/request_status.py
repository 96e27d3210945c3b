"""The status of an open request, and its legal changes.

    WAITING ── submitted ──▶ QUEUED ── its prompt has begun ──▶ RUNNING
       ▲                       │                                   │
       │                       │ its first token waits             │ its prompt is complete,
       │                       │ for the blocks                    │ or answered early
       │                       ▼                                   │
       │                   RESERVING ◀─────────────────────────────┘
       │                       │ blocks are reserved
       │                       ▼
       └── next attempt ── RESERVED

A request is WAITING at first, returns to WAITING from any status for its next attempt, and may end in any
status. Only requests with a decode worker become RESERVING.
"""

from enum import Enum


class RequestStatus(Enum):
    """The progress of a request's present attempt, as far as its workers have reported it.

    * WAITING: no worker has it.
    * QUEUED: it has been submitted to its worker, which has not begun its prompt.
    * RUNNING: its worker computes it. Its decode worker, if there is one, does not have it yet.
    * RESERVING: its decode worker was asked to reserve blocks for its KV.
    * RESERVED: its decode worker has reserved blocks. Choices in `OpenRequest.transferring` still wait for
      their KV; the other choices decode there.

    `at_decode_worker`: whether its decode worker has it.
    """

    WAITING = ("waiting", False)
    QUEUED = ("queued", False)
    RUNNING = ("running", False)
    RESERVING = ("reserving", True)
    RESERVED = ("reserved", True)

    def __init__(self, label: str, at_decode_worker: bool) -> None:
        self.label = label
        self.at_decode_worker = at_decode_worker


TRANSITIONS: dict[RequestStatus, tuple[RequestStatus, ...]] = {
    RequestStatus.WAITING: (RequestStatus.QUEUED, RequestStatus.WAITING),
    RequestStatus.QUEUED: (RequestStatus.RUNNING, RequestStatus.RESERVING, RequestStatus.WAITING),
    RequestStatus.RUNNING: (RequestStatus.RESERVING, RequestStatus.WAITING),
    RequestStatus.RESERVING: (RequestStatus.RESERVED, RequestStatus.WAITING),
    RequestStatus.RESERVED: (RequestStatus.WAITING,),
}
"""The statuses that may follow each status."""


class RequestStatusError(AssertionError):
    """An illegal change of a request's status."""
