"""The next turn of a chat on stream pairs: whoever decoded the last one has its KV."""

import pytest

from streamserve.fleet import kv_writeback as returns
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.fleet.worker_state import Topology, pairs, pools
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from tests.engine.drive import assert_engine_empty, expected, model_info, submit
from tests.simulate.test_simulation import texts

ENGINE = EngineConfig(num_blocks=120, block_size=4, max_model_len=400, max_num_seqs=8)
FIRST = Open("first", [number % 90 for number in range(100)], SamplingParams(seed=1, max_tokens=30))
ANSWER = expected(FIRST.prompt, FIRST.params, 0, 400)


def play(topology: Topology, more: list[int], continue_tokens: int = 64, **params: object) -> Simulation:
    """A turn, and then the next one, which says `more`."""
    fleet = FleetConfig(topology=topology, continue_tokens=continue_tokens)
    simulation = Simulation(fleet, ENGINE, model_info(400), lambda rows, context: 0.01 + rows * 0.001)
    again = Open("again", FIRST.prompt + ANSWER + more, SamplingParams(seed=2, max_tokens=9, **params))
    answered(simulation, again)
    return simulation


def answered(simulation: Simulation, second: Open) -> None:
    """Both requests, one after the other, get their text, and nothing is left."""
    simulation.at(1.5, FIRST)
    simulation.at(5.0, second)
    given = texts(simulation.run())
    for request in (FIRST, second):
        assert given[request.request, 0] == expected(request.prompt, request.params, 0, 400)
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)


def hits(simulation: Simulation, worker: str) -> int:
    return simulation.workers[worker].engine.report().prefix_hits


def received(simulation: Simulation, worker: str) -> TransferReport:
    report = simulation.workers[worker].engine.report().transfer
    assert report
    return report


@pytest.mark.parametrize("topology", [pairs(1), pools(2, 1)])
def test_a_finished_answer_returns_to_where_the_next_turn_is_computed(topology: Topology) -> None:
    simulation = play(topology, [5] * 10)
    front = max(topology.prefill, key=lambda name: hits(simulation, name))
    assert hits(simulation, front) == 128, "prompt and answer but for the last block"
    back = received(simulation, front)
    assert (back.received, back.received_tokens) == (2, 128 + 148), "and so does the second one"
    assert back.hit_tokens == 100 + 140, "what is there is not sent"
    moved = received(simulation, "decode-0")
    assert moved.received == 2
    assert moved.hit_tokens == 128, "nor when the next turn is handed over"
    assert not simulation.fleet.returns.open


@pytest.mark.parametrize("topology", [pairs(1), pools(2, 1)])
def test_before_that_it_is_computed_where_its_kv_lies(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returns, "MOST", 0)
    simulation = play(topology, [5] * 10)
    assert hits(simulation, "decode-0") == 128
    assert received(simulation, "decode-0").received == 1, "the second turn was not moved"


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("after", [0.001, 0.02, 0.05, 0.2])
def test_a_worker_that_dies_meanwhile_leaves_nothing(worker: str, after: float) -> None:
    fleet = FleetConfig(topology=pairs(1))
    simulation = Simulation(
        fleet, ENGINE, model_info(400), lambda rows, context: 0.01 + rows * 0.001, wire_seconds=0.01
    )
    ended = answer_ends()
    simulation.kill(ended + after, worker)
    answered(simulation, Open("again", FIRST.prompt + ANSWER + [5], SamplingParams(seed=2, max_tokens=9)))
    assert not simulation.fleet.returns.open
    assert not len(simulation.fleet.tickets)


def answer_ends() -> float:
    """When the first turn's last token comes in the fleet of the test above."""
    fleet = FleetConfig(topology=pairs(1))
    simulation = Simulation(
        fleet, ENGINE, model_info(400), lambda rows, context: 0.01 + rows * 0.001, wire_seconds=0.01
    )
    simulation.at(1.5, FIRST)
    return simulation.run()[-1].time


def test_an_answer_whose_kv_is_gone_stays_where_it_is() -> None:
    """Between the answer's end and the ticket another prompt took the decode worker's blocks."""
    fleet = FleetConfig(topology=pairs(1))
    simulation = Simulation(fleet, ENGINE, model_info(400), lambda rows, context: 0.01)
    engine = simulation.workers["decode-0"].engine
    events = engine.handle(submit("r", list(range(80)), SamplingParams(seed=1), phase="return"))
    assert [event.error for event in events] == ["its KV is here no more"]
    assert_engine_empty(engine)


@pytest.mark.parametrize(
    ("more", "given"),
    [([5] * 65, {}), ([5] * 10, {"continue_tokens": 0}), ([5] * 10, {"prompt_logprobs": 0})],
)
def test_what_is_long_goes_to_a_prefill_worker(more: list[int], given: dict[str, int]) -> None:
    simulation = play(pairs(1), more, **given)
    report = simulation.workers["decode-0"].engine.report()
    assert report.transfer
    assert report.transfer.received == 2
    assert report.transfer.hit_tokens >= 128 or "prompt_logprobs" in given, "and what is there is not sent"


def test_what_only_begins_alike_goes_to_a_prefill_worker_which_has_that_as_well() -> None:
    fleet = FleetConfig(topology=pairs(1))
    simulation = Simulation(fleet, ENGINE, model_info(400), lambda rows, context: 0.01 + rows * 0.001)
    other = Open("other", [*FIRST.prompt, 5, 6, 7], SamplingParams(seed=2, max_tokens=9))
    answered(simulation, other)
    assert hits(simulation, "prefill-0") == 100
