"""Writes a worker's journal (protocol/journal.py): the work of its engine, and signs of life from a
thread."""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamserve.contracts.plan import StepPlan
from streamserve.engine.observer import Journal, StepPhase
from streamserve.engine.sequence import EngineSequence
from streamserve.protocol.journal import JOURNAL_BYTES, JournalWriter
from streamserve.protocol.messages import Cancel, LoadAdapter, ToEngine, UnloadAdapter
from streamserve.protocol.transfers import Push, Release

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25

LOADING_SECONDS = 24.0
"""Predicted seconds of work without a better prediction, such as loading an adapter. The work may take five
times this (fleet/process_state.py)."""
COMPILING_SECONDS = 110.0
"""Seconds that compiling a kernel or capturing a graph may take, beyond the limit of any other step."""


@dataclass(frozen=True)
class Signs:
    """The signs that a step goes on.

    `progress` returns a number that grows during a step, and `compiled` a number that grows when a kernel is
    about to be compiled or a graph to be captured. `longest_part`: the largest share of a step's time that
    passes without progress. The time of the first step is unknown unless steps of this machine were
    `measured`.
    """

    progress: Callable[[], int] = lambda: 0
    compiled: Callable[[], int] = lambda: 0
    longest_part: float = 1.0
    measured: bool = True


class StepJournal(Journal):
    """Writes to `memory` what the engine is about to do.

    `plan` is the plan in execution, None between steps.
    """

    def __init__(self, memory: mmap.mmap, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan: StepPlan | None = None
        self.phase = ""
        self._signs = Signs()
        self._reading = threading.Lock()
        """Held while the thread reads the signs: the objects that they read from must not be closed
        meanwhile."""
        self._writer = JournalWriter(memory)
        self._clock = clock
        self._seen: tuple[int, int, int] | None = None
        """The progress, the number of compilations and the entry's number at the last sign of life."""
        self._moved_at = 0.0
        self._stepped = False

    @property
    def signs(self) -> Signs:
        """The signs that a step goes on. After a new value was set, the previous signs are no longer read."""
        return self._signs

    @signs.setter
    def signs(self, signs: Signs) -> None:
        with self._reading:
            self._signs = signs
            # What happens from now on is progress, also before the next sign of life.
            self._seen = (signs.progress(), signs.compiled(), self._writer.number)

    def note(self, message: ToEngine) -> None:
        """Record that a message is about to be processed, with the attempt to which it belongs."""
        predicted = LOADING_SECONDS if isinstance(message, LoadAdapter) else 0.0
        if isinstance(message, Cancel | Release | LoadAdapter | UnloadAdapter):
            attempts = []
        else:
            attempts = [message.reservation.attempt if isinstance(message, Push) else message.attempt]
        self._write("message", attempts, predicted)

    def enter(
        self,
        phase: StepPhase,
        members: Sequence[EngineSequence] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        """Record that a phase of a step begins.

        While the model runs, each layer is progress, so less than the predicted time passes without progress.
        Copies of swapped KV and drafts show no progress.
        """
        self.plan = plan
        if phase in ("run", "verify"):
            predicted *= self.signs.longest_part
            if not (self.signs.measured or self._stepped):
                predicted = max(predicted, LOADING_SECONDS)
        self._stepped = self._stepped or phase == "commit"
        self._write(phase, None if members is None else [sequence.attempt for sequence in members], predicted)

    def leave(self, moving: Sequence[EngineSequence]) -> None:
        """Record that a step or a message is done; only the KV transfers of the sequences in `moving`
        continue."""
        self.plan = None
        self._write("transfer" if moving else "", [sequence.attempt for sequence in moving])

    def say(self, words: str, report: str) -> None:
        """Record why this worker ends, and the name of its crash report."""
        self._writer.say(words, report)

    def keep_beating(self) -> None:
        """Start a thread that writes a sign of life every `BEAT_SECONDS`, as long as this process lives."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def beat(self) -> None:
        """Write a sign of life.

        During a compilation, the time of the last progress is in the future: no cost curve predicts how long
        compiling takes.
        """
        now = self._clock()
        with self._reading:
            seen = (self._signs.progress(), self._signs.compiled(), self._writer.number)
            before = self._seen or seen
            if seen[1] != before[1]:
                self._moved_at = now + COMPILING_SECONDS
            elif seen[0] != before[0]:
                self._moved_at = now
            elif seen[2] != before[2]:  # the phase with the compilation is over
                self._moved_at = min(self._moved_at, now)
            self._seen = seen
        self._writer.beat(now, self._moved_at)

    def _beat(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_SECONDS)

    def _write(self, phase: str, attempts: list[int] | None, predicted: float = 0.0) -> None:
        self.phase = phase
        self._writer.write(phase, attempts, self._clock(), predicted)


def open_journal(descriptor: int) -> StepJournal:
    """Return the journal at an inherited file descriptor.

    If that cannot be used, return a journal in private memory, which is never read.
    """
    try:
        memory = mmap.mmap(descriptor, JOURNAL_BYTES)
        os.close(descriptor)
    except (OSError, ValueError) as error:
        logger.warning(
            "no shared journal: the server will not know what this worker did if it dies: %s", error
        )
        memory = mmap.mmap(-1, JOURNAL_BYTES)
    return StepJournal(memory)
