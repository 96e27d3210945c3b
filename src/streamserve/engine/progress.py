"""Whether an engine stands still: its steps compute nothing although a sequence could be computed.

This would be a fault of the scheduler. The worker is then replaced, like a worker that hangs
(fleet/supervisor.py).
"""

from dataclasses import dataclass

from streamserve.engine.kv_transfer import KVTransferManager
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence
from streamserve.engine.status import TransferRole


def could_compute(scheduler: Scheduler, transfers: KVTransferManager) -> list[Sequence]:
    """Return the sequences that have tokens to compute and fit into memory alone; none while blocks are held
    until another worker has done its part."""
    tables, sequences = scheduler.tables, scheduler.sequences.values()
    if transfers.held_blocks() or any(s.kv.blocks and _waits_for_worker(s) for s in sequences):
        return []
    return [
        sequence
        for sequence in sequences
        if sequence.status.schedulable
        and sequence.transfer.role is not TransferRole.RECEIVER
        and sequence.todo(idle=True)
        and tables.blocks_for(len(sequence.tokens)) <= tables.pool.size
    ]


def _waits_for_worker(sequence: Sequence) -> bool:
    """Whether another worker sends, receives or has no free blocks yet for a sequence's KV."""
    held_back = sequence.transfer.hold and not sequence.transfer.has_reservation
    return held_back or not sequence.status.schedulable


@dataclass
class Standstill:
    """For how long an engine has stood still: since when, and the number of steps since then."""

    since: float | None = None
    steps: int = 0

    def stepped(self, stalled: bool, now: float, scheduler: Scheduler, transfers: KVTransferManager) -> None:
        """Record a step that ended at `now`, and computed nothing if it is `stalled`."""
        if not (stalled and could_compute(scheduler, transfers)):
            self.clear()
            return
        self.since = now if self.since is None else self.since
        self.steps += 1

    def clear(self) -> None:
        """Record that the engine computed something, or had nothing to compute."""
        self.since, self.steps = None, 0

    def seconds(self, now: float) -> float:
        """Return the seconds since its first step that computed nothing; 0 if the last one did."""
        return 0.0 if self.since is None else now - self.since
