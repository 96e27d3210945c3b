"""Standstill of an engine: its steps compute nothing although a sequence could be computed.

A standstill is a fault of the scheduler. The supervisor then replaces the worker, as one that hangs
(fleet/supervisor.py).
"""

from dataclasses import dataclass

from streamserve.engine.kv_transfer import KVTransferManager
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import TransferRole


def could_compute(scheduler: Scheduler, transfers: KVTransferManager) -> list[EngineSequence]:
    """Return the sequences that have tokens to compute and fit into memory alone. Returns none while another
    worker's part of a transfer holds blocks here: they may be the memory that is missing."""
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


def _waits_for_worker(sequence: EngineSequence) -> bool:
    """Whether a sequence waits for another worker: to send its KV, to receive it, or to reserve blocks."""
    held_back = sequence.transfer.hold and not sequence.transfer.has_reservation
    return held_back or not sequence.status.schedulable


@dataclass
class Standstill:
    """The present standstill of an engine: when it began (None: there is none), and the number of steps since
    then."""

    since: float | None = None
    steps: int = 0

    def stepped(self, stalled: bool, now: float, scheduler: Scheduler, transfers: KVTransferManager) -> None:
        """Record a step that ended at `now`. A `stalled` step computed nothing."""
        if not (stalled and could_compute(scheduler, transfers)):
            self.clear()
            return
        self.since = now if self.since is None else self.since
        self.steps += 1

    def clear(self) -> None:
        """Record that the engine computed something, or had nothing to compute."""
        self.since, self.steps = None, 0

    def seconds(self, now: float) -> float:
        """Return the seconds since the standstill began; 0 without one."""
        return 0.0 if self.since is None else now - self.since
