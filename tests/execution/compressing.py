"""Write checkpoints with the package compressed-tensors, the reference for its format."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamserve.execution.formats.checkpoint import SINGLE
from streamserve.execution.formats.stored.formats import GgufBlocks, StoredFormat
from streamserve.execution.model.spec import ModelSpec
from tests.execution.storing import MATRICES

INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compress(
    source: Path,
    target: Path,
    format: str = "pack-quantized",
    scale_dtype: torch.dtype = torch.bfloat16,
    activations: dict[str, Any] | None = None,
    ignore: str = "",
    **weights: Any,
) -> dict[str, Tensor]:
    """Write the checkpoint of `source` to `target`, its layers' matrices quantized by compressed-tensors with
    these arguments of QuantizationArgs, except for modules that the pattern `ignore` matches. Return the
    decompressed matrices in float32, by module."""
    shutil.copytree(source, target)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**activations) if activations else None,
        format=format,
    )
    compressor = BaseCompressor.get_value_from_registry(format)
    tensors, decompressed = load_file(source / SINGLE), dict[str, Tensor]()
    for name in [name for name in tensors if name.removesuffix(".weight").endswith(MATRICES)]:
        module = name.removesuffix(".weight")
        if ignore and re.match(ignore, module):
            continue
        state = {"weight": tensors.pop(name).float(), **parameters(tensors_of(source, name), scheme.weights)}
        state["weight_scale"] = state["weight_scale"].to(scale_dtype)
        stored = compressor.compress(state, scheme)
        tensors |= {f"{module}.{key}": value.contiguous() for key, value in stored.items()}
        wide = {**stored, "weight_scale": stored["weight_scale"].float()}
        decompressed[module] = compressor.decompress(wide, scheme)["weight"]
    save_file(tensors, target / SINGLE)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head", *([f"re:{ignore}"] if ignore else [])],
    ).model_dump(mode="json")
    (target / "config.json").write_text(json.dumps(config))
    return decompressed


def tensors_of(folder: Path, name: str) -> Tensor:
    return load_file(folder / SINGLE)[name].float()


def parameters(weight: Tensor, arguments: QuantizationArgs) -> dict[str, Tensor]:
    """Return scales and zero points [out, groups] from each group's least and largest weight."""
    grouped = weight.unflatten(1, (-1, arguments.group_size or weight.shape[1]))
    scales, zeros = calculate_qparams(grouped.amin(2), grouped.amax(2), arguments)
    return {"weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}


def stored_format(spec: ModelSpec, module: str) -> StoredFormat:
    """Return the format of a quantized module."""
    stored = spec.stored.of(module) if spec.stored else None
    assert stored is not None
    assert not isinstance(stored, GgufBlocks)
    return stored
