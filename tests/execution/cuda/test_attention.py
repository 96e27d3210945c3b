"""The planned work of attention covers every visible slot once, and computed in plain torch from the planned
arrays it is the reference's attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from streamserve.engine.plan import Span
from streamserve.execution.attention import ReferenceAttention
from streamserve.execution.cuda.attention import (
    DIRECT,
    MIN_SPLIT,
    TILES,
    AttentionArrays,
    AttentionWork,
    padded_group,
    plan_attention,
    workspace_size,
)
from streamserve.execution.cuda.plain.attention import attend as plain_attend
from streamserve.execution.kv_cache import KVCache
from streamserve.execution.layout import Layout, lay_out
from streamserve.speculation.tree import TokenTree, root
from tests.conftest import Scale
from tests.execution.test_attention import visible_slots
from tests.execution.test_kv_cache import SPEC

Attend = Callable[..., None]

BLOCK_SIZES = (1, 3, 4, 16, 32, 256)
STARTS = (0, 1, 15, 16, 17, 63, 64, 65, 130, 700)
CHUNKS = (1, 1, 1, 2, 5, 17, 40)
TREE_SIZES = (2, 5, 9, 32, 33, 40)
WINDOWS = (1, 2, 3, 7, 20, 64, 150)


@dataclass(frozen=True)
class Case:
    """A step on a cache full of random history, with two layers: one with a window, one without."""

    layout: Layout
    cache: KVCache
    group: int
    windows: tuple[int, None]
    q: Tensor
    expected: list[Tensor]
    max_partials: int
    multiprocessors: int

    def plan(self) -> AttentionArrays:
        kv_heads = self.cache.data.shape[3]
        return plan_attention(
            self.layout, self.cache.block_size, self.group, kv_heads, self.windows, self.multiprocessors,
            self.max_partials,
        )  # fmt: skip


def random_tree(rng: np.random.Generator, size: int) -> TokenTree:
    parents = (-1, *(int(rng.integers(0, node)) for node in range(1, size)))
    return TokenTree((0,) * size, parents, (0.0,) * size, (1.0,) * size)


def random_spans(rng: np.random.Generator, block_size: int, largest: int) -> tuple[list[Span], int]:
    """Spans of several sequences, and the number of blocks of their pool; block tables are shuffled. No start
    or chunk is above `largest`."""
    spans = []
    for number in range(int(rng.integers(1, 5))):
        tokens = [0] * min(largest, int(rng.choice(CHUNKS)))
        tree = random_tree(rng, min(largest, int(rng.choice(TREE_SIZES)))) if rng.random() < 0.4 else root(0)
        tree = tree if rng.random() < 0.7 else None
        start = int(rng.choice([start for start in STARTS if start <= largest]))
        span = Span(number, start, tokens, [], tree, (0,) if tree else ())
        if rng.random() < 0.3:
            span = Span(number, start, tokens, [], tree, skip=int(rng.integers(0, span.query_tokens)))
        spans.append(span)
    sizes = [-(-(span.start + span.query_tokens) // block_size) for span in spans]
    blocks = rng.permutation(sum(sizes) + 2)
    for span, table in zip(spans, np.split(blocks, np.cumsum(sizes)), strict=False):
        span.blocks.extend(table.tolist())
    return spans, len(blocks)


def random_case(seed: int, dims: Sequence[int] = (8, 16, 20), largest: int = 10_000) -> Case:
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice(BLOCK_SIZES))
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 3, 4, 8, 20]))
    spans, num_blocks = random_spans(rng, block_size, largest)
    return make_case(
        spans, num_blocks, block_size, kv_heads, group, int(rng.choice(dims)), int(rng.choice(WINDOWS)),
        int(rng.choice([0, 4, 40, 500])), int(rng.choice([1, 16, 132])), seed,
    )  # fmt: skip


def make_case(
    spans: Sequence[Span],
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    group: int,
    dim: int,
    window: int,
    max_partials: int = 500,
    multiprocessors: int = 16,
    seed: int = 0,
) -> Case:
    spec = replace(SPEC, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim, num_layers=2)
    cache = KVCache(spec, num_blocks, block_size, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    layout = lay_out(spans, block_size)
    reference = ReferenceAttention(cache, (window, None), group)
    reference.plan(layout)
    heads = kv_heads * group
    qkv = torch.randn(len(layout.tokens), heads + 2 * kv_heads, dim, generator=generator)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    expected = [reference.run(layer, q, k, v) for layer in range(2)]
    return Case(layout, cache, group, (window, None), q, expected, max_partials, multiprocessors)


def run_layer(
    attend: Attend,
    case: Case,
    arrays: AttentionArrays,
    layer: int,
    device: torch.device | str = "cpu",
    cache_layer: Tensor | None = None,
    q: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Attention of one layer, computed by `attend` on `device`. What must not be read is NaN."""
    q = case.q if q is None else q
    rows, heads, dim = q.shape
    out = torch.full((rows, heads, dim), torch.nan, dtype=q.dtype, device=device)
    size = workspace_size(case.max_partials, heads, dim)
    work = AttentionWork(*(torch.from_numpy(array).to(device) for array in arrays.works[case.windows[layer]]))
    attend(
        q.to(device),
        (case.cache.data[layer] if cache_layer is None else cache_layer).to(device),
        work,
        torch.from_numpy(arrays.tables).to(device),
        torch.from_numpy(arrays.limits).to(device),
        out,
        dim**-0.5,
        workspace=torch.full((size,), torch.nan, device=device),
        **options,
    )
    return out.cpu()


def decoding(length: int, sequence: int = 0) -> Span:
    """A span of one token after `length` others, with blocks of 16 slots."""
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
    assert any(span.skip > len(span.tokens) for span in spans)  # the first rows are in the middle of a tree
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
