"""The text part of a multimodal checkpoint is served as a text model. Its logits are compared with
transformers' in the tests of all architectures (tests/execution/variants.py)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.model.fields import Fields
from streamserve.execution.model.spec import read_spec
from streamserve.execution.model.text_part import OTHER_PARTS, TEXT_PARTS, text_fields
from streamserve.protocol.errors import CheckpointError

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


def test_another_text_model_is_refused_by_name(shared_checkpoint: Shared, tmp_path: Path) -> None:
    for other in ("mistral4", None, ["mistral"]):

        def as_other(config: dict[str, Any], model_type: Any = other) -> None:
            config["text_config"]["model_type"] = model_type

        folder = change(shared_checkpoint("mistral3", head_dim=16), tmp_path / str(other), as_other)
        with pytest.raises(CheckpointError, match=r"model_type .* \(supported: 'mistral', 'ministral3'\)"):
            read_spec(folder)
