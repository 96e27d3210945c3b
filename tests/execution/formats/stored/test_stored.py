"""Checkpoints in AWQ, GPTQ, fp8 and with reordered groups have the weights of the published layouts, and
models compute with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from streamserve import LLM, SamplingParams
from streamserve.execution.backends.native.library import ThreadPool, kernels
from streamserve.execution.formats.check import check_weights
from streamserve.execution.formats.checkpoint import SINGLE, Checkpoint
from streamserve.execution.formats.quantization import join
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.model.shapes import matrix_bytes, matrix_shapes
from streamserve.execution.model.spec import read_spec
from streamserve.execution.profile.floor import step_floor
from streamserve.execution.profile.measure import subject_of
from streamserve.protocol.config import ModelConfig
from tests.conftest import Scale
from tests.execution.backends.native.forwarding import logits_of
from tests.execution.backends.native.integer_reference import reference
from tests.execution.compressing import stored_format
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Driver, Task, run_alone
from tests.execution.storing import (
    CASES,
    FLOATS,
    INTEGERS,
    SIZES,
    awq,
    dense_of,
    e4m3_values,
    weights_of,
    write,
)

PROMPTS = [
    torch.randint(4, 320, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 17, 30)
]

Make = Callable[..., Path]
needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels on this machine")


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    library = kernels()
    if library is None:
        pytest.skip("no kernels on this machine")
    return ThreadPool(library, 1)


def config(folder: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), threads=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **fields)


def tensor(folder: Path, name: str) -> Tensor:
    return load_file(folder / SINGLE)[name]


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_layout(stored: Make, case: str) -> None:
    folder = stored(case)
    spec, checkpoint, expected = read_spec(folder), Checkpoint(folder), weights_of(folder)
    check_weights(checkpoint, spec)
    shapes = matrix_shapes(spec)
    assert shapes.keys() == expected.keys()
    for module, shape in shapes.items():
        weight = stored_format(spec, module).read(checkpoint, module, shape).whole()
        assert torch.equal(weight.floats(), expected[module])
        assert (weight.order is not None) == ("by activation" in case)


def test_blocks_of_fp8_are_those_of_transformers(stored: Make) -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    folder = stored("fp8 in blocks")
    for module, expected in weights_of(folder).items():
        weight, scales = (tensor(folder, f"{module}.{name}") for name in ("weight", "weight_scale_inv"))
        dequantized = _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32)
        assert torch.equal(dequantized, expected)
    folder = stored("fp8 without blocks")
    for module, expected in weights_of(folder).items():
        weight, scale = (tensor(folder, f"{module}.{name}") for name in ("weight", "weight_scale_inv"))
        assert scale.shape == ()
        assert torch.equal(_dequantize_fp8_weight(weight, scale, None, torch.float32), expected)


def test_bytes_of_e4m3_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    ours = torch.from_numpy(e4m3_values())
    assert torch.equal(ours.nan_to_num(999.0), codes.view(torch.float8_e4m3fn).float().nan_to_num(999.0))


@needs_kernels
@pytest.mark.parametrize("case", INTEGERS)
def test_layers_compute_the_formula_of_the_integer_kernels(stored: Make, case: str) -> None:
    folder = stored(case)
    loaded, spec, checkpoint = load(config(folder, dtype="bfloat16")), read_spec(folder), Checkpoint(folder)
    layer: Any = loaded.model.layers[1]
    for linear, names in ((layer.qkv, "q_proj k_proj v_proj"), (layer.out, "o_proj")):
        modules = [f"model.layers.1.self_attn.{name}" for name in names.split()]
        weight = join([
            stored_format(spec, name).read(checkpoint, name, matrix_shapes(spec)[name]).whole()
            for name in modules
        ])  # fmt: skip
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        in_order = x if weight.order is None else x[:, weight.order]
        assert torch.equal(linear(x, wide=True), torch.from_numpy(reference(weight, in_order)))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantized_weights(stored: Make, pool: ThreadPool, case: str) -> None:
    """Logits equal those of the dequantized weights: with 8-bit floats up to float32 rounding, with integers,
    whose activations are rounded to 8 bits, up to a twentieth of the logits' spread."""
    folder = stored(case)
    exact = logits_of(dense_of(folder), [60], torch.float32, pool)
    logits = logits_of(folder, [60], torch.float32, pool)
    assert exact.std() > 1
    if case in FLOATS:
        torch.testing.assert_close(logits, exact, rtol=0, atol=1e-4)
    else:
        assert (logits - exact).square().mean().sqrt() < 0.05 * exact.std()
    for dtype, whole in ((torch.float32, logits), (torch.bfloat16, None)):
        whole = logits_of(folder, [60], dtype, pool) if whole is None else whole
        assert torch.equal(logits_of(folder, [13, 1, 1, 30, 15], dtype, pool), whole)


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
@pytest.mark.parametrize("case", ["gptq by activation", "awq, groups of 64", "fp8 in blocks"])
def test_biases_and_joined_matrices_of_an_architecture_are_used(
    shared_checkpoint: Make, tmp_path: Path, pool: ThreadPool, case: str, architecture: str
) -> None:
    """Biases and joined matrices are used: qwen2 has biases; in files of phi3, q, k and v are a single
    matrix, and so are gate and up."""
    source = shared_checkpoint(architecture, "bfloat16", **SIZES)
    folder = write(source, tmp_path / "folder", *CASES[case])
    spec = read_spec(folder)
    assert spec.stored
    assert all(all(formats) for formats in spec.stored.layers)
    exact = logits_of(dense_of(folder), [60], torch.float32, pool)
    logits = logits_of(folder, [60], torch.float32, pool)
    assert (logits - exact).square().mean().sqrt() < 0.05 * exact.std()


@needs_kernels
@pytest.mark.parametrize("case", ["gptq by activation", "fp8 in blocks"])
def test_texts_are_the_same_alone_and_together_with_and_without_speculation(
    stored: Make, case: str, scale: Scale
) -> None:
    if not scale.full and case != "fp8 in blocks":
        pytest.skip("with --full; tests/matrix has both formats in one process")
    folder = stored(case)
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)

    def texts(together: bool, **settings: Any) -> list[list[int]]:
        with LLM(str(folder), threads=1, log_level="error", **settings) as llm:
            batches = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
            outputs = [llm.generate(batch, sampled, use_tqdm=False) for batch in batches]
        return [list(output.outputs[0].token_ids) for batch in outputs for output in batch]

    alone = texts(together=False)
    assert texts(together=True, draft="self:1", speculation_policy="fixed:3") == alone
    assert len({tuple(text) for text in alone}) == len(PROMPTS)


@needs_kernels
def test_greedy_text_of_fp8_is_that_of_its_weights_in_float32(stored: Make) -> None:
    folder = stored("fp8 by channel")
    executors = [load(config(path)).executor for path in (folder, dense_of(folder))]
    for prompt in PROMPTS:
        quantized, dense = (
            run_alone(one, Task(prompt, SamplingParams(temperature=0.0)), 20) for one in executors
        )
        assert quantized == dense


def run_together(loaded: Loaded, prompts: list[list[int]], count: int) -> list[list[int]]:
    executor: Any = loaded.executor
    driver = Driver(executor)
    tasks = [Task(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]
    for task in tasks:
        driver.add(task)
    while min(len(task.outputs) for task in tasks) < count:
        driver.step()
    return [task.outputs[:count] for task in tasks]


@needs_kernels
@pytest.mark.parametrize("skip", ["layers.0", "layers.1"])
def test_formats_that_pad_differently_may_be_in_one_model(
    shared_checkpoint: Make, tmp_path: Path, skip: str
) -> None:
    """Formats with different padding may be in one model: 160 inputs are whole chunks of 32, as 16-bit
    weights need, but not whole tiles of 64, as integers need. The rows of a batch must not overlap."""
    source = shared_checkpoint("llama", "bfloat16", hidden_size=160, intermediate_size=160)
    store, fields = awq(-1)
    folder = write(source, tmp_path / "folder", store, {**fields, "modules_to_not_convert": [skip]}, [skip])
    loaded = load(config(folder))
    assert loaded.model_info.precision == "bfloat16, layers in int4:channel, unquantized"
    alone = [run_together(loaded, [prompt], 12)[0] for prompt in PROMPTS]
    assert run_together(loaded, PROMPTS, 12) == alone
    rounded = logits_of(folder, [60], torch.float32, loaded.pool)
    exact = logits_of(dense_of(folder), [60], torch.float32, loaded.pool)
    assert (rounded - exact).square().mean().sqrt() < 0.1 * exact.std()


@needs_kernels
@pytest.mark.parametrize(
    ("case", "name", "width"),
    [("awq, groups of 64", "int4:64", "int4"), ("gptq of 8 bits", "int8:64", "int8"),
     ("fp8 in blocks", "fp8:128", "fp8"), ("fp8 by tensor", "fp8:channel", "fp8"),
     ("fp8 without blocks", "fp8:channel", "fp8")],
)  # fmt: skip
def test_a_loaded_model_names_its_precision_and_size(stored: Make, case: str, name: str, width: str) -> None:
    folder = stored(case)
    loaded, dense = load(config(folder)), load(config(dense_of(folder)))
    info, spec = loaded.model_info, loaded.model.spec
    assert info.precision == f"float32, layers in {name}"  # float16 weights are computed in float32
    assert info.fingerprint != dense.model_info.fingerprint
    assert info.numerics != dense.model_info.numerics
    assert subject_of(loaded).dtype == f"float32-{width}"
    layers: list[Any] = loaded.model.layers
    held = sum(getattr(layer, part).nbytes for layer in layers for part in ("qkv", "out", "gate_up", "down"))
    assert held == matrix_bytes(spec, 4) == step_floor(loaded, 1.0, 1.0).layer_bytes
    assert dense.model_info.weight_bytes - info.weight_bytes == matrix_bytes(dense.model.spec, 4) - held


@needs_kernels
def test_the_draft_model_may_be_stored_in_any_format(stored: Make, shared_checkpoint: Make) -> None:
    target = shared_checkpoint("llama", "bfloat16", **SIZES)
    drafter: Any = load(config(target, draft=str(stored("fp8 by channel")))).drafter
    assert drafter._passes.model.layers[0].qkv.format == "fp8"
