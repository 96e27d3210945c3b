"""GGUF files whose model would not be computed exactly are refused, naming the entry, tensor or flag."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from streamserve.execution.loading.load import load
from streamserve.gguf.files import open_gguf
from streamserve.protocol.errors import CheckpointError
from tests.execution.gguf_entries import entry
from tests.execution.gguf_loading import Shared, config, refusal
from tests.ggufs import write_gguf


def tensor(name: str, shape: tuple[int, ...], kind: type = np.float32) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.ones(shape, kind))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (entry("general.architecture", "rwkv"), "'rwkv' is not supported (supported: llama, mistral"),
        (entry("general.architecture", None), "general.architecture is missing"),
        (entry("general.type", "adapter"), "general.type 'adapter' is not supported (supported: 'model')"),
        (entry("general.quantization_version", 1), "general.quantization_version 1 is not supported"),
        (entry("llama.block_count", None), "llama.block_count is missing"),
        (entry("llama.block_count", 3), "no file holds tensor blk.2."),
        (entry("llama.attention.head_count", [4, 4]), "must be an integer from 1 to 2147483647, not"),
        (entry("llama.attention.head_count_kv", 3), "must be a multiple of 3 key-value heads"),
        (entry("llama.attention.key_length", 17), "must be even"),
        (entry("llama.attention.value_length", 8), "other than 16, the head size of keys, is not supported"),
        (entry("llama.rope.dimension_count", 8), "other than 16, the head size of keys, is not supported"),
        (entry("llama.rope.scaling.type", "longrope"), "rope.scaling.type 'longrope' is not supported"),
        (entry("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.factor is missing"),
        (entry("llama.context_length", 2 * 10**9), "must be an integer from 1 to 16777216, not 2000000000"),
        (entry("llama.block_count", 10**9), "must be an integer from 1 to 10000, not 1000000000"),
        (entry("llama.rope.scaling.yarn_beta_fast", 8.0), "is not supported with scaling 'none'"),
        (tensor("rope_factors_long.weight", (8,)), "rope_factors_long.weight is not supported for llama"),
        (entry("llama.rope.freq_base", float("nan")), "must be a number from 1 to 1000000000000000, not nan"),
        (entry("llama.attention.layer_norm_rms_epsilon", 0.0), "must be a number from"),
        (entry("llama.expert_count", 8), "llama.expert_used_count is missing"),
        (entry("llama.attention.causal", False), "llama.attention.causal false is not supported"),
        (entry("llama.logit_scale", 0.5), "llama.logit_scale is not supported"),
        (entry("llama.vocab_size", 319), "contradicts the 320 rows of token_embd.weight"),
        (entry("tokenizer.ggml.eos_token_id", "2"), "must be an integer from"),
        (tensor("blk.0.attn_sinks.weight", (4,)), "'blk.0.attn_sinks.weight' is unknown to this"),
        (tensor("rope_freqs.weight", (7,)), "must be F32 [8], not F32 [7]"),
        (tensor("x", (4,), np.int32), "type I32, which is not supported (supported: F32, F16, BF16, Q4_0"),
    ],
)  # fmt: skip
def test_models_that_are_not_computed_exactly_are_refused(
    shared_checkpoint: Shared, tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], reason: str
) -> None:
    write_gguf(shared_checkpoint("llama"), tmp_path / "model.gguf", change=change)
    message = refusal(tmp_path / "model.gguf")
    assert reason in message
    assert message.startswith(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization": "int8"}, "--quantization int8:128: .* quantized already, in int8:32"),
        ({"backend": "reference"}, "in int8:32 needs the kernels: use --backend native"),
    ],
)
def test_settings_that_do_not_serve_it_are_refused(
    shared_checkpoint: Shared, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    write_gguf(shared_checkpoint("llama"), tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(CheckpointError, match=reason):
        load(config(tmp_path / "model.gguf", **fields))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_numbers_that_are_not_finite_are_refused(
    shared_checkpoint: Shared, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(shared_checkpoint("llama"), path, kind)
    model = open_gguf(path)
    info = model.tensors["blk.1.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(np.array([np.nan], np.float32 if kind == "F32" else np.float16).tobytes())
    assert "tensor 'blk.1.ffn_down.weight' holds numbers that are not finite" in refusal(path)
