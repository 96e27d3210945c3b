"""The weights of a checkpoint as the loader asks for them, the same for every kind of file."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from streamserve.execution.formats.check import AnyCheckpoint
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.formats.gguf.checkpoint import GgufCheckpoint
from streamserve.execution.formats.quantization import (
    BlockWeight,
    QuantizedWeight,
    StripedWeight,
    join,
    join_strips,
)
from streamserve.execution.formats.stored.formats import AnyFormat, GgufBlocks
from streamserve.execution.model.experts import TENSORS, in_halves, stack_of
from streamserve.execution.model.shapes import is_stacked, matrix_shapes
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.errors import CheckpointError


class WeightSource(Protocol):
    """The weights of modules. Tensors are copies unless a method says otherwise, and a tensor with NaN or an
    infinity raises CheckpointError unless a method says that it is not checked."""

    def floats(self, module: str, dtype: torch.dtype) -> Tensor:
        """Return the weight of `module` in `dtype`."""

    def bias(self, module: str, dtype: torch.dtype) -> Tensor:
        """Return the bias of `module` in `dtype`."""

    def view(self, module: str) -> Tensor | None:
        """Return the weight of `module`, not checked, as a view of the file; None if the file has no tensor
        of floats that contains it alone."""

    def blocks(self, module: str) -> BlockWeight | None:
        """Return the weight of `module`, not checked, as a view of the file; None if it is not stored in
        blocks of integers."""

    def stored(
        self, modules: Sequence[str], format: AnyFormat, direct: bool
    ) -> BlockWeight | StripedWeight | QuantizedWeight:
        """Return the joined weight of `modules`, which are stored in `format`. If `direct`, the weight is in
        the file's form and not checked; otherwise it is unpacked."""


def weight_source(checkpoint: AnyCheckpoint, spec: ModelSpec) -> WeightSource:
    """Return the weights of a checked checkpoint."""
    if isinstance(checkpoint, GgufCheckpoint):
        return GgufWeights(checkpoint)
    return SafetensorsWeights(checkpoint, spec)


class SafetensorsWeights:
    """The weights of a folder in Hugging Face layout. Matrices of experts may be stacked in one tensor."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self._checkpoint, self._spec = checkpoint, spec
        self._tensors = spec.experts.tensors if spec.experts else TENSORS
        self._shapes = matrix_shapes(spec)

    def floats(self, module: str, dtype: torch.dtype) -> Tensor:
        if not is_stacked(self._spec, module):
            return self._checkpoint.tensor([f"{module}.weight"], dtype)
        matrix = self._checkpoint.floats(*stack_of(module), dtype)
        return self._in_order(module, matrix.T if self._tensors.transposed else matrix)

    def bias(self, module: str, dtype: torch.dtype) -> Tensor:
        if not is_stacked(self._spec, module):
            return self._checkpoint.tensor([f"{module}.bias"], dtype)
        stack, number = stack_of(module)
        return self._in_order(module, self._checkpoint.floats(f"{stack}_bias", number, dtype))

    def _in_order(self, module: str, rows: Tensor) -> Tensor:
        """Return the rows of a stack's matrix in the order of the model."""
        return in_halves(module, rows) if self._tensors.alternating else rows.contiguous()

    def view(self, module: str) -> Tensor | None:
        name = f"{module}.weight"
        return self._checkpoint.view(name) if name in self._checkpoint else None

    def blocks(self, module: str) -> None:
        return None

    def stored(
        self, modules: Sequence[str], format: AnyFormat, direct: bool
    ) -> StripedWeight | QuantizedWeight:
        assert not isinstance(format, GgufBlocks)
        weights = [format.read(self._checkpoint, module, self._shapes[module]) for module in modules]
        self._check_orders(modules, weights)
        joined = join_strips(weights)
        return joined if direct else joined.whole()

    def _check_orders(self, modules: Sequence[str], weights: Sequence[StripedWeight]) -> None:
        """Raise CheckpointError if `weights`, which are to be joined, have their inputs in different
        orders."""
        first, *others = (torch.empty(0) if weight.order is None else weight.order for weight in weights)
        for module, order in zip(modules[1:], others, strict=True):
            if not torch.equal(first, order):
                raise CheckpointError(
                    f"{self._checkpoint.path}: {module} groups its inputs differently than {modules[0]}, but "
                    "both are computed together"
                )


class GgufWeights:
    """The weights of a GGUF file."""

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._checkpoint = checkpoint

    def floats(self, module: str, dtype: torch.dtype) -> Tensor:
        return self._checkpoint.tensor([f"{module}.weight"], dtype)

    def bias(self, module: str, dtype: torch.dtype) -> Tensor:
        return self._checkpoint.tensor([f"{module}.bias"], dtype)

    def view(self, module: str) -> Tensor | None:
        name = f"{module}.weight"
        return None if self._checkpoint.in_blocks(name) else self._checkpoint.view(name)

    def blocks(self, module: str) -> BlockWeight | None:
        return self._checkpoint.blocks([module]) if self._checkpoint.in_blocks(f"{module}.weight") else None

    def stored(
        self, modules: Sequence[str], format: AnyFormat, direct: bool
    ) -> BlockWeight | QuantizedWeight:
        if direct:
            return self._checkpoint.blocks(modules, format.weights)
        return join([self._checkpoint.integers(module, format.weights) for module in modules])
