"""Stream pairs whose memory holds hardly more than one request: each half waits for blocks of the other,
and still everybody gets their answer."""

import random
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.fleet.worker_state import Topology, pairs, pools
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.sampling import SamplingParams
from streamserve.scheduling.ordering import ORDERS, Order
from streamserve.simulate.simulation import Simulation
from tests.engine.drive import model_info
from tests.simulate.test_simulation import assert_all_answered

LONGEST, BLOCK = 96, 4
TIGHT = LONGEST // BLOCK + 2
"""Blocks that the longest request needs, and two."""
ENOUGH = 120.0
"""Seconds: such a play takes some seven, and the longest that was seen took 21."""


def play(
    seed: int,
    topology: Topology,
    wire: float,
    eviction: Literal["swap", "recompute"],
    blocks: int,
    kills: int = 0,
    order: Order = "slo",
    priorities: tuple[int, ...] = (0,),
) -> Simulation:
    """Sixteen requests within half a second, all of which must be answered in time."""
    engine = EngineConfig(
        num_blocks=blocks, block_size=BLOCK, max_model_len=LONGEST, max_num_seqs=16, max_chunk=12,
        max_num_batched_tokens=24, eviction=eviction, swap_blocks=80, order=order, check=True,
    )  # fmt: skip
    simulation = Simulation(
        FleetConfig(topology=topology, max_attempts=kills + 1), engine,
        model_info(LONGEST), lambda rows, context: 0.01 + rows * 0.001, wire_seconds=wire,
    )  # fmt: skip
    rng, ranks = random.Random(seed), random.Random(seed)
    opened = []
    for number in range(16):
        prompt = [rng.randrange(90) for _ in range(rng.randint(10, 60))]
        params = SamplingParams(n=rng.choice((1, 1, 3)), seed=number, max_tokens=rng.randint(2, 30))
        opened.append(Open(f"r{number}", prompt, params, ranks.choice(priorities)))
        simulation.at(rng.uniform(1, 1.5), opened[-1])
    for _ in range(kills):
        simulation.kill(rng.uniform(1.2, 6), rng.choice(topology.names))
    assert_all_answered(simulation, opened, simulation.run(until=ENOUGH))
    return simulation


@given(
    seed=st.integers(0, 2**32),
    topology=st.sampled_from((pairs(1), pairs(2), pools(2, 1), pools(1, 2))),
    wire=st.sampled_from((0.0, 0.003, 0.1)),
    eviction=st.sampled_from(("swap", "recompute")),
    blocks=st.integers(TIGHT, 2 * TIGHT),
    kills=st.sampled_from((0, 0, 1, 3)),
    order=st.sampled_from(ORDERS),
    priorities=st.sampled_from(((0,), (0, 1))),
)
def test_halves_that_are_short_of_memory_do_not_wait_for_each_other_for_ever(
    seed: int,
    topology: Topology,
    wire: float,
    eviction: Literal["swap", "recompute"],
    blocks: int,
    kills: int,
    order: Order,
    priorities: tuple[int, ...],
) -> None:
    simulation = play(seed, topology, wire, eviction, blocks, kills, order, priorities)
    assert sum(worker.incarnation - 1 for worker in simulation.fleet.workers.values()) == kills


def test_an_answer_on_its_way_back_is_left_where_its_blocks_are_wanted() -> None:
    """A play that once came to nothing: an answer waited for room beside those that decode, which waited for
    prompts, which waited for the blocks that were held for the answer."""
    simulation = play(122, pairs(2), 0.1, "recompute", 28, kills=1)
    assert not simulation.fleet.returns.open


def test_who_waits_for_a_ticket_gives_its_blocks_to_who_has_one() -> None:
    """A play that once came to nothing: prompts that were done, but had no place to go to, held the blocks of
    one that another worker held blocks for."""
    prefill = play(0, pairs(1), 0.003, "recompute", 27).workers["prefill-0"].engine
    assert prefill.report().preemptions > 0


def test_who_has_a_ticket_begins_though_others_have_the_rows() -> None:
    """A play that once came to nothing: all rows went to a prompt that had no block to go on with."""
    prefill = play(340482, pools(2, 1), 0.0, "swap", 26, kills=1).workers["prefill-0"].engine
    assert prefill.report().preemptions > 0
