"""With `slo_admission`, requests with infeasible latency targets are refused."""

from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.protocol.messages import Finished
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.simulate.executor import CostExecutor
from tests.engine.drive import VOCAB, Collected, finish, model_info, submit


def make_slow_engine(slo_admission: bool) -> Engine:
    """Make an engine whose steps take a second each, and let it run some steps."""
    config = EngineConfig(
        num_blocks=64, block_size=4, max_model_len=96, max_chunk=16, slo_admission=slo_admission
    )
    executor = CostExecutor(config.num_blocks, config.block_size, VOCAB, lambda rows, context: 1.0)
    slow_engine = Engine(config, model_info(96), executor, lambda: 0.0)
    slow_engine.handle(submit("first", [1, 2, 3], SamplingParams(seed=1, max_tokens=4)))
    finish(slow_engine, Collected())
    return slow_engine


def targets(n: int = 1, **slo: float) -> SamplingParams:
    return SamplingParams(n=n, temperature=0, max_tokens=4, seed=1, slo=Slo(**slo))


def test_infeasible_requests_are_refused_with_feasible_targets() -> None:
    slow_engine = make_slow_engine(True)
    events = slow_engine.handle(submit("r", list(range(32)), targets(n=2, tpot_ms=500.0, ttft_ms=900.0)))
    assert [type(event) for event in events] == [Finished, Finished]
    for event in events:
        assert (event.reason, event.status) == ("error", 503)
        assert event.retry_after == 60.0
        assert "ttft_ms is 900" in event.error
        assert "tpot_ms is 500, and 1000.0 could be met" in event.error
    assert not slow_engine.has_work


def test_feasible_requests_are_served_and_all_are_by_default() -> None:
    for admission, slo in (
        (True, {"tpot_ms": 1500.0, "ttft_ms": 60_000.0}),
        (True, {}),
        (False, {"tpot_ms": 1.0}),
    ):
        slow_engine, collected = make_slow_engine(admission), Collected()
        assert slow_engine.handle(submit("r", list(range(32)), targets(**slo))) == []
        finish(slow_engine, collected)
        assert len(collected.tokens["r", 0]) == 4


def test_resumed_requests_are_not_refused() -> None:
    slow_engine = make_slow_engine(True)
    again = submit("r", [1, 2], targets(tpot_ms=1.0), attempt=1, outputs={0: [5]}, began={0: 0.0})
    assert slow_engine.handle(again) == []


def test_no_request_is_refused_before_a_step_was_timed() -> None:
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=96, slo_admission=True)
    executor = CostExecutor(config.num_blocks, config.block_size, VOCAB, lambda rows, context: 1.0)
    slow_engine = Engine(config, model_info(96), executor, lambda: 0.0)
    assert slow_engine.handle(submit("r", [1, 2], targets(tpot_ms=1.0))) == []
