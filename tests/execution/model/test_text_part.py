"""The text part of a multimodal checkpoint is served as a text model. Its logits are compared with
transformers' in the tests of all architectures (tests/execution/variants.py)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamserve.execution.formats.checkpoint import SINGLE
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.model.fields import Fields
from streamserve.execution.model.spec import read_spec
from streamserve.execution.model.text_part import OTHER_PARTS, TEXT_PARTS, text_fields
from streamserve.protocol.errors import CheckpointError
from tests.execution.variants import (
    IMAGE_ROPE,
    QWEN3_MOE,
    WINDOWED_QWEN,
    logits_by_transformers,
    logits_of,
)

Shared = Callable[..., Path]


def change(folder: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a checkpoint to `target` by links, with an edited config."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_bytes())
    edit(config)
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_tensors_of_the_vision_tower_are_left_out(shared_checkpoint: Shared) -> None:
    for architecture in ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"):
        folder = shared_checkpoint(architecture, head_dim=16)
        spec, checkpoint = open_checkpoint(folder)
        assert spec.multimodal
        names = list(checkpoint._files)  # type: ignore[union-attr]
        assert names
        assert not any(name.startswith(OTHER_PARTS) for name in names)


def test_the_same_tensors_are_unknown_to_a_text_model(shared_checkpoint: Shared, tmp_path: Path) -> None:
    def as_text(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        config |= text | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        config["tie_word_embeddings"] = False

    folder = change(shared_checkpoint("qwen3_vl", head_dim=16), tmp_path / "text", as_text)
    with pytest.raises(CheckpointError, match=r"visual\..* is unknown to this architecture"):
        open_checkpoint(folder)


def test_the_fields_of_qwen2_vl_may_be_at_the_top(shared_checkpoint: Shared, tmp_path: Path) -> None:
    def as_before_4_52(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        config |= {name: value for name, value in text.items() if name not in ("model_type", "architectures")}
        config |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        }

    folder = shared_checkpoint("qwen2_5_vl")
    changed = change(folder, tmp_path / "old", as_before_4_52)
    assert read_spec(changed) == read_spec(folder)


def test_a_config_of_gemma_3_may_leave_out_what_is_the_default() -> None:
    nested = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    config = Fields("config.json", {"text_config": nested, "eos_token_id": [1, 106], "dtype": "bfloat16"})
    fields, architecture = text_fields(config, TEXT_PARTS["Gemma3ForConditionalGeneration"])
    assert architecture == "Gemma3ForCausalLM"
    assert (fields.integer("vocab_size"), fields.integer("num_attention_heads")) == (262_208, 8)
    assert (fields.integer("hidden_size"), fields.integer("num_hidden_layers")) == (2560, 34)
    assert (fields.get("eos_token_id"), fields.get("dtype")) == ([1, 106], "bfloat16")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_fields_left_out_of_a_text_part_mean_what_they_mean_to_transformers(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoConfig

    text = {
        "model_type": f"{family}_text", "vocab_size": 152_064, "hidden_size": 4096, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 32, "max_position_embeddings": 512, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    }  # fmt: skip
    model = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    name = f"{model.get(family, 'Qwen3VLMoe')}ForConditionalGeneration"
    config = {"model_type": family, "architectures": [name], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, expected = read_spec(tmp_path), AutoConfig.from_pretrained(tmp_path).text_config
    assert spec.num_kv_heads == expected.num_key_value_heads
    assert spec.head_dim == getattr(expected, "head_dim", 4096 // 32)
    assert spec.rms_norm_eps == expected.rms_norm_eps
    assert spec.ropes[0]
    assert spec.ropes[0].theta == expected.rope_parameters["rope_theta"]
    end = getattr(expected, "eos_token_id", None)
    assert spec.eos_token_ids == (() if end is None else (end,))


@pytest.mark.parametrize("architecture", ["qwen3_vl", "qwen3_vl_moe"])
def test_the_text_parts_of_qwen3_vl_have_no_sliding_windows(
    shared_checkpoint: Shared, tmp_path: Path, architecture: str
) -> None:
    """transformers ignores these fields in the text parts of Qwen3-VL, unlike in the text models."""

    def windowed(config: dict[str, Any]) -> None:
        config["text_config"] |= WINDOWED_QWEN

    folder = shared_checkpoint(architecture, **QWEN3_MOE | {"head_dim": 16, "rope_parameters": IMAGE_ROPE})
    changed = change(folder, tmp_path / "windowed", windowed)
    assert read_spec(changed).windows == (None, None)
    torch.testing.assert_close(logits_of(changed, [60]), logits_by_transformers(changed), rtol=0, atol=1e-4)


def test_stacks_of_experts_are_read_in_both_layouts(shared_checkpoint: Shared, tmp_path: Path) -> None:
    """transformers reads stacks as it writes them, and as they are published: with transposed matrices."""
    folder = shared_checkpoint("qwen3_vl_moe", **QWEN3_MOE | {"head_dim": 16})
    published = shutil.copytree(folder, tmp_path / "published")
    tensors = load_file(folder / SINGLE)
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 4
    transposed = {name: tensors[name].transpose(1, 2).contiguous() for name in stacks}
    save_file(tensors | transposed, published / SINGLE, metadata={"format": "pt"})
    logits = [logits_of(path, [60]) for path in (folder, published)]
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[1], logits_by_transformers(published), rtol=0, atol=1e-4)


def test_a_quantized_text_part_has_a_tensor_for_each_expert(
    shared_checkpoint: Shared, tmp_path: Path
) -> None:
    def as_quantized(config: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}

    folder = shared_checkpoint("qwen3_vl_moe", **QWEN3_MOE | {"head_dim": 16})
    spec = read_spec(change(folder, tmp_path / "awq", as_quantized))
    assert spec.stored
    assert spec.stored.of("model.layers.1.mlp.experts.7.down_proj")
    assert spec.experts
    assert spec.experts.normalized


def test_another_text_model_is_refused_by_name(shared_checkpoint: Shared, tmp_path: Path) -> None:
    for other in ("mistral4", None, ["mistral"]):

        def as_other(config: dict[str, Any], model_type: Any = other) -> None:
            config["text_config"]["model_type"] = model_type

        folder = change(shared_checkpoint("mistral3", head_dim=16), tmp_path / str(other), as_other)
        with pytest.raises(CheckpointError, match=r"model_type .* \(supported: 'mistral', 'ministral3'\)"):
            read_spec(folder)
