"""The planned work of attention, computed by the kernel or in plain torch, is the reference's attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.execution.cuda.attention import TILES, AttentionWork, plan_attention
from streamserve.execution.cuda.operations import operations
from streamserve.execution.cuda.runner import attention_shape
from tests.execution.strategies import Step, steps
from tests.execution.test_attention import attend_step

PARTIALS = 512
IMPLEMENTATIONS = ("plain", "kernels")


def planned(step: Step, layout, kv_heads: int, group: int, windows, multiprocessors: int = 16):
    return plan_attention(layout, step.block_size, group, kv_heads, windows, multiprocessors, PARTIALS)


def attend(implementation: str, arrays, window, q, cache_layer, device) -> torch.Tensor:
    def on_device(array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    module = operations(implementation).attention
    work = AttentionWork(*(on_device(array) for array in arrays.works[window]))
    heads, dim = q.shape[1:]
    out = torch.full(q.shape, torch.nan, device=device)
    workspace = torch.full((PARTIALS * heads * (dim + 2),), torch.nan, device=device)
    tiles, combined = attention_shape(arrays)
    module.attend(
        q.to(device), cache_layer.to(device), work, on_device(arrays.tables), on_device(arrays.limits), out,
        workspace, dim**-0.5, tiles, combined,
    )  # fmt: skip
    return out.cpu()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(
    step=steps(max_sequences=3, max_start=400),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4]),
    window=st.none() | st.integers(1, 150),
)
def test_planned_attention_is_the_references(implementation, device, step, kv_heads, group, window):
    windows = (window, None)
    layout, q, cache, outputs = attend_step(step, kv_heads, group, windows)
    arrays = planned(step, layout, kv_heads, group, windows)
    for layer, layer_window in enumerate(windows):
        found = attend(implementation, arrays, layer_window, q, cache.data[layer], device)
        torch.testing.assert_close(found, outputs[layer], rtol=1e-4, atol=2e-5)


@given(step=steps(max_sequences=6, max_start=900, max_chunk=60), group=st.sampled_from([1, 4]))
def test_every_row_sees_all_its_keys_exactly_once(step, group):
    layout, *_ = attend_step(step, 1, group, (None, None))
    arrays = planned(step, layout, 1, group, (None,))
    work = arrays.works[None]
    keys = np.zeros((len(layout.tokens), int(arrays.limits.max()) + 40), int)
    for index, tile in enumerate(TILES):
        for _, row, rows, begin, end, *_ in work.items[work.starts[index] : work.starts[index + 1]].tolist():
            assert rows * group <= tile
            keys[row : row + rows, begin:end] += 1
    for part in layout.parts:
        for row in range(part.offset, part.offset + part.span.query_tokens):
            own = part.span.start + row - part.offset + 1
            assert (keys[row, :own] == 1).all()
            assert keys[row].max() == 1


@given(step=steps(max_sequences=6, max_start=900))
def test_partial_results_have_separate_places(step):
    layout, *_ = attend_step(step, 1, 4, (None, None))
    work = planned(step, layout, 1, 4, (None,), multiprocessors=100).works[None]
    places = [
        place
        for _, _, rows, _, _, first, *_ in work.items.tolist()
        if first >= 0
        for place in range(first, first + rows)
    ]
    read = [
        first + number * stride
        for first, stride, count in work.combine.tolist()
        for number in range(count)
    ]
    assert sorted(places) == sorted(read) == list(range(len(places)))
    assert len(places) <= PARTIALS


def test_long_contexts_are_divided():
    from streamserve.engine.plan import Span
    from streamserve.execution.layout import lay_out
    from streamserve.speculation.tree import root

    layout = lay_out([Span(0, 4000, [0], list(range(251)), root(0), (0,))], 16)
    work = plan_attention(layout, 16, 4, 8, (None,), 132, 8192).works[None]
    assert len(work.items) > 16
    assert work.items[:, 4].max() == 4001


def test_planning_a_large_batch_is_fast():
    """A figure of benchmarks/gpu.py; here only that nothing grows with the square of the batch."""
    from streamserve.engine.plan import Span
    from streamserve.execution.layout import lay_out
    from streamserve.speculation.tree import root

    spans = [Span(n, 600, [0], list(range(38)), root(0), (0,)) for n in range(256)]
    layout = lay_out(spans, 16)
    arrays = plan_attention(layout, 16, 4, 8, (None, 4096), 132, 8192)
    assert arrays.tables.shape == (256, 38)
    assert replace(arrays).limits.tolist() == [601] * 256
