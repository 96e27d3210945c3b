"""The turns of a worker, and the order of the messages that a turn sends.

begin_turn(messages)   handle the fleet's messages, then run one step if there is work
                       the step takes its time: real in a worker process, virtual in a simulation
end_turn(now)          Traced ─ AdapterLoaded ─ Events ─ Cached ─ Transfers ─ Report

The worker process (workers/worker.py) and the simulated worker (simulate/worker.py) drive the same turns:
they receive messages, send the messages that a turn yields, and wait between turns. A turn has two halves
because a simulation lets the step's time pass between them: KV that lands during a step is reported at its
end.
"""

from collections.abc import Callable, Iterable, Iterator
from math import inf

from streamserve.engine.engine import Engine
from streamserve.protocol.messages import Event, Events, FromWorker, ToEngine, Traced, Transfers, Work
from streamserve.protocol.reports import Report

REPORT_SECONDS = 0.5
"""Maximum seconds between two reports, except while a step runs."""
STALLED_SECONDS = 0.01
"""Seconds to wait for messages before stalled requests are checked for free KV blocks again."""
TRANSFER_SECONDS = 0.001
"""Interval in seconds at which a worker without a step to run checks whether a KV transfer has completed."""


def wait_seconds(has_work: bool, stalled: bool, sending: bool) -> float:
    """Return the seconds that a worker may wait for messages before its next turn; 0 if a step can run.
    `sending`: whether a KV transfer may complete meanwhile."""
    if has_work and not stalled:
        return 0.0
    if sending:
        return TRANSFER_SECONDS
    return STALLED_SECONDS if has_work else REPORT_SECONDS


class WorkerLoop:
    """Runs the turns of `engine`.

    * `report` returns the report to send; by default it has the engine's counters alone.
    * `take_trace` returns the work traced since its last call; None without tracing.
    """

    def __init__(
        self,
        engine: Engine,
        report: Callable[[], Report] | None = None,
        take_trace: Callable[[], list[Work]] | None = None,
    ) -> None:
        self.engine = engine
        self.reported = -inf
        """When the latest report was made, in the caller's seconds."""
        self._report = report or engine.report
        self._take_trace = take_trace
        self._events: list[Event] = []

    def begin_turn(self, messages: Iterable[ToEngine] = ()) -> None:
        """Handle messages in order, then run one step if there is work."""
        for message in messages:
            self._events += self.engine.handle(message)
        if self.engine.has_work:
            self._events += self.engine.step()

    def end_turn(self, now: float, busy: bool = False) -> Iterator[FromWorker]:
        """Yield the messages of the turn, to be sent in this order, at the time `now` when its step has
        ended. A report is due after `REPORT_SECONDS`, and in every turn of an idle worker, unless the caller
        is `busy` with other work in the idle time."""
        events, self._events = self._events, []
        updates = self.engine.transfers.take_updates()
        if self._take_trace and (work := self._take_trace()):
            yield Traced(work)
        yield from self.engine.adapters.take_answers()
        if events:
            yield Events(events)
        if cached := self.engine.take_cache_updates():
            yield cached
        if updates:
            yield Transfers(updates)
        if now - self.reported >= REPORT_SECONDS or not (self.engine.has_work or busy):
            yield self.report(now)

    def report(self, now: float) -> Report:
        """Return a report as of `now`; the next one is due `REPORT_SECONDS` later."""
        self.reported = now
        return self._report()
