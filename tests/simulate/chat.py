"""Two requests of a chat on simulated workers."""

from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.events import Open
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from tests.engine.drive import assert_engine_empty, expected
from tests.simulate.answering import texts

ENGINE = EngineConfig(num_blocks=120, block_size=4, max_model_len=400, max_num_seqs=8)
FIRST = Open("first", [number % 90 for number in range(100)], SamplingParams(seed=1, max_tokens=30))


def assert_both_answered(simulation: Simulation, second: Open) -> None:
    """Run both requests one after the other; assert that their texts are right, and that nothing is
    leaked."""
    simulation.at(1.5, FIRST)
    simulation.at(5.0, second)
    received = texts(simulation.run())
    for request in (FIRST, second):
        assert received[request.request, 0] == expected(request.prompt, request.params, 0, 400)
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
