"""Route candidates for tests of routers."""

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.contracts.cost import WorkerCosts
from streamserve.scheduling.routing import STEP_TOKENS, RouteCandidate, WorkerLoad

COSTS = WorkerCosts(prefill=lambda tokens: tokens / 1000, decode=lambda seqs, kv: 0.01 + 0.001 * seqs)
IDLE = WorkerLoad("w", max_num_seqs=10, blocks_total=100, costs=COSTS)


def queue(*prompts: int) -> dict[str, Any]:
    """Return the load of a worker with prompts of these numbers of tokens to compute."""
    long = tuple(tokens for tokens in prompts if tokens > STEP_TOKENS)
    return {"queued": len(prompts), "queued_tokens": sum(prompts), "long_prompts": long}


def candidate(cached: int = 0, decode: WorkerLoad | None = None, **load: Any) -> RouteCandidate:
    prefill = replace(IDLE, **load)
    return RouteCandidate(prefill, prefill if decode is None else decode, cached)


loads = st.builds(
    lambda prompts, **load: WorkerLoad("w", **queue(*prompts), **load),
    prompts=st.lists(st.integers(1, 600) | st.integers(1, 4000), max_size=8),
    timely_tokens=st.integers(0, 5000),
    busy=st.floats(0, 5),
    timely_for=st.floats(0, 5),
    incoming=st.integers(0, 10),
    decoding=st.integers(0, 10),
    max_num_seqs=st.just(10),
    blocks_live=st.integers(0, 100),
    blocks_total=st.just(100),
    hit_rate=st.floats(0, 1),
    silence=st.floats(0, 5),
    costs=st.sampled_from((COSTS, COSTS, None)),
)
candidate_lists = st.lists(
    st.builds(RouteCandidate, loads, loads, st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6
)
