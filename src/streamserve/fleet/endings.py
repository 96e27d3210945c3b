"""How a worker's process ended, and whether the requests that it computed may be the cause."""

import signal

from streamserve.fleet.events import Ending

ASKED = frozenset(
    (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
)
"""Signals by which people and programs ask a process to end. No fault of a process raises them."""


def ending_of(status: int | None, out_of_memory: bool) -> Ending:
    """Return how a process ended, from its exit `status` (negative: the signal that ended it; None: unknown).
    `out_of_memory`: whether the kernel killed a process for lack of memory meanwhile."""
    if status is None or status == -signal.SIGKILL:
        return "fault" if out_of_memory else "unclear"
    return "outside" if -status in ASKED else "fault"


def status_in_words(status: int | None) -> str:
    """Return an exit status in words."""
    if status is None:
        return "an unknown status"
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
