"""Models for the GPU benchmarks, made on the device: random weights, or the packaged pair inflated.

An inflated model computes the same function as the packaged one, at the cost of its larger shape, so that
draft tokens are accepted as in the packaged pair.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from streamserve import embedded
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.formats.inflate import OUTPUTS, origin
from streamserve.execution.model.rope_spec import RopeSpec
from streamserve.execution.model.shapes import weight_shapes
from streamserve.execution.model.spec import ModelSpec, Multipliers, read_spec


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, dim: int = 128
) -> ModelSpec:
    """Return the spec of a Llama 3 model with 128 Ki tokens and 8 Ki positions."""
    return ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=hidden,
        intermediate_size=intermediate, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, rms_norm_eps=1e-5, rotary_dim=dim, ropes=(RopeSpec(500000.0),) * layers,
        windows=(None,) * layers, multipliers=Multipliers(dim**-0.5),
        max_position_embeddings=16384, tied_embeddings=False, qkv_bias=False, out_bias=False,
        mlp_bias=False, dtype="bfloat16", eos_token_ids=(128001,),
    )  # fmt: skip


SHAPES = {
    "1B": replace(llama(2048, 16, 32, 8, 8192, 64), tied_embeddings=True),
    "8B": llama(4096, 32, 32, 8, 14336),
}
"""Specs with the shapes of Llama 3.2 1B and Llama 3.1 8B."""


class RandomWeights:
    """Random tensors of a model of `spec`, made on `device` when they are read."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._shapes = weight_shapes(spec)
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Return the tensors of `names`, joined along their first dimension."""
        return torch.cat([self._random(self._shapes[name], dtype) for name in names])

    def read_ahead(self, layer: int) -> None:
        """Do nothing: no file is read."""

    def release(self) -> None:
        """Do nothing: no file was read."""

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if len(shape) == 1:
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=self._generator)


class InflatedWeights:
    """The tensors of the packaged model `name`, padded to the sizes of `spec` (formats/inflate.py)."""

    def __init__(self, name: str, spec: ModelSpec, device: torch.device) -> None:
        folder = embedded.path(name)
        self.spec = spec
        self._source = read_spec(folder)
        self._checkpoint = Checkpoint(folder)
        self._shapes = weight_shapes(spec)
        self._device = device

    def tensor(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Return the tensors of `names`, joined along their first dimension."""
        return torch.cat([self._padded(name, dtype) for name in names])

    def read_ahead(self, layer: int) -> None:
        """Do nothing: the packaged files are small."""

    def release(self) -> None:
        """Do nothing: the packaged files are small."""

    def _padded(self, name: str, dtype: torch.dtype) -> Tensor:
        full = torch.zeros(self._shapes[name], dtype=dtype, device=self._device)
        source, effective = self._origin(name)
        if not effective and name.endswith(OUTPUTS):
            return full
        tensor = self._checkpoint.tensor([source], dtype).to(self._device)
        root = math.sqrt(self.spec.hidden_size // self._source.hidden_size)
        corner = tuple(slice(size) for size in tensor.shape)
        full[corner] = tensor / root if tensor.ndim == 1 else tensor
        return full

    def _origin(self, name: str) -> tuple[str, bool]:
        """Return the source's name of a tensor, and whether it is the effective copy of its layer."""
        if not name.startswith("model.layers."):
            return name, True
        _, _, layer, part = name.split(".", 3)
        number, effective = origin(int(layer), self.spec.num_layers, self._source.num_layers)
        return f"model.layers.{number}.{part}", effective


def inflated(name: str, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> ModelSpec:
    """Return the spec of the packaged model `name` at a larger shape."""
    source = read_spec(embedded.path(name))
    return replace(
        source, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        intermediate_size=intermediate, windows=(None,) * layers, ropes=(source.ropes[0],) * layers,
        rms_norm_eps=source.rms_norm_eps / (hidden // source.hidden_size),
    )  # fmt: skip
