"""Quantized checkpoints written with numpy from the published layouts: a second implementation of the formats
that shares no code with the first."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamserve.execution.formats.checkpoint import SINGLE
from streamserve.execution.formats.stored.formats import FUSED_LINEARS, LINEARS

Tensors = dict[str, Tensor]
Packed = tuple[Tensors, np.ndarray]
"""The stored tensors of a module, and the weights [out, in] that they represent, in float32."""

Store = Callable[[str, np.ndarray, np.random.Generator], Packed]
"""A function that stores a module's weight [out, in]."""

MATRICES = (*LINEARS, *FUSED_LINEARS, "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Endings of matrix names; the last ones are of experts."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order: the output that the i-th four bits of a word belong to."""


def write(source: Path, target: Path, store: Store, config: dict[str, Any], skip: Sequence[str] = ()) -> Path:
    """Write the checkpoint of `source` to `target`, its layers' matrices stored by `store` except for modules
    with one of `skip` in their names, with this quantization_config. The weights that these tensors represent
    are written in float32 to `dense_of(target)`, next to it."""
    tensors = load_file(source / SINGLE)
    dense = {name: tensor.float() for name, tensor in tensors.items()}
    rng = np.random.default_rng(1)
    for name in sorted(tensors):
        module = name.removesuffix(".weight")
        if not module.endswith(MATRICES) or any(part in module for part in skip):
            continue
        stored, weight = store(module, tensors.pop(name).float().numpy(), rng)
        assert weight.dtype == np.float32
        tensors |= {f"{module}.{key}": value for key, value in stored.items()}
        dense[name] = torch.from_numpy(np.ascontiguousarray(weight))
    plain = json.loads((source / "config.json").read_text())
    folders = [
        (target, tensors, {**plain, "quantization_config": config}),
        (dense_of(target), dense, {**plain, "dtype": "float32"}),
    ]
    for folder, content, fields in folders:
        shutil.copytree(source, folder)
        save_file(content, folder / SINGLE)
        (folder / "config.json").write_text(json.dumps(fields))
    return target


def dense_of(folder: Path) -> Path:
    """Return the folder with the weights that a quantized checkpoint represents, in float32."""
    return folder.with_name(f"{folder.name}-dense")


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights in `dense_of(folder)` by module."""
    tensors = load_file(dense_of(folder) / SINGLE)
    modules = {name: name.removesuffix(".weight") for name in tensors}
    return {module: tensors[name] for name, module in modules.items() if module.endswith(MATRICES)}


def awq(group: int = 128) -> tuple[Store, dict[str, Any]]:
    """Store in AWQ's format gemm: each word has eight outputs, interleaved; w = s · (q - z)."""

    def store(module: str, weight: np.ndarray, rng: np.random.Generator) -> Packed:
        index = np.arange(weight.shape[1]) // (group if group > 0 else weight.shape[1])
        numbers, scales, zeros = _round(weight, index, 4, False)
        tensors = {
            "qweight": _words(numbers.T, 4, AWQ_ORDER),
            "qzeros": _words(zeros.T, 4, AWQ_ORDER),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return tensors, _weights(numbers, scales, zeros, index)

    config = {"bits": 4, "group_size": group, "quant_method": "awq", "version": "gemm", "zero_point": True}
    return store, {**config, "modules_to_not_convert": None}


def gptq(
    bits: int = 4, group: int = 128, sym: bool = True, version: int = 1, desc_act: bool = False,
    biases: bool = False, **fields: Any,
) -> tuple[Store, dict[str, Any]]:  # fmt: skip
    """Store in GPTQ's format: each word has consecutive inputs; w = s · (q - z), and version 1 stores z - 1.
    With `desc_act` the inputs of a group follow no order; q, k and v have the same groups, and so have gate
    and up. `biases` adds zero biases."""

    def store(module: str, weight: np.ndarray, rng: np.random.Generator) -> Packed:
        inputs = weight.shape[1]
        index = np.arange(inputs) // (group if group > 0 else inputs)
        if desc_act:
            index = index[_same_inputs(module).permutation(inputs)]
        numbers, scales, zeros = _round(weight, index, bits, sym)
        if version == 1:
            zeros = np.maximum(zeros, 1)  # Version 1 cannot store a zero point of 0.
        tensors = {
            "qweight": _words(numbers.T, bits, along=0),
            "qzeros": _words(zeros.T - (1 if version == 1 else 0), bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        if biases:
            tensors["bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return tensors, _weights(numbers, scales, zeros, index)

    config = {"bits": bits, "group_size": group, "quant_method": "gptq", "sym": sym, "desc_act": desc_act}
    return store, {**config, "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **fields}


def reordered_compressed(group: int = 32) -> tuple[Store, dict[str, Any]]:
    """Store in compressed-tensors' pack-quantized format with weight_g_idx, with numbers in the order of the
    inputs."""

    def store(module: str, weight: np.ndarray, rng: np.random.Generator) -> Packed:
        inputs = weight.shape[1]
        index = (np.arange(inputs) // group)[_same_inputs(module).permutation(inputs)]
        numbers, scales, zeros = _round(weight, index, 4, False)
        tensors = {
            "weight_packed": _words(numbers, 4),
            "weight_zero_point": _words(zeros, 4, along=0),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
            "weight_g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return tensors, _weights(numbers, scales, zeros, index)

    weights = {"num_bits": 4, "group_size": group, "symmetric": False, "actorder": "group"}
    return store, compressed("pack-quantized", weights)


def compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def fp8_blocks(rows: int = 128, columns: int = 128) -> tuple[Store, dict[str, Any]]:
    """Store in the method fp8 with one scale for each block."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return _fp8_store(rows, columns, "weight_scale_inv"), {**config, "weight_block_size": [rows, columns]}


def fp8_tensor() -> tuple[Store, dict[str, Any]]:
    """Store in the method fp8 with one scale for the matrix, and one for rounding activations."""
    plain = _fp8_store(10**6, 10**6, "weight_scale_inv")

    def store(module: str, weight: np.ndarray, rng: np.random.Generator) -> Packed:
        tensors, floats = plain(module, weight, rng)
        scales = {"weight_scale_inv": tensors["weight_scale_inv"].reshape(())}
        return {**tensors, **scales, "activation_scale": torch.tensor(0.02)}, floats

    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return store, {**config, "modules_to_not_convert": ["lm_head", "model.vision_tower"]}


def fp8_compressed(strategy: str, static: bool = False) -> tuple[Store, dict[str, Any]]:
    """Store in compressed-tensors' float-quantized format: one scale for the matrix, for each output, or for
    each block."""
    sizes = {"tensor": (10**6, 10**6), "channel": (1, 10**6), "block": (128, 128)}
    plain = _fp8_store(*sizes[strategy], "weight_scale")

    def store(module: str, weight: np.ndarray, rng: np.random.Generator) -> Packed:
        tensors, floats = plain(module, weight, rng)
        if strategy == "tensor":
            tensors["weight_scale"] = tensors["weight_scale"].reshape(1)
        if static:
            tensors["input_scale"] = torch.tensor([0.02])
        return tensors, floats

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    inputs = {"num_bits": 8, "type": "float", "dynamic": not static, "symmetric": True}
    return store, compressed("float-quantized", weights, inputs)


def _fp8_store(rows: int, columns: int, scale_name: str) -> Store:
    values = e4m3_values()

    def store(module: str, weight: np.ndarray, rng: np.random.Generator) -> Packed:
        down = np.arange(weight.shape[0]) // rows
        across = np.arange(weight.shape[1]) // columns
        scales = np.zeros((down[-1] + 1, across[-1] + 1), np.float32)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                scales[i, j] = np.abs(weight[np.ix_(down == i, across == j)]).max() / np.float32(448)
        each = scales[down][:, across]
        order = np.argsort(values)  # -448 to 448, then NaN
        nearest = np.searchsorted(values[order][:254], weight / each).clip(0, 253)
        codes = order[nearest].astype(np.uint8)
        tensors = {
            "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            scale_name: torch.from_numpy(scales),
        }
        return tensors, each * values[codes]

    return store


def e4m3_values() -> np.ndarray:
    """Return the numbers that each of 256 bytes represents: a sign, 4 bits of exponent (bias 7), 3 bits of
    fraction."""
    values = []
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        value = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        if exponent == 15 and fraction == 7:
            value = float("nan")
        values.append(-value if code & 128 else value)
    return np.array(values, np.float32)


def _round(
    weight: np.ndarray, index: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers [out, in], scales (float16) and zero points [out, groups] for the groups of `index`."""
    groups = int(index.max()) + 1
    largest = (1 << bits) - 1
    scales = np.zeros((len(weight), groups), np.float16)
    zeros = np.full((len(weight), groups), 1 << bits - 1)
    for group in range(groups):
        part = weight[:, index == group]
        low, high = part.min(1).clip(max=0), part.max(1).clip(min=0)
        if symmetric:
            scales[:, group] = np.abs(part).max(1) / (largest // 2)
        else:
            scales[:, group] = (high - low) / largest
            zeros[:, group] = np.rint(-low / scales[:, group].astype(np.float32)).clip(0, largest)
    numbers = np.rint(weight / scales[:, index].astype(np.float32)) + zeros[:, index]
    return numbers.clip(0, largest).astype(np.int64), scales, zeros


def _weights(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return s · (q - z) [out, in] in float32."""
    return scales.astype(np.float32)[:, index] * (numbers - zeros[:, index]).astype(np.float32)


def _words(numbers: np.ndarray, bits: int, order: Sequence[int] | None = None, along: int = 1) -> Tensor:
    """Return 32-bit words of `numbers` along a dimension. The i-th bits of a word hold the word's number
    order[i]."""
    if along == 0:
        return _words(numbers.T, bits, order).T.contiguous()
    count = 32 // bits
    words = np.zeros((len(numbers), numbers.shape[1] // count), np.uint32)
    for i, place in enumerate(order or range(count)):
        words |= numbers[:, place::count].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32))


def _same_inputs(module: str) -> np.random.Generator:
    """Return a random generator that is the same for all modules that are computed together."""
    prefix, linear = module.rsplit(".", 1)
    together = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate", "up_proj": "gate"}
    together |= {"w1": "gate", "w3": "gate"}
    return np.random.default_rng(list(f"{prefix}{together.get(linear, linear)}".encode()))


INTEGERS: dict[str, Any] = {
    "awq, groups of 32": awq(32),
    "awq, groups of 64": awq(64),
    "awq, groups of 128": awq(128),
    "awq by channel": awq(-1),
    "gptq": gptq(),
    "gptq with zero points": gptq(group=64, sym=False),
    "gptq v2 with zero points": gptq(group=32, sym=False, version=2),
    "gptq of 8 bits": gptq(bits=8, group=64),
    "gptq of 8 bits with zero points": gptq(bits=8, group=32, sym=False),
    "gptq by channel": gptq(group=-1, desc_act=True, sym=False),
    "gptq by activation": gptq(group=32, desc_act=True),
    "gptq v2 of 8 bits by activation": gptq(bits=8, group=64, desc_act=True, sym=False, version=2),
    "gptq with biases of zero": gptq(biases=True),
    "compressed-tensors by activation": reordered_compressed(),
}
FLOATS: dict[str, Any] = {
    "fp8 in blocks": fp8_blocks(),
    "fp8 in blocks of 64": fp8_blocks(96, 64),
    "fp8 without blocks": fp8_tensor(),
    "fp8 by tensor": fp8_compressed("tensor", static=True),
    "fp8 by channel": fp8_compressed("channel"),
    "fp8 in blocks of compressed-tensors": fp8_compressed("block"),
}
CASES = INTEGERS | FLOATS
SIZES = {"hidden_size": 128, "intermediate_size": 256}
"""Sizes of the checkpoints that the cases are written from."""
