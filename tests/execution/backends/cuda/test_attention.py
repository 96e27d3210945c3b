"""The planned work of attention covers every visible slot once. Computed in plain torch from the planned
arrays, it equals the reference's attention."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import root
from streamserve.execution.backends.cuda.attention import (
    DIRECT,
    MIN_SPLIT,
    TILES,
    AttentionWork,
    padded_group,
    plan_attention,
)
from streamserve.execution.backends.cuda.plain.attention import attend as plain_attend
from streamserve.execution.model.layout import lay_out
from tests.conftest import Scale
from tests.execution.backends.cuda.attention_cases import make_case, random_case, run_layer
from tests.execution.dense_attention import visible_slots


def decoding(length: int, sequence: int = 0) -> Span:
    """Return a span of one token after `length` others, with blocks of 16 slots."""
    return Span(sequence, length, [0], list(range(length // 16 + 1)), root(0), (0,))


@pytest.mark.parametrize("seed", range(25))
def test_planned_attention_is_the_references(seed: int, scale: Scale) -> None:
    for number in range(seed, scale.pick(seed + 1, 100), 25):
        case = random_case(number)
        arrays = case.plan()
        for layer in range(2):
            out = run_layer(plain_attend, case, arrays, layer)
            torch.testing.assert_close(out, case.expected[layer], rtol=1e-4, atol=2e-5)


def test_random_cases_have_everything() -> None:
    cases = [random_case(seed) for seed in range(100)]
    works = [case.plan().works[None] for case in cases]
    spans = [part.span for case in cases for part in case.layout.parts]
    assert any(work.combine[:, 2].max() > 2 for work in works)
    assert {int(tile) for work in works for tile in np.flatnonzero(np.diff(work.starts))} == {0, 1, 2}
    assert {work.bits.shape[1] for work in works} == {0, 1, 2}
    assert any(span.skip > len(span.tokens) for span in spans)  # The first rows are in the middle of a tree.
    assert any(0 < span.skip < len(span.tokens) and span.tree and len(span.tree) > 1 for span in spans)


@pytest.mark.parametrize("seed", range(30))
def test_items_cover_every_visible_slot_once(seed: int) -> None:
    case = random_case(seed)
    arrays = case.plan()
    for window, work in arrays.works.items():
        covered = np.zeros((len(case.layout.tokens), arrays.tables.shape[1] * case.cache.block_size), int)
        for sequence, row, rows, begin, end, *_ in work.items.tolist():
            covered[row : row + rows, begin:end] += 1
            part = case.layout.parts[sequence]
            assert part.offset <= row
            assert row + rows <= part.offset + part.span.query_tokens - part.span.skip
        assert covered.max() == 1
        for part in case.layout.parts:
            for token in range(part.span.skip, part.span.query_tokens):
                row = part.offset + token - part.span.skip
                assert covered[row, visible_slots(part, token, window)].all()


@pytest.mark.parametrize("seed", range(30))
def test_items_fit_their_tiles_and_long_ones_come_first(seed: int) -> None:
    case = random_case(seed)
    for work in case.plan().works.values():
        assert work.starts[0] == 0
        assert work.starts[-1] == len(work.items)
        for index, tile in enumerate(TILES):
            items = work.items[work.starts[index] : work.starts[index + 1]]
            assert (items[:, 2] * padded_group(case.group) <= tile).all()
            assert (np.diff(items[:, 4] - items[:, 3]) <= 0).all()


@pytest.mark.parametrize("seed", range(30))
def test_partial_results_have_separate_places_and_are_all_combined(seed: int) -> None:
    case = random_case(seed)
    for work in case.plan().works.values():
        written = [
            place
            for _, _, rows, _, _, first, *_ in work.items.tolist()
            if first != DIRECT
            for place in range(first, first + rows)
        ]
        read = [
            first + number * stride
            for first, stride, count in work.combine.tolist()
            for number in range(count)
        ]
        assert sorted(written) == sorted(read) == list(range(len(read)))
        assert len(read) <= case.max_partials


def plan_spans(spans: Sequence[Span], max_partials: int = 8192) -> AttentionWork[np.ndarray]:
    return plan_attention(lay_out(spans, 16), 16, 4, 8, (None,), 132, max_partials).works[None]


def test_one_long_sequence_is_divided_for_the_whole_device() -> None:
    work = plan_spans([decoding(100_000)])
    lengths = work.items[:, 4] - work.items[:, 3]
    assert 132 * 2 <= len(work.items) * 8 <= 132 * 4
    assert lengths.min() >= MIN_SPLIT[0]


def test_a_large_batch_is_not_divided() -> None:
    work = plan_spans([decoding(600, number) for number in range(256)])
    assert len(work.items) == 256
    assert not work.combine.any()


def test_only_the_long_sequence_of_a_large_batch_is_divided() -> None:
    work = plan_spans([decoding(50_000), *(decoding(300, number) for number in range(1, 70))])
    assert work.combine[0, 2] > 4
    assert not work.combine[1:].any()


@pytest.mark.parametrize("max_partials", [0, 1, 5, 20])
def test_fewer_items_are_divided_where_the_workspace_is_small(max_partials: int) -> None:
    work = plan_spans([decoding(2000), decoding(3000, 1)], max_partials)
    assert work.combine[:, 2].sum() <= max_partials
    assert work.combine.any() == (max_partials > 1)


def test_windows_without_effect_share_their_work() -> None:
    layout = lay_out([decoding(100)], 16)
    works = plan_attention(layout, 16, 4, 8, (64, None, 4096, 64), 132, 100).works
    assert list(works) == [64, None, 4096]
    assert works[4096] is works[None]
    assert works[64].items[0, 3:5].tolist() == [37, 101]


def test_a_group_larger_than_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="129 query heads"):
        plan_attention(lay_out([decoding(3)], 16), 16, 129, 1, (None,), 132, 100)


def test_slots_that_no_row_sees_may_hold_anything() -> None:
    case = make_case([Span(0, 0, [0] * 5, [1, 0])], 2, 4, 1, 2, 16, 3)
    cache_layer = case.cache.data[0].clone()
    cache_layer[0, :, :, 1:] = torch.nan
    out = run_layer(plain_attend, case, case.plan(), 0, cache_layer=cache_layer)
    torch.testing.assert_close(out, case.expected[0], rtol=1e-4, atol=2e-5)
