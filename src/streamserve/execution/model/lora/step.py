"""The LoRA adapters of a step's rows, and their addition to a linear map in plain torch."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from streamserve.execution.model.layout import Layout
from streamserve.execution.model.linear import LinearMap
from streamserve.execution.model.lora.types import LoadedAdapter, StepAdapters
from streamserve.execution.model.lora.weights import Place


def step_adapters(layout: Layout, loaded: Mapping[str, LoadedAdapter]) -> StepAdapters | None:
    """Return the adapters of a step's rows; None if no row has one. Raises ValueError for an adapter that is
    not `loaded`."""
    if not any(part.span.adapter for part in layout.parts):
        return None
    indices = dict[str, int]()
    adapter_of = np.full(len(layout.tokens), -1, np.int32)
    runs = []
    for part in layout.parts:
        name = part.span.adapter
        if not name:
            continue
        if name not in loaded:
            raise ValueError(f"sequence {part.span.sequence}: its adapter {name} is not loaded")
        index = indices.setdefault(name, len(indices))
        end = part.offset + part.span.query_tokens - part.span.skip
        adapter_of[part.offset : end] = index
        runs.append((part.offset, end, index))
    return StepAdapters([loaded[name] for name in indices], adapter_of, runs)


def adapted(linear: LinearMap, x: Tensor, lora: StepAdapters | None, place: Place) -> Tensor:
    """Return `linear(x)` for `x` [rows, in], plus the products of the rows' adapters at `place`. The sum is
    in float32, and rounded a second time."""
    y = linear(x)
    if lora is None:
        return y
    for first, last, index in lora.runs:
        weights = lora.adapters[index].weights
        assert weights is not None
        for part in weights.parts.get(place, ()):
            columns = slice(part.first, part.first + part.b.shape[0])
            products = part.scale * (x[first:last].float() @ part.a.float().T)
            added = products @ part.b.float().T
            y[first:last, columns] = (y[first:last, columns].float() + added).to(y.dtype)
    return y
