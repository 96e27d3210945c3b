"""An engine that makes no progress is detected by its invariants and in its reports."""

import itertools
import random

import pytest

from streamserve.contracts.cost import Line, SwapCost
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import StepPlan
from streamserve.engine.engine import Engine
from streamserve.engine.invariants import InvariantError
from streamserve.engine.observer import Journal
from streamserve.engine.ports import EnginePorts
from streamserve.engine.progress import could_compute
from streamserve.protocol.messages import Edit
from streamserve.protocol.sampling import Pooling, SamplingParams
from tests.engine.drive import Collected, make_engine, submit
from tests.engine.edits import opened

CONFIG = EngineConfig(num_blocks=24, block_size=4, max_model_len=90)
PARAMS = SamplingParams(seed=1, max_tokens=3)


class Refusing:
    """A faulty allocator that admits no sequence."""

    def __init__(self, engine: Engine) -> None:
        self._allocator = engine.scheduler.allocator
        engine.scheduler.allocator = self  # type: ignore[assignment]

    def admit(self, sequence: object) -> None:
        return None

    def __getattr__(self, name: str) -> object:
        return getattr(self._allocator, name)


def test_more_steps_than_sequences_that_compute_nothing_violate_an_invariant() -> None:
    engine = make_engine(CONFIG)
    engine.handle(submit("first", [1, 2, 3], PARAMS))
    engine.handle(submit("second", [1, 2, 3], PARAMS))
    Refusing(engine)
    for _ in range(2):
        engine.step()
    with pytest.raises(
        InvariantError, match=r"1, 2 could be computed: 1 of first: waiting.*2 of second: waiting"
    ):
        engine.step()


def test_a_report_says_for_how_long_nothing_was_computed() -> None:
    engine = make_engine(CONFIG)
    seconds = itertools.count()
    engine.clock = lambda: float(next(seconds))
    engine.handle(submit("r", [1, 2, 3], PARAMS))
    engine.step()
    assert engine.report().standstill_seconds == 0
    allocator = engine.scheduler.allocator
    engine.handle(submit("other", [1, 2, 3], PARAMS))
    Refusing(engine)
    while engine.scheduler.of("r"):
        engine.step()
    while not engine.stalled:
        assert engine.report().standstill_seconds == 0
        engine.step()
    assert 0 < engine.report().standstill_seconds < engine.report().standstill_seconds, (
        "the measured time grows"
    )
    engine.scheduler.allocator = allocator
    engine.step()
    assert engine.report().standstill_seconds == 0


def test_one_that_waits_for_its_client_could_not_compute() -> None:
    engine = make_engine(CONFIG)
    engine.handle(opened([1, 2, 3, 4, 5]))
    while engine.has_work:
        engine.step()
    assert could_compute(engine.scheduler, engine.transfers) == []
    assert engine.report().standstill_seconds == 0


def test_a_prompt_that_fills_the_pool_is_computed_beside_an_idle_stream() -> None:
    engine = make_engine(EngineConfig(num_blocks=24, block_size=4, max_model_len=96))
    collected = Collected()
    engine.handle(opened([1, 2, 3, 4, 5], "idle"))
    while engine.has_work:
        engine.step()
    assert engine.report().blocks_live > 0
    pooled = SamplingParams(max_tokens=0, temperature=0.0, pooling=Pooling("last"))
    engine.handle(submit("r", [7] * 96, pooled))
    while engine.has_work:
        collected.take(engine.step())
    assert "r" in collected.vectors
    assert engine.report().preemptions == 1


def test_an_engine_without_work_does_not_stand_still() -> None:
    engine = make_engine(CONFIG)
    seconds = itertools.count()
    engine.clock = lambda: float(next(seconds))
    engine.handle(opened([1, 2, 3, 4, 5]))
    Refusing(engine)
    engine.step()
    assert engine.report().standstill_seconds > 0
    engine.handle(Edit("r", 0, 1, 0, [1]))
    assert not engine.has_work
    assert engine.report().standstill_seconds == 0


@pytest.mark.parametrize("seed", [593, 709])
def test_a_swapped_stream_has_work_only_if_it_can_be_swapped_in(seed: int) -> None:
    """A swapped prompt stream counts as work only if it can be swapped in: its KV and one more block must be
    free, since it evicts no other sequence."""
    rng = random.Random(seed)
    engine = make_engine(EngineConfig(num_blocks=8, max_model_len=96, eviction="swap", swap_blocks=40))
    for number in range(rng.randint(2, 4)):
        prompt = [rng.randrange(90) for _ in range(rng.randint(3, 60))]
        engine.handle(opened(prompt, f"s{number}", tail=rng.choice((0, 3))))
        for _ in range(rng.randint(1, 4)):
            if engine.has_work:
                engine.step()
    engine.handle(submit("r", [rng.randrange(90) for _ in range(rng.randint(20, 80))], PARAMS))
    for _ in range(60):
        if engine.has_work:
            engine.step()
    assert engine.report().evictions.swaps > 0
    assert not engine.scheduler.of("r")
    assert not engine.has_work


class Recording(Journal):
    """A journal that stores each launched plan with its predicted seconds."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepPlan, float]] = []

    def enter(self, phase, members, predicted=0.0, plan=None) -> None:
        if phase in ("run", "verify", "swap"):
            self.steps.append((plan, predicted))


def test_the_predicted_seconds_of_a_step_contain_its_copies_of_swapped_kv() -> None:
    journal, cost = Recording(), SwapCost(out=Line(1000.0, 1.0), back=Line(5000.0, 2.0))
    engine = make_engine(
        EngineConfig(
            num_blocks=12, block_size=4, max_model_len=40, preempt_every=2, eviction="swap", swap_blocks=30
        ),
        ports=EnginePorts(journal=journal, swap_cost=cost),
    )
    for number in range(3):
        engine.handle(submit(str(number), [number], SamplingParams(temperature=0, max_tokens=30)))
    while engine.has_work:
        engine.step()
    copying = [plan for plan, _ in journal.steps if plan.swap_out]
    assert copying
    assert any(plan.swap_in for plan, _ in journal.steps)
    for plan, predicted in journal.steps:
        copies = cost.out(len(plan.swap_out)) + cost.back(len(plan.swap_in))
        assert 0 <= predicted - copies < 100, "all other seconds are the model's"
