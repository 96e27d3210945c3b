"""Steps that take longer than a worker may be silent, in virtual time."""

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from tests.engine.drive import expected, model_info
from tests.simulate.test_simulation import texts

ENGINE = EngineConfig(num_blocks=40, block_size=4, max_model_len=96)
STUCK_AFTER = 1.0
STEP_SECONDS = 8 * STUCK_AFTER


class Silent(Simulation):
    """Workers leave no signs of life."""

    def _beats(self):
        return {}


def serve(simulation: type[Simulation]) -> Simulation:
    made = simulation(
        FleetConfig(stuck_after=STUCK_AFTER), ENGINE, model_info(96), lambda rows, context: STEP_SECONDS
    )
    prompt, params = list(range(30)), SamplingParams(seed=1, max_tokens=5)
    made.at(1.1, Open("r", prompt, params))
    made.ticks()
    given = made.run(until=100.0)
    if simulation is Simulation:
        assert texts(given)["r", 0] == expected(prompt, params, 0, 96)
        assert given[-1].time >= 5 * STEP_SECONDS
    return made


def test_a_long_step_ends_no_worker_that_shows_that_it_lives() -> None:
    assert serve(Simulation).deaths == 0


def test_without_signs_of_life_it_would() -> None:
    assert serve(Silent).deaths > 0
