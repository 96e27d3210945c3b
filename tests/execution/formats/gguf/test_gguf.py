"""GGUF files give exactly the weights that the package `gguf` reads, or are refused by name."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file

from streamserve.execution.backends.native.library import kernels
from streamserve.execution.drafters.choice import choose_draft
from streamserve.execution.drafters.fingerprints import fingerprints
from streamserve.execution.formats.checkpoint import SINGLE
from streamserve.execution.formats.gguf.blocks import FORMATS, unpack
from streamserve.execution.formats.gguf.checkpoint import GgufCheckpoint
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.formats.quantization import QuantizedWeight, WeightFormat, join, widen
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.model.rope import inverse_frequencies
from streamserve.execution.model.shapes import EMBEDDING, matrix_bytes, matrix_shapes
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.sampling import SamplingParams
from tests.checkpoints import reference_model
from tests.exact.speculating import with_padding
from tests.execution.backends.native.integer_reference import reference
from tests.execution.drive import Task, run_alone
from tests.execution.gguf_loading import Shared, config, logits_of, refusal
from tests.execution.variants import LINEAR, LLAMA3, logits_by_transformers
from tests.ggufs import Type, dequantized_folder, random_blocks, write_gguf

SIZES = {"hidden_size": 256, "intermediate_size": 512}
"""Sizes for rows of whole blocks of 256."""

SIGMOID = gguf.ExpertGatingFuncType.SIGMOID

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels on this machine")


def greedy(loaded: Loaded, count: int = 30) -> Sequence[int]:
    task = Task([5, 6, 7], SamplingParams(temperature=0.0, ignore_eos=True))
    return run_alone(loaded.executor, task, count)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_the_numbers_that_the_package_dequantizes(name: str) -> None:
    numbers, nbytes = gguf.GGML_QUANT_SIZES[Type[name]]
    for columns in (numbers, 3 * numbers):
        blocks = random_blocks(name, 20, columns)
        expected = dequantize(blocks, Type[name])
        weight = unpack(name, torch.from_numpy(blocks).view(20, -1, nbytes))
        assert weight.format == FORMATS[name]
        assert weight.floats().numpy().tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("kind", [*FORMATS, "F32", "F16", "BF16"])
def test_tensors_are_those_that_the_package_reads(
    shared_checkpoint: Shared, tmp_path: Path, kind: str
) -> None:
    source = shared_checkpoint("llama", **SIZES)
    tensors = write_gguf(source, tmp_path / "model.gguf", kind)
    spec, checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert isinstance(checkpoint, GgufCheckpoint)
    for name, expected in tensors.items():
        assert torch.equal(checkpoint.tensor([name], torch.float32), expected), name
    for module in matrix_shapes(spec):
        stored = spec.stored.of(module) if spec.stored else None
        assert (stored is not None) == (kind in FORMATS)
        if stored:
            weight = checkpoint.integers(module, stored.weights)
            assert torch.equal(weight.floats(), tensors[f"{module}.weight"])


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_tokens_are_those_of_transformers(
    shared_checkpoint: Shared, tmp_path: Path, architecture: str, kind: str
) -> None:
    more = {"head_dim": 32} if architecture == "qwen3" else {}
    source = shared_checkpoint(architecture, **more)
    tensors = write_gguf(source, tmp_path / "model.gguf", kind)
    folder = dequantized_folder(source, tmp_path / "folder", tensors)
    loaded = load(config(tmp_path / "model.gguf", dtype="float32"))
    torch.testing.assert_close(logits_of(loaded), logits_by_transformers(folder), rtol=0, atol=1e-4)
    model = reference_model(folder)
    prompt = torch.tensor([[5, 6, 7]])
    by_transformers = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert greedy(loaded) == by_transformers[0, 3:].tolist()


def test_the_data_type_is_the_files(shared_checkpoint: Shared, tmp_path: Path) -> None:
    for kind, dtype in (("F32", "float32"), ("F16", "float32"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")):
        write_gguf(shared_checkpoint(), tmp_path / f"{kind}.gguf", kind)
        spec, _ = open_checkpoint(tmp_path / f"{kind}.gguf")
        assert spec.dtype == ("float16" if kind == "F16" else dtype)
    assert load(config(tmp_path / "F16.gguf")).model_info.dtype == "float32"


def add_factors(writer: gguf.GGUFWriter, dim: int) -> None:
    """Add the tensor of RoPE factors that llama.cpp's converter makes of LLAMA3."""
    frequencies = 1.0 / LLAMA3["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        original = LLAMA3["original_max_position_embeddings"]
        smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if wavelength < original / 4 else 8.0 if wavelength > original else between)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def add_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(LINEAR["factor"])


@pytest.mark.parametrize(
    ("rope", "add"),
    [(LLAMA3, lambda writer: add_factors(writer, 16)), (LINEAR, add_linear)],
    ids=["llama3", "linear"],
)
def test_rope_scaling_is_that_of_the_source(
    shared_checkpoint: Shared, tmp_path: Path, rope: dict[str, Any], add: Callable[[gguf.GGUFWriter], None]
) -> None:
    source = shared_checkpoint("llama", rope_parameters=rope, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(source / SINGLE)
    write_gguf(source, tmp_path / "model.gguf", change=add)
    loaded = load(config(tmp_path / "model.gguf"))
    assert loaded.model.spec.tied_embeddings
    ours, original = (open_checkpoint(path)[0] for path in (tmp_path / "model.gguf", source))
    torch.testing.assert_close(
        inverse_frequencies(ours.ropes[0], 16), inverse_frequencies(original.ropes[0], 16), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(logits_of(loaded), logits_by_transformers(source), rtol=0, atol=1e-4)


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "head_dim": 64,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "head_dim": 64,
        "num_hidden_layers": 3, "routed_scaling_factor": 1.5,
    },
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_experts_are_those_of_transformers(
    shared_checkpoint: Shared, tmp_path: Path, architecture: str, kind: str
) -> None:
    source = shared_checkpoint(architecture, rms_norm_eps=1e-5, **MIXTURES[architecture])
    tensors = write_gguf(source, tmp_path / "model.gguf", kind)
    folder = dequantized_folder(source, tmp_path / "folder", tensors)
    loaded = load(config(tmp_path / "model.gguf", dtype="float32"))
    original, _ = open_checkpoint(source)
    assert loaded.model_info.architecture == original.architecture
    torch.testing.assert_close(logits_of(loaded), logits_by_transformers(folder), rtol=0, atol=1e-4)


@pytest.mark.each_value
@needs_kernels
@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0", "Q6_K"])
def test_experts_in_blocks_are_integers(
    shared_checkpoint: Shared, tmp_path: Path, architecture: str, kind: str
) -> None:
    source = shared_checkpoint(architecture, **{**SIZES, **MIXTURES[architecture]})
    tensors = write_gguf(source, tmp_path / "model.gguf", types(kind) if kind in MIXED else kind)
    folder = dequantized_folder(source, tmp_path / "folder", tensors)
    spec, checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert isinstance(checkpoint, GgufCheckpoint)
    own = {name: tensor for name, tensor in tensors.items() if ".experts.3." in name}
    prefix = "block_sparse_moe" if architecture == "mixtral" else "mlp"
    ours = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    assert spec.experts
    assert len(own) == 3 * len(spec.experts.layers)
    for name, expected in own.items():
        *start, part, _ = name.replace(prefix, "mlp").split(".")
        module = ".".join([*start, ours.get(part, part)])
        stored = spec.stored.of(module) if spec.stored else None
        assert stored
        assert torch.equal(checkpoint.integers(module, stored.weights).floats(), expected)
    head = f"{'model.embed_tokens' if spec.tied_embeddings else 'lm_head'}.weight"
    assert spec.stored
    assert spec.stored.head
    in_blocks = checkpoint.integers(head.removesuffix(".weight"), spec.stored.head.weights)
    assert torch.equal(in_blocks.floats(), tensors[head])
    loaded = load(config(tmp_path / "model.gguf", dtype="float32"))
    assert loaded.head == spec.stored.head.weights
    logits = logits_of(loaded)
    expected = logits_of(load(config(folder, backend="reference")))
    # For most rows. In some rows two experts have nearly equal scores, and another one is chosen.
    error = (logits - expected).square().mean(1).median().sqrt() / expected.std()
    assert 1e-4 < error < 0.06


@needs_kernels
def test_blocks_that_predict_further_tokens_are_neither_loaded_nor_logged_as_rounded(
    shared_checkpoint: Shared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = shared_checkpoint("glm4_moe", **{**SIZES, **MIXTURES["glm4_moe"], "num_hidden_layers": 2})

    def predictor(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.2.nextn.eh_proj.weight", np.ones((256, 512), np.float32))

    write_gguf(source, tmp_path / "plain.gguf", "Q8_0")
    write_gguf(source, tmp_path / "predictor.gguf", "Q8_0", change=predictor)
    with caplog.at_level(logging.INFO):
        loaded, plain = (load(config(tmp_path / f"{name}.gguf")) for name in ("predictor", "plain"))
    assert loaded.model.spec.predictors == 1
    assert torch.equal(logits_of(loaded), logits_of(plain))
    assert caplog.text.count("1 matrices are rounded to bfloat16: token_embd.weight (Q8_0)") == 2
    assert "nextn" not in caplog.text


@needs_kernels
def test_routers_are_not_logged_as_rounded(
    shared_checkpoint: Shared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = shared_checkpoint("qwen2_moe", **{**SIZES, **MIXTURES["qwen2_moe"]})
    write_gguf(source, tmp_path / "model.gguf", "Q8_0")
    with caplog.at_level(logging.INFO):
        load(config(tmp_path / "model.gguf"))
    assert "1 matrices are rounded to bfloat16: token_embd.weight (Q8_0)" in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda writer: writer.add_expert_used_count(9),
            "qwen3moe.expert_used_count must be an integer from",
        ),
        (lambda writer: writer.add_expert_count(7), "not [7, 64]"),
        (
            lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
            "expert_gating_func",
        ),
        (lambda writer: writer.add_expert_weights_scale(2.0), "expert_weights_scale is not supported"),
        (lambda writer: writer.add_expert_feed_forward_length(255), "contradicts the 256 outputs"),
    ],
)
def test_experts_that_contradict_the_file_are_refused(
    shared_checkpoint: Shared, tmp_path: Path, change: Callable[[Any], None], reason: str
) -> None:
    source = shared_checkpoint("qwen3_moe", **MIXTURES["qwen3_moe"])
    write_gguf(source, tmp_path / "model.gguf", change=lambda writer: replaced(writer, change))
    assert reason in refusal(tmp_path / "model.gguf")


def replaced(writer: Any, change: Callable[[Any], None]) -> None:
    """Add entries that replace entries with the same keys."""
    kept = dict(writer.kv_data[0])
    writer.kv_data[0].clear()
    change(writer)
    added = dict(writer.kv_data[0])
    writer.kv_data[0].update({**kept, **added})


def test_a_window_is_in_every_layer(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source = shared_checkpoint("mistral", sliding_window=7)
    write_gguf(source, tmp_path / "model.gguf", change=lambda writer: writer.add_sliding_window(7))
    loaded = load(config(tmp_path / "model.gguf"))
    assert loaded.model_info.architecture == "MistralForCausalLM"
    torch.testing.assert_close(logits_of(loaded), logits_by_transformers(source), rtol=0, atol=1e-4)


def test_biases_of_llama_are_permuted_with_their_rows(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source = shared_checkpoint("llama", attention_bias=True, mlp_bias=True)
    write_gguf(source, tmp_path / "model.gguf")
    loaded = load(config(tmp_path / "model.gguf"))
    torch.testing.assert_close(logits_of(loaded), logits_by_transformers(source), rtol=0, atol=1e-4)


MIXED = {
    "Q4_K_M": {"v_proj": "Q6_K", "0.mlp.down_proj": "Q6_K", "embed": "Q4_K", "lm_head": "Q6_K", "": "Q4_K"},
    "Q5_0 with Q5_1": {"v_proj": "Q5_1", "down_proj": "Q8_0", "lm_head": "Q6_K", "": "Q5_0"},
    "Q3_K_M": {"v_proj": "Q5_K", "o_proj": "Q4_K", "down_proj": "IQ4_XS", "": "Q3_K"},
    "Q2_K": {"v_proj": "Q4_K", "down_proj": "Q3_K", "up_proj": "Q3_K", "": "Q2_K"},
}
"""Types by a part of the tensor's name; the first match counts."""


def types(name: str) -> Callable[[str], str]:
    return lambda tensor: next(kind for part, kind in MIXED[name].items() if part in tensor)


@needs_kernels
@pytest.mark.parametrize("kind", [*FORMATS, *MIXED])
def test_quantized_logits_are_near_those_of_the_dequantized_weights(
    shared_checkpoint: Shared, tmp_path: Path, kind: str
) -> None:
    source = shared_checkpoint("llama", **SIZES)
    tensors = write_gguf(source, tmp_path / "model.gguf", types(kind) if kind in MIXED else kind)
    folder = dequantized_folder(source, tmp_path / "folder", tensors)
    expected = logits_of(load(config(folder, backend="reference")))
    logits = logits_of(load(config(tmp_path / "model.gguf", dtype="float32")))
    # Only activations are rounded, to 8 bits in groups of 16 or 32.
    error = (logits - expected).square().mean().sqrt() / expected.std()
    assert 1e-4 < error < 0.04


@needs_kernels
@pytest.mark.parametrize("kind", MIXED)
def test_layers_compute_the_formula_of_the_kernels(
    shared_checkpoint: Shared, tmp_path: Path, kind: str
) -> None:
    write_gguf(shared_checkpoint("qwen2", **SIZES), tmp_path / "model.gguf", types(kind))
    loaded = load(config(tmp_path / "model.gguf"))
    spec, checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert isinstance(checkpoint, GgufCheckpoint)
    assert spec.stored

    def weight(*modules: str) -> QuantizedWeight:
        names = [f"model.layers.1.{module}" for module in modules]
        formats = {name: spec.stored.of(name).weights for name in names}  # type: ignore[union-attr]
        assert len(set(formats.values())) == 1
        return join([checkpoint.integers(name, formats[name]) for name in names])

    layer: Any = loaded.model.layers[1]
    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    bias = checkpoint.tensor([f"model.layers.1.{name}.bias" for name in attention], torch.bfloat16)
    for linear, modules, added in [
        (layer.qkv, attention, bias.float()),
        (layer.out, ["self_attn.o_proj"], 0.0),
        (layer.down, ["mlp.down_proj"], 0.0),
    ]:
        x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        expected = torch.from_numpy(reference(weight(*modules), x)) + added
        assert torch.equal(linear(x, wide=True), expected)
    head: Any = loaded.model.head
    assert spec.stored.head
    stored = checkpoint.integers("lm_head", spec.stored.head.weights)
    x = torch.randn(5, head.in_features, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    assert torch.equal(head(x, wide=True), torch.from_numpy(reference(stored, x)))


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_in_floats_if_asked_for(shared_checkpoint: Shared, tmp_path: Path, tied: bool) -> None:
    source = shared_checkpoint("llama", **SIZES, tie_word_embeddings=tied)
    tensors = write_gguf(source, tmp_path / "model.gguf", "Q8_0")
    stored, plain = (
        load(config(tmp_path / "model.gguf", head_quantization=choice)) for choice in ("auto", "none")
    )
    heads: list[Any] = [loaded.model.head for loaded in (stored, plain)]
    assert [head.format for head in heads] == ["int8", "bf16"]
    name = EMBEDDING if tied else "lm_head.weight"
    eye = torch.eye(256, dtype=torch.bfloat16)
    assert torch.equal(heads[1](eye).T, tensors[name].to(torch.bfloat16))
    saved = heads[1].nbytes - heads[0].nbytes
    difference = plain.model_info.weight_bytes - stored.model_info.weight_bytes
    assert difference == (-heads[0].nbytes if tied else saved)
    assert stored.model_info.fingerprint != plain.model_info.fingerprint
    tokens = torch.tensor([5, 9])
    assert torch.equal(stored.model._embed(tokens), plain.model._embed(tokens))


@needs_kernels
def test_a_loaded_model_names_its_precision(shared_checkpoint: Shared, tmp_path: Path) -> None:
    write_gguf(shared_checkpoint("llama", **SIZES), tmp_path / "model.gguf", types("Q4_K_M"))
    loaded = load(config(tmp_path / "model.gguf"))
    info, spec = loaded.model_info, loaded.model.spec
    assert info.precision == "bfloat16, layers in int4:32, int8:16, head in int8:16"
    assert spec.stored
    formats = [stored.weights for stored in spec.stored.layers[0] if stored]
    joined = WeightFormat(8, 16, symmetric=False, precise=True, levels=True)
    assert formats[:3] == [joined] * 3
    assert formats[3:] == [FORMATS["Q4_K"]] * 3 + [FORMATS["Q6_K"]]
    layers: list[Any] = loaded.model.layers
    loaded_bytes = sum(
        linear.nbytes for layer in layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
    assert loaded_bytes == matrix_bytes(spec, 2) < 0.9 * matrix_bytes(spec, 2, two_levels=False)
    others = sum(
        load_file(shared_checkpoint("llama", **SIZES) / SINGLE)[name].numel() for name in (EMBEDDING,)
    )
    head: Any = loaded.model.head
    assert info.weight_bytes == loaded_bytes + head.nbytes + 2 * (others + 5 * 256)


@needs_kernels
def test_matrices_joined_with_floats_are_floats(
    shared_checkpoint: Shared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = shared_checkpoint("llama", **SIZES)
    tensors = write_gguf(
        source, tmp_path / "model.gguf", lambda name: "F16" if "k_proj" in name or "embed" in name else "Q8_0"
    )
    with caplog.at_level(logging.INFO):
        loaded = load(config(tmp_path / "model.gguf"))
    layer: Any = loaded.model.layers[0]
    assert (layer.qkv.format, layer.down.format) == ("bf16", "int8")
    x = torch.eye(256, dtype=torch.bfloat16)
    q_proj = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(layer.qkv(x).T[:256], q_proj.to(torch.bfloat16))
    assert "7 matrices are rounded to bfloat16: " in caplog.text
    assert "blk.0.attn_q.weight (Q8_0)" in caplog.text


@needs_kernels
def test_a_file_of_floats_can_be_quantized_at_start(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source = shared_checkpoint("qwen2")
    write_gguf(source, tmp_path / "model.gguf", "F32")
    ours, original = (
        load(config(path, quantization="int8:32")) for path in (tmp_path / "model.gguf", source)
    )
    assert torch.equal(logits_of(ours), logits_of(original))


def test_a_split_model_is_the_same_model(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source = shared_checkpoint("llama")
    write_gguf(source, tmp_path / "whole.gguf")
    write_gguf(source, tmp_path / "split.gguf", split_max_tensors=5)
    first, *others = sorted(tmp_path.glob("split-*.gguf"))
    assert len(others) > 1
    (spec, whole), (other_spec, split) = (open_checkpoint(path) for path in (tmp_path / "whole.gguf", first))
    assert spec == other_spec
    assert whole.fingerprint() == split.fingerprint()
    assert refusal(others[0]).endswith(f"give the first file, {first.name}")
    others[-1].unlink()
    assert f"{others[-1].name}: cannot be read: No such file" in refusal(first)
    os.mkfifo(others[-1])
    assert f"{others[-1].name} is not a file, but a pipe" in refusal(first)


def test_a_folder_may_hold_one_model(shared_checkpoint: Shared, tmp_path: Path) -> None:
    write_gguf(shared_checkpoint("llama"), tmp_path / "one.gguf")
    _, checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").hardlink_to(tmp_path / "one.gguf")
    assert refusal(tmp_path).endswith("holds several models, give the path of one: one.gguf, two.gguf")


def test_the_fingerprint_covers_weights_and_types(shared_checkpoint: Shared, tmp_path: Path) -> None:
    seen = set()
    for number, kind in enumerate(["F32", "F16", "Q8_0"]):
        write_gguf(shared_checkpoint("llama"), tmp_path / f"{number}.gguf", kind)
        seen.add(load(config(tmp_path / f"{number}.gguf", dtype="float32")).model_info.fingerprint)
    assert len(seen) == 3


@needs_kernels
def test_a_draft_model_must_have_the_same_tokens(shared_checkpoint: Shared, tmp_path: Path) -> None:
    target, draft, other = (tmp_path / f"{name}.gguf" for name in ("target", "draft", "other"))
    source = shared_checkpoint("llama")
    write_gguf(source, target)
    write_gguf(source, draft, "Q8_0")
    write_gguf(source, other, change=rename_a_token)
    loaded: Any = load(config(target, draft=str(draft)))
    assert loaded.drafter._passes.model.layers[0].qkv.format == "int8"
    spec, _ = open_checkpoint(target)
    with pytest.raises(CheckpointError, match=r"other\.gguf has another vocabulary than"):
        choose_draft(str(other), target, spec)
    with pytest.raises(CheckpointError, match="must both be GGUF files, or neither of them"):
        choose_draft(str(source), target, spec)
    assert fingerprints(target, 320) == fingerprints(draft, 320)
    assert fingerprints(target, 320)[1] != fingerprints(other, 320)[1]
    assert "needs the kernels" in refusal(target, draft=str(draft), backend="reference")


@needs_kernels
def test_unused_tokens_at_the_end_need_not_be_the_same(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source, target, draft = shared_checkpoint("llama"), tmp_path / "target.gguf", tmp_path / "draft.gguf"
    write_gguf(source, draft)
    padded = with_padding(Path(shutil.copytree(source, tmp_path / "padded")), 352)
    write_gguf(padded, target, change=add_unused_tokens)
    spec, _ = open_checkpoint(target)
    assert spec.vocab_size == 352
    choice = choose_draft(str(draft), target, spec)
    assert choice.spec
    assert choice.spec.vocab_size == 320
    assert load(config(target, draft=str(draft))).drafter


def add_unused_tokens(writer: gguf.GGUFWriter) -> None:
    entries = writer.kv_data[0]
    tokens, types = (entries[f"tokenizer.ggml.{name}"].value for name in ("tokens", "token_type"))
    while len(tokens) < 352:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(gguf.TokenType.UNUSED)


def rename_a_token(writer: gguf.GGUFWriter) -> None:
    tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
    tokens[0] = "<|other|>"


def test_widening_keeps_every_number() -> None:
    for name in ("Q4_0", "Q4_K", "Q5_K", "Q6_K"):
        numbers, nbytes = gguf.GGML_QUANT_SIZES[Type[name]]
        weight = unpack(name, torch.from_numpy(random_blocks(name, 8, numbers)).view(8, -1, nbytes))
        target = WeightFormat(8, 16, symmetric=False)
        # The minimum of a symmetric weight is added after rounding scale · q: equal up to that.
        tolerance = 2.0**-15 if weight.format.symmetric else 0.0
        torch.testing.assert_close(
            widen(weight, target).floats(),
            weight.floats(),
            rtol=0,
            atol=tolerance * float(weight.scales.abs().max()),
        )
