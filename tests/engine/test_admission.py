"""Requests whose targets are hopeless are refused, if the operator wants that."""

from streamserve.engine.engine import Engine
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import Finished
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.simulate.executor import CostExecutor
from tests.engine.drive import VOCAB, Collected, finish, model_info, submit


def engine(slo_admission: bool) -> Engine:
    """One whose steps take a second each, and that has already seen some."""
    config = EngineConfig(
        num_blocks=64, block_size=4, max_model_len=96, max_chunk=16, slo_admission=slo_admission
    )
    executor = CostExecutor(config.num_blocks, config.block_size, VOCAB, lambda rows, context: 1.0)
    made = Engine(config, model_info(96), executor, lambda: 0.0)
    made.handle(submit("first", [1, 2, 3], SamplingParams(seed=1, max_tokens=4)))
    finish(made, Collected())
    return made


def targets(n: int = 1, **slo: float) -> SamplingParams:
    return SamplingParams(n=n, temperature=0, max_tokens=4, seed=1, slo=Slo(**slo))


def test_the_hopeless_are_refused_with_what_could_be_met() -> None:
    made = engine(True)
    events = made.handle(submit("r", list(range(32)), targets(n=2, tpot_ms=500.0, ttft_ms=900.0)))
    assert [type(event) for event in events] == [Finished, Finished]
    for event in events:
        assert (event.reason, event.status) == ("error", 503)
        assert event.retry_after == 60.0
        assert "ttft_ms is 900" in event.error
        assert "tpot_ms is 500, and 1000.0 could be met" in event.error
    assert not made.has_work


def test_others_are_served_and_so_is_everybody_by_default() -> None:
    for admission, slo in (
        (True, {"tpot_ms": 1500.0, "ttft_ms": 60_000.0}),
        (True, {}),
        (False, {"tpot_ms": 1.0}),
    ):
        made, collected = engine(admission), Collected()
        assert made.handle(submit("r", list(range(32)), targets(**slo))) == []
        finish(made, collected)
        assert len(collected.tokens["r", 0]) == 4


def test_what_has_begun_goes_on() -> None:
    made = engine(True)
    again = submit("r", [1, 2], targets(tpot_ms=1.0), attempt=1, outputs={0: [5]}, began={0: 0.0})
    assert made.handle(again) == []


def test_nobody_is_judged_before_a_step_was_timed() -> None:
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=96, slo_admission=True)
    executor = CostExecutor(config.num_blocks, config.block_size, VOCAB, lambda rows, context: 1.0)
    made = Engine(config, model_info(96), executor, lambda: 0.0)
    assert made.handle(submit("r", [1, 2], targets(tpot_ms=1.0))) == []
