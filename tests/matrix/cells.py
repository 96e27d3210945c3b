"""The matrix of checkpoints: architectures, weight formats, and how a cell's model is written."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import make_checkpoint
from tests.exact.speculating import edit
from tests.execution.compressing import INT8_ACTIVATIONS, compress
from tests.execution.storing import CASES, write
from tests.ggufs import write_gguf

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "pad_token_id": None}
"""Sizes that are multiples of 256, the numbers in a block of K-quants."""

MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
HEADS: dict[str, Any] = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 48}
YARN = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0, "truncate": False,
    "original_max_position_embeddings": 128,
}  # fmt: skip

MINISTRAL_YARN = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "ministral3": {"head_dim": 64, "rope_parameters": MINISTRAL_YARN},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "phi3": {"sliding_window": 60, "original_max_position_embeddings": 1024},
    "granite": {
        "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.2,
        "logits_scaling": 0.9,
    },
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "olmo2": {},
    "olmo3": {"sliding_window": 48, "num_hidden_layers": 4},
    "gemma2": {**HEADS, "attn_logit_softcapping": 30.0, "final_logit_softcapping": 20.0},
    "gemma3_text": {**HEADS, "num_hidden_layers": 7},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {**MOE, "head_dim": 64},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 48,
        "rope_parameters": YARN,
    },
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64,
        "num_hidden_layers": 3, "use_qk_norm": True, "routed_scaling_factor": 1.5,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A checkpoint, and the settings that serve it."""

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)


Write = Callable[[Path, Path], Written]
"""A function that writes the checkpoint of the first folder in another format, below the second folder."""


def _as_it_is(**settings: Any) -> Write:
    return lambda source, target: Written(source, settings)


def _cast(dtype: torch.dtype) -> Write:
    def written(source: Path, target: Path) -> Written:
        edit(source, lambda name, tensor: tensor.to(dtype))
        return Written(source, {"dtype": "auto"})

    return written


def _gguf(kind: str) -> Write:
    def written(source: Path, target: Path) -> Written:
        write_gguf(source, target / "model.gguf", kind)
        return Written(target / "model.gguf")

    return written


def _gguf_k_m(source: Path, target: Path) -> Written:
    """Write the mixture that llama.cpp calls Q4_K_M, which has more bits for values, outputs and the head."""

    def kind(name: str) -> str:
        return "Q6_K" if any(part in name for part in ("v_proj", "down_proj", "lm_head", "w2")) else "Q4_K"

    write_gguf(source, target / "model.gguf", kind)
    return Written(target / "model.gguf")


def _stored(case: str) -> Write:
    def written(source: Path, target: Path) -> Written:
        # gpt-oss has the matrices of all experts in one tensor, which these formats cannot store.
        skip = ("mlp.experts",) if _stacked(source) else ()
        return Written(write(source, target / "stored", *CASES[case], skip=skip))

    return written


def _compressed(**arguments: Any) -> Write:
    def written(source: Path, target: Path) -> Written:
        ignore = ROUTERS + ("|.*mlp.experts.*" if _stacked(source) else "")
        compress(source, target / "compressed", ignore=ignore, **arguments)
        return Written(target / "compressed")

    return written


def _stacked(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text())["model_type"] == "gpt_oss")


ROUTERS = r".*(mlp\.gate|block_sparse_moe\.gate|shared_expert_gate|router)$"
"""Modules that quantized checkpoints leave in 16 bits."""

_GROUPS = {"num_bits": 4, "group_size": 32, "strategy": "group"}

FORMATS: dict[str, Write] = {
    "float32": _as_it_is(dtype="float32"),
    "bfloat16": _cast(torch.bfloat16),
    "float16": _cast(torch.float16),
    "int8": _as_it_is(dtype="bfloat16", quantization="int8"),
    "w8a8": _as_it_is(dtype="bfloat16", quantization="w8a8"),
    "int4": _as_it_is(dtype="bfloat16", quantization="int4"),
    "int4:32": _as_it_is(dtype="bfloat16", quantization="int4:32"),
    "GGUF F16": _gguf("F16"),
    "GGUF Q8_0": _gguf("Q8_0"),
    "GGUF Q4_0": _gguf("Q4_0"),
    "GGUF Q5_1": _gguf("Q5_1"),
    "GGUF Q4_K_M": _gguf_k_m,
    "GGUF IQ4_XS": _gguf("IQ4_XS"),
    "AWQ": _stored("awq, groups of 64"),
    "GPTQ": _stored("gptq with zero points"),
    "GPTQ desc_act": _stored("gptq by activation"),
    "fp8 in blocks": _stored("fp8 in blocks"),
    "compressed-tensors fp8": _stored("fp8 by channel"),
    "compressed-tensors W8A8": _compressed(
        format="int-quantized", activations=INT8_ACTIVATIONS, num_bits=8, strategy="channel"
    ),
    "compressed-tensors W4A16": _compressed(**_GROUPS, symmetric=True),
    "compressed-tensors W4A16 with zero points": _compressed(**_GROUPS, symmetric=False),
}


CHECKPOINT_FORMATS = tuple(name for name in FORMATS if name.startswith(("AWQ", "GPTQ", "fp8", "compressed")))


def write_cell(folder: Path, architecture: str, format: str) -> Written:
    """Write a cell's model below `folder`. Its layers after the first change little, so that the first layer
    alone drafts well."""
    source = folder / "source"
    fields = {**SIZES, **ARCHITECTURES[architecture]}
    make_checkpoint(source, architecture, max_position_embeddings=1024, **fields)
    edit(source, lambda name, tensor: 0.05 * tensor if _changes_the_stream_late(name) else tensor)
    (folder / "other").mkdir()
    return FORMATS[format](source, folder / "other")


def _changes_the_stream_late(name: str) -> bool:
    """Return whether a tensor is an expert, or a matrix that ends attention or the MLP, of a layer after the
    first."""
    out = ("o_proj.weight", "down_proj.weight", "down_proj", "w2.weight", "post_feedforward_layernorm.weight")
    return name.startswith("model.layers.") and not name.startswith("model.layers.0.") and name.endswith(out)


REFUSED = {("gpt_oss", format): "is not supported with this architecture" for format in CHECKPOINT_FORMATS}
"""Cells that cannot be served, and the message of the refusal."""


def diagonal() -> list[tuple[str, str]]:
    """Return cells in which every architecture and every format occurs once or twice, as far as they can be
    served."""
    architectures, formats = list(ARCHITECTURES), list(FORMATS)
    count = max(len(architectures), len(formats))
    cells = [(architectures[i % len(architectures)], formats[i % len(formats)]) for i in range(count)]
    return [cell for cell in cells if cell not in REFUSED]


def everything() -> list[tuple[str, str]]:
    """Return all cells."""
    return [(architecture, format) for architecture in ARCHITECTURES for format in FORMATS]
