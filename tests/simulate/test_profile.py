"""A simulation with a measured curve takes the curve's seconds for its steps."""

from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import model_info


def test_steps_take_the_seconds_of_the_curve() -> None:
    curve = CostCurve((1, 16), (0, 1600), ((0.25, 0.5), (1.0, 1.25)))
    fleet, engine = FleetConfig(), EngineConfig(num_blocks=20, block_size=4, max_model_len=64)
    simulation = Simulation(
        fleet, WorkerSpec(engine, model_info(64), curve.in_tokens(100), start_seconds=1.0)
    )
    simulation.at(2.0, Open("r", [1] * 16, SamplingParams(seed=1, max_tokens=3)))
    received = simulation.run()
    steps = [(16, 16), (1, 17), (1, 18)]  # query tokens, and the KV tokens that they attend to
    assert received[-1].time == 2.0 + sum(curve(tokens, 100 * context) for tokens, context in steps)
