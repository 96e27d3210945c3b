"""Evicted KV is recomputed or swapped, by the cost of each, and by the share of KV that is expected to
survive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.cost import CostModel, Line, SwapCost, fit_line
from streamserve.scheduling.eviction import decide, learn_survival

CHUNK = 64
COSTS = CostModel(
    lambda query_tokens, kv: 0.002 + 0.0001 * query_tokens + 1e-7 * kv,
    SwapCost(Line(1e-3, 1e-3), Line(1e-3, 1e-3)),
)


def test_recomputing_is_in_chunks_after_the_computed_tokens() -> None:
    assert COSTS.prefill(0, CHUNK) == 0
    assert COSTS.prefill(100, CHUNK) == pytest.approx(COSTS.step(64, 0) + COSTS.step(36, 64))


def test_cost_takes_the_cheaper_of_the_two() -> None:
    slow_copies = CostModel(COSTS.step, SwapCost(Line(0.1, 0.1), Line(0.1, 0.1)))
    assert decide("cost", COSTS, CHUNK, 640, 16, 1.0, free_host_blocks=100).swap == (
        COSTS.swap.out(40) + COSTS.swap.back(40) < COSTS.prefill(640, CHUNK)
    )
    assert not decide("cost", slow_copies, CHUNK, 640, 16, 1.0, free_host_blocks=100).swap
    assert decide("swap", slow_copies, CHUNK, 640, 16, 1.0, free_host_blocks=100).swap
    assert not decide("recompute", COSTS, CHUNK, 640, 16, 1.0, free_host_blocks=100).swap


def test_kv_that_an_edit_will_invalidate_is_copied_out_for_nothing() -> None:
    """KV that an edit will invalidate is copied in vain: appended prompts tend to swapping, replaced prompts
    to recomputing."""
    cheap = CostModel(COSTS.step, SwapCost(Line(0.0, 5e-4), Line(0.0, 5e-4)))
    assert decide("cost", cheap, CHUNK, 640, 16, 1.0, free_host_blocks=100).swap
    assert not decide("cost", cheap, CHUNK, 640, 16, 0.1, free_host_blocks=100).swap


@given(
    tokens=st.integers(0, 2000), survival=st.floats(0, 1), free_host_blocks=st.integers(0, 200),
    policy=st.sampled_from(("recompute", "swap", "cost")),
)  # fmt: skip
def test_without_free_host_blocks_or_kv_nothing_is_swapped(
    tokens, survival, free_host_blocks, policy
) -> None:
    verdict = decide(policy, COSTS, CHUNK, tokens, 16, survival, free_host_blocks)
    blocks = -(-tokens // 16)
    if not blocks or blocks > free_host_blocks or policy == "recompute":
        assert not verdict.swap
    assert verdict.swap_seconds >= 0
    assert verdict.recompute_seconds >= 0


def test_survival_is_learned_from_edits() -> None:
    survival = 1.0
    for _ in range(6):
        survival = learn_survival(survival, 2, 10)
    assert survival == pytest.approx(0.2, abs=0.02)
    assert learn_survival(survival, 0, 0) == survival, "an empty prompt is no observation"


@given(start=st.floats(0, 1), each=st.floats(1e-6, 1))
def test_a_line_is_fitted_exactly(start: float, each: float) -> None:
    counts = [1, 4, 16, 64]
    line = fit_line(counts, [start + each * count for count in counts])
    assert line(10) == pytest.approx(start + each * 10, rel=1e-3)
    assert line(0) == 0


def test_a_line_is_never_negative() -> None:
    line = fit_line([1, 10], [0.1, 5.0])
    assert line.start == 0
    assert line.each > 0
