"""The decode clock of a sequence measures the time that its TPOT target limits."""

import itertools

import pytest

from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.sequence import EngineSequence
from streamserve.protocol.messages import Token
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement
from tests.engine.drive import make_engine, submit

CONFIG = EngineConfig(num_blocks=64, block_size=4, max_model_len=96, max_num_batched_tokens=32, max_chunk=16)
PARAMS = SamplingParams(temperature=0, max_tokens=20, slo=Slo(tpot_ms=250.0))


def only(engine) -> EngineSequence:
    (sequence,) = engine.scheduler.sequences.values()
    return sequence


def timed_engine(config: EngineConfig = CONFIG):
    """Return an engine whose steps take a second each, however often it reads the clock."""
    engine = make_engine(config)
    engine.clock = lambda: float(engine.scheduler.steps)
    return engine


def test_it_starts_with_the_first_token_and_counts_those_after_it() -> None:
    engine = timed_engine()
    engine.handle(submit("r", list(range(20)), PARAMS))
    engine.step()
    engine.step()
    assert only(engine).requirement == LatencyRequirement(0.25, 0.0, 0)
    for steps in range(1, 5):
        engine.step()
        sequence = only(engine)
        assert sequence.outputs == 1 + steps
        assert sequence.requirement == LatencyRequirement(0.25, steps - 1.0, steps)


def test_without_a_target_there_is_no_requirement() -> None:
    engine = timed_engine()
    engine.handle(submit("r", [1, 2], SamplingParams(max_tokens=9, seed=1)))
    for _ in range(3):
        engine.step()
    assert only(engine).clock.seconds > 0
    assert only(engine).requirement == NO_REQUIREMENT


def test_it_goes_on_while_a_preempted_sequence_waits() -> None:
    engine = timed_engine()
    engine.handle(submit("r", [1, 2, 3], PARAMS))
    for _ in range(4):
        engine.step()
    engine.scheduler.allocator.preempt(only(engine))
    engine.clock = lambda: 100.0
    engine.step()
    assert engine.report().preemptions == 1
    assert only(engine).requirement == LatencyRequirement(0.25, 99.0, 4)


@pytest.mark.parametrize(
    ("began", "expected"),
    [({0: 3.0}, LatencyRequirement(0.25, 5.0, 3)), ({}, LatencyRequirement(0.25, 0.0, 1))],
)
def test_a_resumed_request_keeps_its_clock_where_it_is_known(began, expected) -> None:
    """A resumed request keeps its clock where the engine knows it; elsewhere the clock and the count of
    tokens restart."""
    engine = make_engine(CONFIG)
    engine.clock = itertools.repeat(8.0).__next__
    engine.handle(submit("r", [1, 2, 3], PARAMS, attempt=1, outputs={0: [5, 6, 7]}, began=began))
    events = engine.step()
    assert [event.index for event in events if isinstance(event, Token)] == [3]
    assert only(engine).requirement == expected
