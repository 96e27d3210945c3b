"""An engine with a floor model reports the sum of its steps' minimum times."""

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import StepPlan
from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.executor import CostExecutor
from tests.engine.drive import VOCAB, Collected, finish, model_info, submit

CONFIG = EngineConfig(num_blocks=40, block_size=4, max_model_len=64, max_num_batched_tokens=8)


def test_floors_of_all_steps_add_up() -> None:
    plans: list[StepPlan] = []

    def floor(plan: StepPlan) -> float:
        plans.append(plan)
        return 0.25 * sum(span.query_tokens for span in plan.spans)

    executor = CostExecutor(CONFIG.num_blocks, CONFIG.block_size, VOCAB, lambda rows, context: 1.0)
    engine = Engine(CONFIG, model_info(64), executor, lambda: 0.0, ports=EnginePorts(floor=floor))
    engine.handle(submit("r", [1] * 20, SamplingParams(temperature=0.0, max_tokens=5)))
    finish(engine, Collected())
    assert len(plans) == engine.report().steps > 3
    assert engine.report().step_floor_seconds == 0.25 * (20 + 4)


def test_without_a_profile_no_floor_is_reported() -> None:
    executor = CostExecutor(CONFIG.num_blocks, CONFIG.block_size, VOCAB, lambda rows, context: 1.0)
    assert Engine(CONFIG, model_info(64), executor, lambda: 0.0).report().step_floor_seconds is None
