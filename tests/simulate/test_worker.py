"""A simulated worker sends the same messages as a worker process, in the same order, when its step's time is
over."""

import pytest

from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.worker_loop import REPORT_SECONDS
from streamserve.protocol.messages import Cached, Events, FromWorker, Ready
from streamserve.protocol.reports import Report
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.clock import VirtualClock
from streamserve.simulate.faults import FaultInjection, FaultInjector
from streamserve.simulate.worker import Life, SimulatedWorker, WorkerSpec
from tests.engine.drive import assert_engine_empty, model_info, submit

STEP_SECONDS = 0.2
SPEC = WorkerSpec(
    EngineConfig(num_blocks=32, block_size=4, max_model_len=64, check=True),
    model_info(64),
    lambda tokens, context: STEP_SECONDS if tokens else 0.0,
)
REQUEST = submit("r", list(range(10)), SamplingParams(temperature=0.0, seed=1, max_tokens=3))


class Bench:
    """A prefill and a decode worker on a virtual clock, and the messages that they have sent."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.sent: list[tuple[float, type[FromWorker]]] = []
        self.faults = FaultInjector(lambda worker, silent: None)
        self.worker = SimulatedWorker(
            "decode-0", 1, "decode", SPEC, self.clock, self.faults, lambda path: None, self._send
        )
        self.worker.start(0.0)
        self.clock.at(2.0, lambda: self.worker.receive(REQUEST))

    def _send(self, worker: SimulatedWorker, message: FromWorker) -> None:
        self.sent.append((round(self.clock.now, 3), type(message)))


def test_its_messages_are_sent_when_the_step_is_over() -> None:
    bench = Bench()
    bench.clock.run()
    assert bench.sent == [
        (1.0, Ready),
        (1.0, Report),
        (2.2, Events),
        (2.2, Cached),
        (2.2, Report),  # The latest report is older than half a second.
        (2.4, Events),
        (2.6, Events),
        (2.6, Cached),
        (2.6, Report),  # After one turn without a cost, which frees the sequence, the worker is idle.
    ]
    assert_engine_empty(bench.worker.engine)


def test_an_idle_worker_reports_when_a_report_matters() -> None:
    bench = Bench()
    bench.clock.run(until=1.0)
    bench.worker.report_if_due()
    assert len(bench.sent) == 2, "the worker has just reported"
    bench.clock.at(1.0 + REPORT_SECONDS, bench.worker.report_if_due)
    bench.clock.run(until=1.9)
    assert bench.sent[2:] == [(1.0 + REPORT_SECONDS, Report)]


def test_a_message_during_a_step_is_handled_after_it() -> None:
    bench = Bench()
    later = submit("s", [7] * 5, SamplingParams(temperature=0.0, seed=1, max_tokens=3))
    bench.clock.at(2.1, lambda: bench.worker.receive(later))
    bench.clock.run(until=2.15)
    assert [s.request for s in bench.worker.engine.scheduler.sequences.values()] == ["r"]
    bench.clock.run(until=2.25)
    assert [s.request for s in bench.worker.engine.scheduler.sequences.values()] == ["r", "s"]


def test_a_crash_in_the_middle_of_a_turn_loses_its_messages() -> None:
    bench = Bench()
    bench.faults.inject(FaultInjection("output 0", 1, ("decode-0",)))
    bench.clock.run()
    assert bench.worker.life is Life.SILENT
    assert [message for _, message in bench.sent] == [Ready, Report]
    assert bench.worker.last_phase()[0] == "commit"


@pytest.mark.parametrize("life", [Life.SILENT, Life.DEAD])
def test_a_silent_or_dead_worker_sends_nothing_more(life: Life) -> None:
    bench = Bench()
    bench.clock.run(until=2.1)
    bench.worker.life = life
    bench.clock.run()
    bench.worker.report_if_due()
    assert bench.sent == [(1.0, Ready), (1.0, Report)]


def test_during_a_step_its_heartbeat_and_its_journal_show_the_step() -> None:
    bench = Bench()
    bench.clock.run(until=1.5)
    assert bench.worker.heartbeat().phase == ""
    bench.clock.run(until=2.0)
    beat = bench.worker.heartbeat()
    assert (beat.phase, beat.moved_at, beat.predicted) == ("run", 2.0, STEP_SECONDS)
    assert bench.worker.last_phase() == ("run", frozenset({REQUEST.attempt}))
