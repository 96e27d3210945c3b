"""In a chat on stream pairs, the next turn finds its KV on the decode worker of the last turn."""

import pytest

from streamserve.fleet import kv_writeback as writebacks
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.fleet.worker_state import Topology, pairs, pools
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import assert_engine_empty, expected, model_info, submit
from tests.simulate.chat import ENGINE, FIRST, assert_both_answered

ANSWER = expected(FIRST.prompt, FIRST.params, 0, 400)


def run_simulation(
    topology: Topology, more: list[int], continue_tokens: int = 64, **params: object
) -> Simulation:
    """Run one turn, and then the next turn, which adds the tokens in `more`."""
    fleet = FleetConfig(topology=topology, continue_tokens=continue_tokens)
    simulation = Simulation(
        fleet, WorkerSpec(ENGINE, model_info(400), lambda tokens, context: 0.01 + tokens * 0.001)
    )
    again = Open("again", FIRST.prompt + ANSWER + more, SamplingParams(seed=2, max_tokens=9, **params))
    assert_both_answered(simulation, again)
    return simulation


def hits(simulation: Simulation, worker: str) -> int:
    return simulation.workers[worker].engine.report().prefix_hits


def transfer_report(simulation: Simulation, worker: str) -> TransferReport:
    report = simulation.workers[worker].engine.report().transfer
    assert report
    return report


@pytest.mark.parametrize("topology", [pairs(1), pools(2, 1)])
def test_a_finished_answer_returns_to_where_the_next_turn_is_computed(topology: Topology) -> None:
    simulation = run_simulation(topology, [5] * 10)
    prefill = max(topology.prefill, key=lambda name: hits(simulation, name))
    assert hits(simulation, prefill) == 128, "all blocks of prompt and answer except the last one"
    prefill_report = transfer_report(simulation, prefill)
    assert (prefill_report.received, prefill_report.received_copies) == (0, 2)
    assert prefill_report.copied_tokens == 28 + 8, "cached blocks are not sent"
    decode_report = transfer_report(simulation, "decode-0")
    assert (decode_report.received, decode_report.received_tokens) == (2, 100 + 140)
    assert (decode_report.handed_over, decode_report.writebacks) == (0, 2), "no request decodes elsewhere"
    assert decode_report.writeback_bytes == decode_report.sent_bytes > 0
    assert sum(transfer_report(simulation, name).handed_over for name in topology.prefill) == 2
    assert decode_report.hit_tokens == 128, "cached blocks are not sent in the next turn's handoff either"
    assert not simulation.fleet.transfers.copies.open


@pytest.mark.parametrize("topology", [pairs(1), pools(2, 1)])
def test_before_the_writeback_the_next_turn_is_computed_where_its_kv_is(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writebacks, "MAX_WRITEBACKS", 0)
    simulation = run_simulation(topology, [5] * 10)
    assert hits(simulation, "decode-0") == 128
    assert transfer_report(simulation, "decode-0").received == 1, "the second turn was not moved"


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("after", [0.001, 0.02, 0.05, 0.2])
def test_a_worker_that_dies_meanwhile_leaks_nothing(worker: str, after: float) -> None:
    fleet = FleetConfig(topology=pairs(1))
    simulation = Simulation(
        fleet,
        WorkerSpec(ENGINE, model_info(400), lambda tokens, context: 0.01 + tokens * 0.001, wire_seconds=0.01),
    )
    ended = first_answer_time()
    simulation.kill(ended + after, worker)
    assert_both_answered(
        simulation, Open("again", FIRST.prompt + ANSWER + [5], SamplingParams(seed=2, max_tokens=9))
    )
    assert not simulation.fleet.transfers.copies.open
    assert not len(simulation.fleet.transfers.reservations)


def first_answer_time() -> float:
    """Return when the last token of the first turn arrives in the fleet of the test above."""
    fleet = FleetConfig(topology=pairs(1))
    simulation = Simulation(
        fleet,
        WorkerSpec(ENGINE, model_info(400), lambda tokens, context: 0.01 + tokens * 0.001, wire_seconds=0.01),
    )
    simulation.at(1.5, FIRST)
    return simulation.run()[-1].time


def test_an_answer_whose_kv_was_evicted_is_not_written_back() -> None:
    """An answer whose KV was evicted is not written back: another prompt took the decode worker's blocks
    before the transfer reservation arrived."""
    fleet = FleetConfig(topology=pairs(1))
    simulation = Simulation(fleet, WorkerSpec(ENGINE, model_info(400), lambda tokens, context: 0.01))
    engine = simulation.workers["decode-0"].engine
    events = engine.handle(submit("r", list(range(80)), SamplingParams(seed=1), phase="return"))
    assert [event.error for event in events] == ["its KV is no longer in this worker's cache"]
    assert_engine_empty(engine)


@pytest.mark.parametrize(
    ("more", "options"),
    [([5] * 65, {}), ([5] * 10, {"continue_tokens": 0}), ([5] * 10, {"prompt_logprobs": 0})],
)
def test_long_continuations_go_to_a_prefill_worker(more: list[int], options: dict[str, int]) -> None:
    simulation = run_simulation(pairs(1), more, **options)
    report = simulation.workers["decode-0"].engine.report()
    assert report.transfer
    assert report.transfer.received == 2
    assert report.transfer.hit_tokens >= 128 or "prompt_logprobs" in options, "cached blocks are not sent"


def test_a_prompt_with_a_common_beginning_goes_to_a_prefill_worker_that_caches_it() -> None:
    fleet = FleetConfig(topology=pairs(1))
    simulation = Simulation(
        fleet, WorkerSpec(ENGINE, model_info(400), lambda tokens, context: 0.01 + tokens * 0.001)
    )
    other = Open("other", [*FIRST.prompt, 5, 6, 7], SamplingParams(seed=2, max_tokens=9))
    assert_both_answered(simulation, other)
    assert hits(simulation, "prefill-0") == 100
