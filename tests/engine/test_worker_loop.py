"""A worker's loop sends the right messages in the right order, and waits for the right time between turns."""

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.engine.worker_loop import (
    REPORT_SECONDS,
    STALLED_SECONDS,
    TRANSFER_SECONDS,
    WorkerLoop,
    wait_seconds,
)
from streamserve.protocol.messages import (
    Admitted,
    Cached,
    Events,
    Finished,
    Pushed,
    ToEngine,
    Token,
    Traced,
    Transfers,
    Work,
)
from streamserve.protocol.reports import Report
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import CacheAddress, Push, TransferReservation
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.transport import SimulatedTransport
from tests.engine.drive import VOCAB, make_engine, model_info, submit

CONFIG = EngineConfig(num_blocks=32, block_size=4, max_model_len=64)
PROMPT = list(range(10))
PARAMS = SamplingParams(temperature=0.0, seed=1, max_tokens=3)
TO = CacheAddress("decode", 0, 8, "fake")
RESERVATION = TransferReservation("decode/0", "r", 0, (0,), len(PROMPT), 0, [3, 1, 2], TO)


class Trace:
    """An observer whose records a test takes at the end of a turn."""

    def __init__(self) -> None:
        self.work: list[Work] = []

    def on_event(self, name: str, request: str = "") -> None:
        self.work.append(Work(name, request, 0.0))

    def on_step(self, query_tokens: Sequence[tuple[str, int]], seconds: float) -> None:
        pass

    def take(self) -> list[Work]:
        work, self.work = self.work, []
        return work


def prefill_loop(wire: list[Callable[[], None]]) -> WorkerLoop:
    """Return the loop of a traced prefill worker. KV arrives when the test calls the functions in `wire`."""
    own, other = (CostExecutor(n, 4, VOCAB, lambda tokens, context: 1.0) for n in (CONFIG.num_blocks, 8))
    transport = SimulatedTransport(own, lambda path: other, lambda _, land: wire.append(land), 0.0)
    trace = Trace()
    engine = Engine(
        CONFIG,
        model_info(64),
        own,
        lambda: 0.0,
        ports=EnginePorts(name="prefill", transport=transport, observer=trace),
    )
    return WorkerLoop(engine, take_trace=trace.take)


def turn(loop: WorkerLoop, now: float, *messages: ToEngine, landing: Sequence[Callable[[], None]] = ()):
    """Run a turn, during whose step some KV arrives; return the messages that it sends."""
    loop.begin_turn(messages)
    for land in landing:
        land()
    return list(loop.end_turn(now))


def test_a_turn_sends_its_messages_in_one_order() -> None:
    wire: list[Callable[[], None]] = []
    loop = prefill_loop(wire)
    turn(loop, 0.0, submit("r", PROMPT, PARAMS, phase="prefill"))
    turn(loop, 0.1, Push(RESERVATION))
    other = submit("s", PROMPT[::-1], PARAMS, phase="prefill")
    sent = turn(loop, 1.0, other, landing=wire)
    assert [type(message) for message in sent] == [Traced, Events, Cached, Transfers, Report]
    traced, events, _, transfers, _ = sent
    assert [work.name for work in traced.work][-1] == "last layer landed"
    assert [type(event) for event in events.events] == [Admitted, Token]
    assert transfers.updates == [Pushed("r", 0, RESERVATION.id, "", 3, 0.0, 1)]


def test_kv_that_lands_during_a_step_is_reported_at_its_end_and_its_blocks_are_free() -> None:
    wire: list[Callable[[], None]] = []
    loop = prefill_loop(wire)
    turn(loop, 0.0, submit("r", PROMPT, PARAMS, phase="prefill"))
    turn(loop, 0.1, Push(RESERVATION))
    live = loop.engine.report().blocks_live
    sent = turn(loop, 0.2, landing=wire)
    assert [type(message) for message in sent] == [Traced, Transfers]
    assert loop.engine.report().blocks_live < live


def test_a_busy_worker_reports_every_half_second_and_an_idle_one_every_turn() -> None:
    loop = WorkerLoop(make_engine(CONFIG))
    loop.report(0.0)
    many = SamplingParams(temperature=0.0, seed=1, max_tokens=50)
    reports = [
        any(isinstance(message, Report) for message in turn(loop, now, *messages))
        for now, messages in (
            (0.1, [submit("r", PROMPT, many)]),
            (REPORT_SECONDS - 0.01, []),
            (REPORT_SECONDS, []),
            (REPORT_SECONDS + 0.1, []),
            (2 * REPORT_SECONDS, []),
        )
    ]
    assert reports == [False, False, True, False, True]
    while loop.engine.has_work:
        sent = turn(loop, 2 * REPORT_SECONDS)
    assert isinstance(sent[-1], Report), "the worker has become idle"
    assert [type(message) for message in turn(loop, 1.1)] == [Report]
    assert not list(loop.end_turn(1.2, busy=True)), "the worker uses its idle time"
    assert [type(message) for message in loop.end_turn(1.1 + REPORT_SECONDS, busy=True)] == [Report]


def test_the_events_of_messages_come_before_those_of_the_step() -> None:
    loop = WorkerLoop(make_engine(CONFIG))
    too_long = submit("long", list(range(90)), PARAMS)
    events = turn(loop, 0.0, submit("r", PROMPT, PARAMS), too_long)[0]
    assert isinstance(events, Events)
    assert [(type(event), event.request) for event in events.events][:2] == [
        (Finished, "long"),
        (Admitted, "r"),
    ]


def test_a_report_may_hold_more_than_the_engine_knows() -> None:
    engine = make_engine(CONFIG)
    report = replace(engine.report(), steps=99)
    loop = WorkerLoop(engine, report=lambda: report)
    assert list(loop.end_turn(0.0)) == [report]


@pytest.mark.parametrize(
    ("has_work", "stalled", "sending", "seconds"),
    [
        (True, False, False, 0.0),
        (True, False, True, 0.0),
        (True, True, False, STALLED_SECONDS),
        (True, True, True, TRANSFER_SECONDS),
        (False, False, True, TRANSFER_SECONDS),
        (False, True, False, REPORT_SECONDS),
    ],
)
def test_a_worker_waits_no_longer_than_until_something_may_happen(
    has_work: bool, stalled: bool, sending: bool, seconds: float
) -> None:
    assert wait_seconds(has_work, stalled, sending) == seconds
