"""Route candidates for tests of routers."""

from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.scheduling.routing import Costs, RouteCandidate, WorkerLoad

COSTS = Costs(prefill=lambda tokens: tokens / 1000, decode=lambda seqs, kv: 0.01 + 0.001 * seqs)
IDLE = WorkerLoad("w", max_num_seqs=10, blocks_total=100, costs=COSTS)


def candidate(cached: int = 0, decode: WorkerLoad | None = None, **load: float) -> RouteCandidate:
    prefill = replace(IDLE, **load)
    return RouteCandidate(prefill, prefill if decode is None else decode, cached)


loads = st.builds(
    WorkerLoad,
    st.just("w"),
    queued=st.integers(0, 20),
    queued_tokens=st.integers(0, 5000),
    prompts=st.lists(st.integers(1, 4000), max_size=5).map(tuple),
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
