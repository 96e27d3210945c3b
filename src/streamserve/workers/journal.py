"""A worker's journal (protocol/journal.py) as its engine writes it, and a thread that writes signs of
life."""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

from streamserve.engine.observer import StepPhase
from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import Sequence as Running
from streamserve.protocol.journal import JOURNAL_BYTES, JournalWriter
from streamserve.protocol.messages import Cancel, LoadAdapter, ToEngine, UnloadAdapter
from streamserve.protocol.transfers import Push, Release

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25


class StepJournal:
    """Writes what the engine is about to do to `memory` (engine.observer.Journal). `plan` is the plan in
    execution."""

    def __init__(self, memory: mmap.mmap, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan: StepPlan | None = None
        self.phase = ""
        self.progress: Callable[[], int] = lambda: 0
        """A number that grows while a step makes progress."""
        self._writer = JournalWriter(memory)
        self._clock = clock

    def take(self, message: ToEngine) -> None:
        """Record that a message is about to be processed, with the attempt it belongs to."""
        if isinstance(message, Cancel | Release | LoadAdapter | UnloadAdapter):
            attempts = []
        else:
            attempts = [message.reservation.attempt if isinstance(message, Push) else message.attempt]
        self._write("message", attempts)

    def enter(
        self,
        phase: StepPhase,
        members: Sequence[Running] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        """Record that a phase of a step begins."""
        self.plan = plan
        self._write(phase, None if members is None else [sequence.attempt for sequence in members], predicted)

    def leave(self, sending: Sequence[Running]) -> None:
        """Record that a step, or a message, is done."""
        self.plan = None
        self._write("transfer" if sending else "", [sequence.attempt for sequence in sending])

    def say(self, words: str, report: str) -> None:
        """Write last words."""
        self._writer.say(words, report)

    def keep_beating(self) -> None:
        """Start a thread that writes a sign of life every `BEAT_SECONDS`, as long as this process lives."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        seen, moved_at = -1, 0.0
        while True:
            now, progress = self._clock(), self.progress()
            if progress != seen:
                seen, moved_at = progress, now
            self._writer.beat(now, moved_at)
            time.sleep(BEAT_SECONDS)

    def _write(self, phase: str, attempts: list[int] | None, predicted: float = 0.0) -> None:
        self.phase = phase
        self._writer.write(phase, attempts, self._clock(), predicted)


def open_journal(descriptor: int) -> StepJournal:
    """Return the journal at an inherited file descriptor; if it cannot be used, one in private memory, which
    is never read."""
    try:
        memory = mmap.mmap(descriptor, JOURNAL_BYTES)
        os.close(descriptor)
    except (OSError, ValueError) as error:
        logger.warning(
            "no shared journal: the server will not know what this worker did if it dies: %s", error
        )
        memory = mmap.mmap(-1, JOURNAL_BYTES)
    return StepJournal(memory)
