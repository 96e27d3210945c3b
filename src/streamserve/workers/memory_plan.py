"""Program that plans the memory of several models.

Reads a `MemoryRequest` from standard input and writes the plan to standard output. It is a separate process,
because reading a checkpoint's shapes loads torch, which a server does not load.
"""

import os
import sys

import msgspec

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.model_memory import MemoryPlan, MemoryRequest, PlanRefused

BUDGET_SHARE = 0.8
"""Default share of the available memory for all models together."""


def plan(request: MemoryRequest) -> MemoryPlan | PlanRefused:
    """Return the memory of each model, such that every model alone fits the budget.

    The KV caches of all models together take by default at most the share of the budget that the KV cache of
    a single model takes.
    """
    from streamserve.execution.compute.memory import KV_FRACTION
    from streamserve.execution.loading.footprint import footprint
    from streamserve.system.available_memory import available_bytes

    fraction = KV_FRACTION / len(request.models)
    budget = int(available_bytes() * BUDGET_SHARE) if request.budget is None else request.budget
    planned = []
    for model in request.models:
        try:
            planned.append(footprint(model.config, budget, fraction, model.workers))
        except CheckpointError as error:
            limit = f"the models' memory is {budget / 1e6:.1f} MB (--models-memory-bytes)"
            return PlanRefused(f"{model.name}: {error}; {limit}")
    return MemoryPlan(budget, tuple(planned))


def main() -> None:
    """Answer the request on standard input."""
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=MemoryRequest)
    answers = os.dup(1)
    os.dup2(2, 1)  # other output goes to standard error, not between the bytes of the answer
    os.write(answers, msgspec.msgpack.encode(plan(request)))


if __name__ == "__main__":
    main()
