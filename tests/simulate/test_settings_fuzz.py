"""Random settings under random workloads in virtual time: every text and every count is correct."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields

import msgspec
import pytest

from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.fleet.worker_state import pairs, pools
from streamserve.protocol.config import Order
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.drafter import SimulatedDrafter
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.conftest import Scale
from tests.engine.drive import model_info
from tests.simulate.answering import assert_all_answered
from tests.simulate.settings_fuzz import ENGINE_FIELDS, FLEET_FIELDS, trial


def test_every_setting_is_drawn() -> None:
    assert set(ENGINE_FIELDS) == {field.name for field in msgspec.structs.fields(EngineConfig)}
    assert set(FLEET_FIELDS) == {field.name for field in fields(FleetConfig)}


def test_random_settings_change_no_text(scale: Scale, record: Callable[..., None]) -> None:
    total: Counter[str] = Counter()
    trials = scale.pick(20, 500)
    for seed in range(scale.seed, scale.seed + trials):
        total.update(vars(trial(seed)))
    record(trials=trials, **total)
    for count_name in ("accepted", "preempted", "swapped", "handed_over", "deaths", "cancelled"):
        assert total[count_name] > 0, count_name


@pytest.mark.parametrize("seed", [4804, 6262])
def test_an_evicted_sequence_resumes_after_the_one_that_evicted_it(seed: int) -> None:
    """An evicted sequence resumes after the sequence that evicted it. In the order `stta` two sequences
    changed places as one was swapped out: it was swapped in first, evicted for the other again, and so on."""
    assert trial(seed).swapped > 0


@pytest.mark.parametrize("policy", ["fixed:8", "goodput"])
def test_a_tree_that_the_budget_drops_leaves_no_draft_kv_beyond_the_blocks(policy: str) -> None:
    """A tree that the budget drops leaves no draft KV beyond the blocks. Short prompts are drafted for when
    they are nearly computed; if the budget then truncates them, the draft model has read more than the target
    computes."""
    engine = EngineConfig(
        num_blocks=400, block_size=4, max_model_len=96, max_num_batched_tokens=64, check=True
    )
    drafters: list[SimulatedDrafter] = []

    def make_drafter(executor: object) -> SimulatedDrafter:
        drafters.append(SimulatedDrafter(executor, 0.7))
        return drafters[-1]

    simulation = Simulation(
        FleetConfig(),
        WorkerSpec(
            engine,
            model_info(96),
            lambda tokens, context: 0.01 + tokens * 0.001,
            policy=policy,
            drafter=make_drafter,
            groups=2,
        ),
    )
    opened = [
        Open(f"r{number}", list(range(number, number + 30 + number)), SamplingParams(seed=1, max_tokens=20))
        for number in range(30)
    ]
    for request in opened:
        simulation.at(1.1, request)
    assert_all_answered(simulation, opened, simulation.run())
    assert simulation.workers["unified-0"].executor.accepted > 0
    assert drafters[0].trees > 0


@pytest.mark.parametrize("order", ["prefill-first", "stta"])
@pytest.mark.parametrize("topology", [pairs(1), pools(1, 2)], ids=["pair", "pools"])
def test_a_reservation_has_blocks_for_all_its_tokens(order: Order, topology) -> None:
    """A reservation has blocks for all its tokens. In orders that serve sequences in another order than their
    rank, a sequence served later must not take blocks reserved in the same step: no reservation is refused,
    and no request needs a second attempt."""
    engine = EngineConfig(
        num_blocks=30, block_size=4, max_model_len=96, max_num_seqs=8, order=order, check=True
    )
    simulation = Simulation(
        FleetConfig(topology=topology),
        WorkerSpec(engine, model_info(96), lambda tokens, context: 0.01 + tokens * 0.001, wire_seconds=0.003),
    )
    params = SamplingParams(seed=1, max_tokens=25)
    opened = [Open(f"r{number}", list(range(number, 20 + 4 * number)), params) for number in range(16)]
    for number, request in enumerate(opened):
        simulation.at(1.1 + 0.05 * number, request)
    received = simulation.run(until=300.0)
    assert_all_answered(simulation, opened, received)
    assert next(simulation.fleet.dispatcher._attempts) == len(opened), "each request needed one attempt"
    reports = [simulation.workers[name].engine.report().transfer for name in topology.prefill]
    assert sum(report.handed_over for report in reports if report) >= len(opened)
    assert sum(worker.engine.report().preemptions for worker in simulation.workers.values()) > 0
