"""Steps that take longer than the heartbeat timeout, in virtual time."""

from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import expected, model_info
from tests.simulate.answering import texts

ENGINE = EngineConfig(num_blocks=40, block_size=4, max_model_len=96)
STUCK_AFTER = 1.0
STEP_SECONDS = 8 * STUCK_AFTER


class WithoutHeartbeats(Simulation):
    """A fleet without heartbeats."""

    def _heartbeats(self):
        return {}


def serve(simulation_class: type[Simulation]) -> Simulation:
    simulation = simulation_class(
        FleetConfig(stuck_after=STUCK_AFTER),
        WorkerSpec(ENGINE, model_info(96), lambda tokens, context: STEP_SECONDS),
    )
    prompt, params = list(range(30)), SamplingParams(seed=1, max_tokens=5)
    simulation.at(1.1, Open("r", prompt, params))
    simulation.schedule_ticks()
    received = simulation.run(until=100.0)
    if simulation_class is Simulation:
        assert texts(received)["r", 0] == expected(prompt, params, 0, 96)
        assert received[-1].time >= 5 * STEP_SECONDS
    return simulation


def test_a_worker_with_heartbeats_survives_a_long_step() -> None:
    assert serve(Simulation).deaths == 0


def test_without_heartbeats_it_is_killed() -> None:
    assert serve(WithoutHeartbeats).deaths > 0
