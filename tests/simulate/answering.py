"""Simulated fleets, and the check that all requests have their texts."""

from hypothesis import strategies as st

from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.events import Deliver, Open
from streamserve.fleet.worker_state import mixed, pairs, pools, unified
from streamserve.protocol.messages import Token
from streamserve.simulate.simulation import ClientEvent, Simulation
from tests.engine.drive import assert_engine_empty, expected

ENGINE = EngineConfig(
    num_blocks=60, block_size=4, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=32
)


def texts(received: list[ClientEvent]) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    for item in received:
        assert isinstance(item.message, Deliver), item.message
        for event in item.message.events:
            if isinstance(event, Token):
                tokens.setdefault((event.request, event.choice), []).append(event.token)
    return tokens


def assert_all_answered(simulation: Simulation, opened: list[Open], received: list[ClientEvent]) -> None:
    tokens = texts(received)
    for request in opened:
        for choice in range(request.params.n):
            assert tokens[request.request, choice] == expected(request.prompt, request.params, choice, 96)
    assert not simulation.fleet.requests
    assert not len(simulation.fleet.transfers.reservations)
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
    for state in simulation.fleet.workers.values():
        assert not state.prompts
        assert not state.incoming
        assert not state.decoding


topologies = st.one_of(
    st.builds(unified, st.integers(1, 3)),
    st.builds(pairs, st.integers(1, 3)),
    st.builds(pools, st.integers(1, 3), st.integers(1, 3)),
    st.builds(mixed, st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
)
