"""`models quantize` writes the weights that `--quantization` computes, readable by streamserve and by other
software for the format."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from streamserve.cli.main import app
from streamserve.execution.backends.native.library import kernels
from streamserve.execution.formats.check import check_weights
from streamserve.execution.formats.checkpoint import INDEX, Checkpoint
from streamserve.execution.formats.quantization import WeightFormat, parse_format
from streamserve.execution.formats.stored import export as exporting
from streamserve.execution.formats.stored.export import export
from streamserve.execution.loading.load import load
from streamserve.execution.model.shapes import EMBEDDING, HEAD, matrix_shapes
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.sampling import SamplingParams
from tests.execution.compressing import stored_format
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Task, run_alone

Shared = Callable[..., Path]
needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels on this machine")
SIZES = {"hidden_size": 128, "intermediate_size": 256}
PROMPTS = [
    torch.randint(4, 320, (30,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(4)
]
OUTPUTS = 32


def format_of(text: str) -> WeightFormat:
    format = parse_format(text)
    assert format is not None
    return format


def texts(folder: Path, **fields: Any) -> list[list[int]]:
    """Return tokens that the engine generates: greedily, and for the last prompts by sampling."""
    limits = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": 4}
    executor: Any = load(ModelConfig(path=str(folder), threads=1, **limits, **fields)).executor
    greedy = SamplingParams(temperature=0.0)
    sampled = SamplingParams(temperature=1.0, seed=5)
    tasks = [Task(prompt, greedy) for prompt in PROMPTS] + [Task(prompt, sampled) for prompt in PROMPTS]
    return [run_alone(executor, task, OUTPUTS) for task in tasks]


@pytest.mark.each_value
@needs_kernels
@pytest.mark.parametrize("format", ["int8", "int8:32", "int4", "int4:32", "w8a8"])
@pytest.mark.parametrize(
    ("architecture", "dtype", "overrides"),
    [
        ("llama", "bfloat16", {}),
        ("qwen2", "float32", {"tie_word_embeddings": True}),
        ("qwen3", "float16", {"head_dim": 64, "attention_bias": True}),
        ("phi3", "bfloat16", {}),
    ],
)
def test_the_folder_gives_the_tokens_of_quantizing_at_load(
    shared_checkpoint: Shared,
    tmp_path: Path,
    format: str,
    architecture: str,
    dtype: str,
    overrides: dict[str, Any],
) -> None:
    source, target = shared_checkpoint(architecture, dtype, **SIZES, **overrides), tmp_path / "target"
    export(source, target, format_of(format))
    expected = texts(source, quantization=format)
    assert texts(target, head_quantization="int8") == expected
    assert texts(target) == texts(source, quantization=format, head_quantization="none")
    assert expected != texts(source)
    wider = {"quantization": format, "head_quantization": "none"}
    assert texts(target, dtype="bfloat16") == texts(source, **wider, dtype="bfloat16")


def by_package(folder: Path) -> dict[str, Tensor]:
    """Return the layers' matrices by module, as compressed-tensors decompresses them."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    weights = {}
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        parts = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        state = {part: tensors[f"{module}.{part}"] for part in parts if f"{module}.{part}" in tensors}
        state["weight_scale"] = state["weight_scale"].float()
        weights[module] = compressor.decompress(state, scheme)["weight"]
    return weights


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("format", ["int8", "int4", "int4:32", "w8a8"])
def test_the_package_decompresses_our_weights(
    shared_checkpoint: Shared, tmp_path: Path, format: str, dtype: str
) -> None:
    source, target = shared_checkpoint("llama", dtype, **SIZES), tmp_path / "target"
    export(source, target, format_of(format))
    spec, checkpoint, decompressed = read_spec(target), Checkpoint(target), by_package(target)
    check_weights(checkpoint, spec)
    for module, shape in matrix_shapes(spec).items():
        stored = stored_format(spec, module)
        assert stored.weights == format_of(format)
        assert torch.equal(stored.read(checkpoint, module, shape).whole().floats(), decompressed[module])
    plain = Checkpoint(source)
    for name in (EMBEDDING, HEAD, "model.layers.0.input_layernorm.weight"):
        assert checkpoint.dtype(name) == plain.dtype(name)
        assert torch.equal(checkpoint.integers(name), plain.integers(name))


@needs_kernels
@pytest.mark.parametrize(("format", "agreement"), [("int8:32", 0.93), ("int4:32", 0.93)])
def test_transformers_loads_the_folder_and_chooses_nearly_the_same_tokens(
    shared_checkpoint: Shared, tmp_path: Path, format: str, agreement: float
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source, target = shared_checkpoint("llama", "float32", **SIZES), tmp_path / "target"
    export(source, target, format_of(format))
    # transformers 5.23 with compressed-tensors 0.20 loads zero points with dequantize=True only.
    model = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).eval()
    for module, weight in by_package(target).items():
        assert torch.equal(model.get_submodule(module).weight, weight)
    # Compare how often transformers chooses the next token of our greedy text. Activations have 8 bits here
    # and 32 in transformers.
    same = total = 0
    for prompt, outputs in zip(PROMPTS, texts(target), strict=False):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + outputs])).logits[0, len(prompt) - 1 : -1]
        same += int((logits.argmax(-1) == torch.tensor(outputs)).sum())
        total += len(outputs)
    assert same / total >= agreement


def test_transformers_keeps_symmetric_weights_compressed(shared_checkpoint: Shared, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, target = shared_checkpoint("llama", "float32", **SIZES), tmp_path / "target"
    export(source, target, format_of("int8"))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    assert "weight_packed" in dict(model.model.layers[0].mlp.up_proj.named_parameters())
    with torch.no_grad():
        logits = model(torch.tensor(PROMPTS)).logits
        for module, weight in by_package(target).items():
            model.get_submodule(module).weight = torch.nn.Parameter(weight, requires_grad=False)
        assert torch.equal(model(torch.tensor(PROMPTS)).logits, logits)


def test_other_files_come_along_and_all_can_be_read(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source, target = (
        shared_checkpoint("llama", "bfloat16", max_shard_size="100KB", **SIZES),
        tmp_path / "target",
    )
    target.mkdir()
    export(source, target, format_of("int8"))
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    index = json.loads((target / INDEX).read_text())
    sizes = [tensor.nbytes for file in target.glob("*.safetensors") for tensor in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert {file.name for file in target.glob("*.safetensors")} == set(index["weight_map"].values())
    modes = {stat.S_IMODE(file.stat().st_mode) for file in target.iterdir()}
    assert modes == {stat.S_IMODE((target / INDEX).stat().st_mode)}
    assert os.listdir(tmp_path) == ["target"]


def test_progress_counts_matrices(shared_checkpoint: Shared, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    export(shared_checkpoint(), tmp_path / "target", format_of("int8:32"), lambda *call: calls.append(call))
    assert calls == [(done, 14) for done in range(1, 15)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left"), RuntimeError("a bug")])
def test_nothing_is_left_of_a_folder_that_is_not_complete(
    shared_checkpoint: Shared, tmp_path: Path, error: BaseException
) -> None:
    def fail(done: int, total: int) -> None:
        if done == 9:
            assert len(list(tmp_path.glob(".target.*.partial/*.safetensors"))) == 2
            raise error

    wrapped = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(wrapped):
        export(shared_checkpoint(), tmp_path / "target", format_of("int8:32"), fail)
    assert os.listdir(tmp_path) == []


def refused(source: Path, target: Path, format: str) -> str:
    """Return the single line with which the command refuses."""
    result = CliRunner().invoke(app, ["models", "quantize", str(source), str(target), "--format", format])
    assert result.exit_code == 2, result.output
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


def test_what_cannot_be_quantized_is_refused_in_one_line(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source = shared_checkpoint()  # 64 and 96 inputs
    target = tmp_path / "target"
    assert "--format 'int3': use int8, int4, w8a8, or int8:GROUP" in refused(source, target, "int3")
    assert "--format none: use int8, int4 or w8a8" in refused(source, target, "none")
    assert "self_attn.q_proj has 64 inputs, not a multiple of the 128" in refused(source, target, "int8")
    assert "mlp.down_proj has 96 inputs, not a multiple of the 64" in refused(source, target, "int4")
    assert "there is no folder" in refused(tmp_path / "nothing", target, "int8:32")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty", target, "int8:32")
    assert not target.exists()
    assert f"{source} is not empty" in refused(source, source, "int8:32")
    export(source, target, format_of("int8:32"))
    assert "quantized already, in int8:32" in refused(target, tmp_path / "again", "int4:32")
    (target / "model-00002-of-00003.safetensors").unlink()
    assert "file is missing" in refused(target, tmp_path / "again", "int4:32")
    assert sorted(os.listdir(tmp_path)) == ["empty", "target"]


def test_the_command_writes_the_folder_and_its_size(shared_checkpoint: Shared, tmp_path: Path) -> None:
    target = tmp_path / "target"
    arguments = ["models", "quantize", str(shared_checkpoint()), str(target), "--format", "int4:32"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert result.stdout == f"{target}: 0 MB\n"
    assert "quantizing" in result.stderr
    assert str(read_spec(target).stored) == "int4:32"


def test_ctrl_c_ends_the_command_and_leaves_nothing(
    shared_checkpoint: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "quantize", interrupt)
    arguments = [
        "models",
        "quantize",
        str(shared_checkpoint()),
        str(tmp_path / "target"),
        "--format",
        "int8:32",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 130
    assert os.listdir(tmp_path) == []
