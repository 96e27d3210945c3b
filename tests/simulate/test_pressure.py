"""Stream pairs with memory for little more than one request answer every request, although each worker waits
for blocks of the other."""

import random
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from streamserve.baselines.orders import ORDERS
from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.fleet.worker_state import Topology, pairs, pools
from streamserve.protocol.config import Order
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import model_info
from tests.simulate.answering import assert_all_answered

MAX_MODEL_LEN, BLOCK = 96, 4
MIN_BLOCKS = MAX_MODEL_LEN // BLOCK + 2
"""Number of blocks that the longest request needs, plus two."""
MAX_VIRTUAL_SECONDS = 120.0
"""Maximum virtual seconds: a run takes about 7, and the longest observed one took 21."""


def run_simulation(
    seed: int,
    topology: Topology,
    wire: float,
    eviction: Literal["swap", "recompute"],
    blocks: int,
    kills: int = 0,
    order: Order = "slo",
    priorities: tuple[int, ...] = (0,),
) -> Simulation:
    """Run sixteen requests within half a second, all of which must be answered in time."""
    engine = EngineConfig(
        num_blocks=blocks, block_size=BLOCK, max_model_len=MAX_MODEL_LEN, max_num_seqs=16, max_chunk=12,
        max_num_batched_tokens=24, eviction=eviction, swap_blocks=80, order=order, check=True,
    )  # fmt: skip
    simulation = Simulation(
        FleetConfig(topology=topology, max_attempts=kills + 1),
        WorkerSpec(
            engine,
            model_info(MAX_MODEL_LEN),
            lambda tokens, context: 0.01 + tokens * 0.001,
            wire_seconds=wire,
        ),
    )
    rng, ranks = random.Random(seed), random.Random(seed)
    opened = []
    for number in range(16):
        prompt = [rng.randrange(90) for _ in range(rng.randint(10, 60))]
        params = SamplingParams(n=rng.choice((1, 1, 3)), seed=number, max_tokens=rng.randint(2, 30))
        opened.append(Open(f"r{number}", prompt, params, ranks.choice(priorities)))
        simulation.at(rng.uniform(1, 1.5), opened[-1])
    for _ in range(kills):
        simulation.kill(rng.uniform(1.2, 6), rng.choice(topology.names))
    assert_all_answered(simulation, opened, simulation.run(until=MAX_VIRTUAL_SECONDS))
    return simulation


@given(
    seed=st.integers(0, 2**32),
    topology=st.sampled_from((pairs(1), pairs(2), pools(2, 1), pools(1, 2))),
    wire=st.sampled_from((0.0, 0.003, 0.1)),
    eviction=st.sampled_from(("swap", "recompute")),
    blocks=st.integers(MIN_BLOCKS, 2 * MIN_BLOCKS),
    kills=st.sampled_from((0, 0, 1, 3)),
    order=st.sampled_from(tuple(ORDERS)),
    priorities=st.sampled_from(((0,), (0, 1))),
)
def test_workers_short_of_memory_do_not_deadlock(
    seed: int,
    topology: Topology,
    wire: float,
    eviction: Literal["swap", "recompute"],
    blocks: int,
    kills: int,
    order: Order,
    priorities: tuple[int, ...],
) -> None:
    simulation = run_simulation(seed, topology, wire, eviction, blocks, kills, order, priorities)
    assert sum(worker.incarnation - 1 for worker in simulation.fleet.workers.values()) == kills


def test_a_kv_writeback_is_cancelled_where_its_blocks_are_needed() -> None:
    """A KV write-back is cancelled where its blocks are needed. Regression of a deadlock: a write-back waited
    for blocks of decoding sequences, which waited for prompts, which waited for the blocks reserved for the
    write-back."""
    simulation = run_simulation(122, pairs(2), 0.1, "recompute", 28, kills=1)
    assert not simulation.fleet.transfers.copies.open


def test_a_sequence_is_swapped_in_where_it_can_go_on() -> None:
    """A sequence is swapped in only where it can continue. Regression of a livelock: without a block for its
    next tokens it was swapped out again, endlessly."""
    workers = run_simulation(101509731, pools(1, 2), 0.003, "swap", 39, order="stta").workers.values()
    assert sum(worker.engine.report().evictions.blocks_back for worker in workers) > 0


def test_sequences_without_a_reservation_free_blocks_for_those_with_one() -> None:
    """Sequences without a reservation free blocks for sequences with one. Regression of a deadlock: computed
    prompts without a transfer reservation held the blocks of a prompt with a reservation."""
    prefill = run_simulation(0, pairs(1), 0.003, "recompute", 27).workers["prefill-0"].engine
    assert prefill.report().preemptions > 0


def test_sequences_with_a_reservation_are_admitted_first() -> None:
    """Sequences with a reservation are admitted first. Regression of a deadlock: all query tokens went to a
    prompt without a block to continue with."""
    prefill = run_simulation(340482, pools(2, 1), 0.0, "swap", 26, kills=1).workers["prefill-0"].engine
    assert prefill.report().preemptions > 0
