"""Small random LoRA adapters in PEFT's layout, and checkpoints that they are merged into."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from streamserve.protocol.adapters import Adapter, open_adapter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)


def write_adapter(
    folder: Path,
    base: Path,
    modules: Sequence[str] = ALL,
    rank: int = 4,
    *,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    gain: float = 0.7,
    **config: Any,
) -> Path:
    """Write a random adapter for the `modules` of the model in `base` to `folder`; return it. `gain` is the
    size of its changes relative to the model's own matrices. `config` has further fields of the adapter's
    configuration."""
    generator = torch.Generator().manual_seed(seed)
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": sorted(modules), "base_model_name_or_path": "base", "inference_mode": True,
    } | config  # fmt: skip
    tensors = {}
    for module, (rows, columns) in _matrices(base, modules).items():
        layer = module.split(".")[2]
        if layers is not None and int(layer) not in layers:
            continue
        own = rank_of(fields, module)
        scale = gain / scale_of(fields, module)
        a = torch.randn(own, columns, generator=generator) / math.sqrt(columns)
        b = scale * torch.randn(rows, own, generator=generator) / math.sqrt(own)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    assert tensors, f"{base} has none of {modules}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _matrices(base: Path, modules: Sequence[str]) -> dict[str, list[int]]:
    """Return the shapes [out, in] of the linear modules with these names, of all layers."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safetensors' file is not a dict)
                module = name.removesuffix(".weight")
                inside = name.startswith("model.layers.") and name.endswith(".weight")
                if inside and module.rpartition(".")[2] in modules:
                    shapes[module] = file.get_slice(name).get_shape()
    return shapes


def opened(name: str, folder: Path) -> Adapter:
    """Return an adapter as a server opens it."""
    return open_adapter(name, str(folder))


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """Write the checkpoint in `base` with an adapter merged into its weights to `folder`; return it."""
    shutil.copytree(base, folder)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(base / "model.safetensors")
    matrices = load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if not name.endswith("lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = matrices[name.replace("lora_A", "lora_B")].double()
        weight = weights[f"{module}.weight"]
        merged = weight.double() + scale_of(fields, module) * (b @ a.double())
        weights[f"{module}.weight"] = merged.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rank_of(fields: dict[str, Any], module: str) -> int:
    """Return the rank of a module, as PEFT finds it."""
    return _matching(fields.get("rank_pattern", {}), module, fields["r"])


def scale_of(fields: dict[str, Any], module: str) -> float:
    """Return the scale of a module, as PEFT computes it."""
    alpha, rank = (
        _matching(fields.get("alpha_pattern", {}), module, fields["lora_alpha"]),
        rank_of(fields, module),
    )
    return alpha / math.sqrt(rank) if fields.get("use_rslora") else alpha / rank


def _matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
