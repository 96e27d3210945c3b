"""The floor of a step counts the necessary work once: reading weights and visible KV, and matrix products."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.plan import Span, StepPlan
from streamserve.contracts.tree import chain, root
from streamserve.execution.model.rope_spec import RopeSpec
from streamserve.execution.model.spec import ModelSpec, Multipliers
from streamserve.execution.profile.floor import StepFloor
from tests.execution.strategies import Step, steps

LAYER = 8 * (6 + 2 * 4) + 6 * 8 + 3 * 8 * 10
"""Number of weights in the linear maps of one layer: queries, keys and values, output, MLP."""


def spec_of(windows: tuple[int | None, ...]) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=50, hidden_size=8, intermediate_size=10,
        num_layers=len(windows), num_heads=3, num_kv_heads=2, head_dim=2, rms_norm_eps=1e-6,
        rotary_dim=2, ropes=(RopeSpec(10_000.0),) * len(windows), windows=windows,
        max_position_embeddings=64, tied_embeddings=True, multipliers=Multipliers(2**-0.5),
        qkv_bias=True, out_bias=False, mlp_bias=False, dtype=None, eos_token_ids=(),
    )  # fmt: skip


def plan_of(spans: list[Span]) -> StepPlan:
    return StepPlan(0, [], [], [], spans)


def visible(span: Span, row: int, window: int | None) -> range:
    """Return the number of positions that a row of a span sees. Nodes of a tree count as a chain."""
    position = span.start + row
    return range(0 if window is None else max(0, position - window + 1), position + 1)


windows = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@given(steps(), windows, st.sampled_from([None, 6, 7]))
def test_work_equals_a_count_of_single_positions(
    step: Step, windows: tuple[int | None, ...], kv_vector_bytes: int | None
) -> None:
    """The work of a step equals a count of single positions. Each position has a key and a value, with 16-bit
    numbers or the given number of bytes."""
    floor = StepFloor(spec_of(windows), 2, step.block_size, 1.0, 1.0, kv_vector_bytes=kv_vector_bytes)
    kv_bytes = 0
    rows = sum(span.query_tokens for span in step.spans)
    sampled = sum(len(span.tree) for span in step.spans if span.tree)
    parameters = LAYER * len(windows) + 8 * 50 * bool(sampled)
    products = rows * LAYER * len(windows) + sampled * 8 * 50
    for window in windows:
        slots, pairs = set(), 0
        for span in step.spans:
            for row in range(span.query_tokens):
                positions = visible(span, row, window)
                pairs += len(positions)
                slots |= {(span.blocks[p // step.block_size], p % step.block_size) for p in positions}
        kv_bytes += 2 * 2 * (kv_vector_bytes or 4) * len(slots)
        products += 2 * 3 * 2 * pairs
    work = floor.work(step.spans)
    assert (work.bytes, work.operations) == (2 * parameters + kv_bytes, 2 * products)


def test_a_shared_prefix_is_read_once() -> None:
    floor = StepFloor(spec_of((None,)), 2, 4, 1.0, 1.0)
    separate = [Span(n, 8, [1], [4 * n, 4 * n + 1, 4 * n + 2], root(1), (0,)) for n in range(3)]
    shared = [Span(n, 8, [1], [0, 1, 4 * n + 2], root(1), (0,)) for n in range(3)]
    saved = floor.work(separate).bytes - floor.work(shared).bytes
    assert saved == 2 * 8 * 2 * 2 * 2 * 2  # two sequences' eight slots, keys and values, heads, dim, bytes
    assert floor.work(separate).operations == floor.work(shared).operations


def test_the_floor_is_the_slower_of_reading_and_multiplying() -> None:
    spans = [Span(0, 3, [1, 2], [0, 1], chain([2, 3]), (0,))]
    floor = StepFloor(spec_of((None,)), 4, 4, 1.0, 1.0)
    work = floor.work(spans)
    times = Counter()
    for bandwidth, rate in [(1.0, 1e9), (1e9, 1.0), (100.0, 10.0)]:
        seconds = StepFloor(spec_of((None,)), 4, 4, bandwidth, rate)(plan_of(spans))
        assert seconds == max(work.bytes / bandwidth, work.operations / rate)
        times["reading" if seconds == work.bytes / bandwidth else "multiplying"] += 1
    assert set(times) == {"reading", "multiplying"}


def test_a_step_without_spans_could_take_no_time() -> None:
    assert StepFloor(spec_of((None,)), 2, 4, 1.0, 1.0)(plan_of([])) == 0.0
