"""Measure the cost of drafting before serving starts: an initial estimate, which later steps correct."""

import time

from streamserve.engine.plan import Drafter, DraftRequest
from streamserve.execution.load import Loaded
from streamserve.protocol.sampling import SamplingParams
from streamserve.scheduling.cost import StepCost, fit

ROWS = (1, 8, 64)
DEPTH = 2
TIMES = 3
"""Repetitions, of which the shortest counts: disturbances only add time."""


def draft_cost(loaded: Loaded) -> StepCost | None:
    """Return the seconds of a level of trees by their rows; None if there is no draft model."""
    drafter, blocks = loaded.drafter, loaded.engine_config.num_blocks
    if drafter is None or drafter.plane is None or loaded.engine_config.block_size <= DEPTH:
        return None
    rows = [count for count in ROWS if count <= blocks]
    return fit(rows, [0], [[min(_level(drafter, count) for _ in range(TIMES))] for count in rows])


def _level(drafter: Drafter, rows: int) -> float:
    """Return the seconds of one level of `rows` chains."""
    params = SamplingParams(temperature=0.0)
    requests = [
        DraftRequest(
            id=-1 - block, epoch=0, keep=0, new_tokens=[0], choice=0, output=0, params=params,
            depth=DEPTH, width=1, nodes=DEPTH, computed=0, blocks=[block],
        )
        for block in range(rows)
    ]  # fmt: skip
    started = time.perf_counter()
    drafter.begin(requests)
    drafter.collect(started)
    seconds = time.perf_counter() - started
    drafter.release([request.id for request in requests])
    return seconds / DEPTH
