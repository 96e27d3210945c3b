"""A measured curve drives a simulation: its steps take what the curve says."""

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.sampling import SamplingParams
from streamserve.scheduling.cost import StepCost
from streamserve.simulate.simulation import Simulation
from tests.engine.drive import model_info


def test_steps_take_what_the_curve_says() -> None:
    curve = StepCost((1, 16), (0, 1600), ((0.25, 0.5), (1.0, 1.25)))
    fleet, engine = FleetConfig(), EngineConfig(num_blocks=20, block_size=4, max_model_len=64)
    simulation = Simulation(fleet, engine, model_info(64), curve.in_tokens(100), start_seconds=1.0)
    simulation.at(2.0, Open("r", [1] * 16, SamplingParams(seed=1, max_tokens=3)))
    given = simulation.run()
    steps = [(16, 16), (1, 17), (1, 18)]  # rows, and the KV tokens they attend to
    assert given[-1].time == 2.0 + sum(curve(rows, 100 * context) for rows, context in steps)
