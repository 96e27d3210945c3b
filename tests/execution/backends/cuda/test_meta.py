"""A forward pass on the meta device, whose tensors have no values, raises if an operation mixes devices or
needs a value on the host."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamserve.execution.backends.cuda.attention import AttentionWork
from streamserve.execution.backends.cuda.model import DeviceModel, ForwardInputs
from streamserve.execution.backends.cuda.operations import Operations
from streamserve.execution.backends.cuda.routing import route
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.loading.device import DeviceBackend
from streamserve.execution.model.mixture import choose
from streamserve.execution.model.shapes import matrix_shapes, weight_shapes
from streamserve.execution.model.spec import ModelSpec
from tests.execution.backends.cuda.specs import AROUND, MIXTURE, SPEC

META = torch.device("meta")
ROWS = 5


class Shapes:
    """A model's tensors without values."""

    path = "shapes"

    def __init__(self, spec: ModelSpec) -> None:
        matrices = {f"{name}.weight": shape for name, shape in matrix_shapes(spec).items()}
        self._shapes: dict[str, tuple[int, ...]] = weight_shapes(spec) | matrices

    def tensor(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        return torch.cat([torch.empty(self._shapes[name], dtype=dtype) for name in names])

    def read_ahead(self, layer: int) -> None:
        """Do nothing: no file is read."""

    def release(self) -> None:
        """Do nothing: no file was read."""


def launches() -> Operations:
    """Operations that check the device of their tensors, and return results with the shapes of the kernels'
    results."""

    def new(x: Tensor, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    def checked(result: Any) -> Any:
        def launch(*args: Any, **fields: Any) -> Any:
            tensors = [value for value in (*args, *fields.values()) if isinstance(value, Tensor)]
            assert tensors
            assert all(tensor.device == META for tensor in tensors)
            return result(*args, **fields)

        return launch

    layers = {
        "gather_tokens": lambda tokens, results, sources: new(tokens, len(tokens)),
        "embed": lambda table, tokens, multiplier: new(table, len(tokens), table.shape[1]),
        "add_rms_norm": lambda hidden, *others: torch.empty_like(hidden),
        "norm_jointly": lambda *args: None,
        "rotate_and_store": lambda *args: None,
        "gate": lambda x, *args: new(x, len(x), x.shape[1] // 2),
    }
    matrix = {
        "multiply": lambda x, weight, bias, dtype: new(x, len(x), weight.outputs).to(dtype),
        "multiply_routed": lambda x, weight, bias, routing, n: new(x, len(routing.order), weight.outputs),
        "combine_experts": lambda outputs, shares, shared: new(outputs, len(shares), outputs.shape[1]),
    }
    attention = {"attend": lambda *args, **fields: None}
    modules = [{n: checked(f) for n, f in module.items()} for module in (layers, attention, {}, {}, matrix)]
    return Operations(*(SimpleNamespace(**module) for module in modules))  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [SPEC, AROUND, MIXTURE], ids=["plain", "norms around", "mixture"])
def test_a_forward_pass_stays_on_the_device(spec: ModelSpec) -> None:
    backend = DeviceBackend(META, launches(), 8, 128)
    weights: Any = Shapes(spec)
    model = DeviceModel(backend.model(weights, spec, torch.bfloat16), backend.operations, 128)
    cache = KVCache(spec, 4, 16, torch.bfloat16, device=META)
    integers = torch.zeros(ROWS, dtype=torch.int32, device=META)
    works = {window: AttentionWork(*(integers,) * 5) for window in spec.windows}
    inputs = ForwardInputs(*(integers,) * 7, works, (True,) * 3, True)
    out = torch.empty(ROWS, spec.hidden_size, dtype=torch.bfloat16, device=META)
    model.forward(inputs, cache, integers, out)
    logits = model.logits(out)
    assert logits.device == META
    assert logits.shape == (ROWS, spec.vocab_size)


def test_the_choice_of_experts_stays_on_the_device() -> None:
    experts = MIXTURE.experts
    assert experts
    chosen, shares = choose(torch.zeros(ROWS, experts.count + 1, device=META), experts)
    routing = route(chosen[:, : experts.chosen], experts.count)
    assert all(values.device == META for values in (*routing, shares))
    with pytest.raises(RuntimeError, match="meta"):  # So would a value that the host needs,
        chosen[0, 0].item()
    with pytest.raises(RuntimeError, match="device"):  # and a tensor on the host.
        torch.cat([shares, torch.zeros(ROWS, 1)])
