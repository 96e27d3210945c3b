"""Measure the cost of drafting before serving starts. Later steps correct this initial estimate."""

import time

from streamserve.contracts.cost import fit
from streamserve.contracts.plan import Drafter, DraftRequest
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.sampling import SamplingParams

CHAIN_COUNTS = (1, 8, 64)
DEPTH = 2
REPETITIONS = 3
"""Number of repetitions; the shortest counts, because disturbances only add time."""


def draft_cost(loaded: Loaded) -> CostCurve | None:
    """Return the seconds of one level of draft trees by its number of nodes; None without a draft model."""
    drafter, blocks = loaded.drafter, loaded.engine_config.num_blocks
    if drafter is None or drafter.group is None or loaded.engine_config.block_size <= DEPTH:
        return None
    chains = [count for count in CHAIN_COUNTS if count <= blocks]
    vocabulary = loaded.model.spec.vocab_size
    seconds = [[min(_level(drafter, count, vocabulary) for _ in range(REPETITIONS))] for count in chains]
    return fit(chains, [0], seconds)


def _level(drafter: Drafter, chains: int, vocabulary: int) -> float:
    """Return the seconds of drafting one level of `chains` chains. Their tokens differ, so that they choose
    different experts."""
    params = SamplingParams(temperature=0.0)
    requests = [
        DraftRequest(
            id=-1 - block, epoch=0, tokens=[block % vocabulary], length=1, choice=0, output=0, params=params,
            depth=DEPTH, width=1, nodes=DEPTH, computed=0, blocks=[block],
        )
        for block in range(chains)
    ]  # fmt: skip
    started = time.perf_counter()
    drafter.begin(requests)
    drafter.collect(started)
    seconds = time.perf_counter() - started
    drafter.release([request.id for request in requests])
    return seconds / DEPTH
