"""Whole models on a device: for every architecture kernels compute the same as plain torch, and quantized
weights and KV have the values that they represent."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.execution.backends.cuda.executor import DeviceExecutor
from streamserve.execution.backends.cuda.linear import QuantizedLinear
from streamserve.execution.backends.cuda.operations import Implementation
from streamserve.execution.backends.cuda.packing import unpack
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.formats.quantization import parse_format, quantize
from streamserve.execution.loading.device import DeviceBackend
from streamserve.execution.loading.load import load
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.sampling import SamplingParams
from tests.conftest import Scale
from tests.exact.generating import MODELS
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Driver, Task
from tests.execution.storing import CASES, dense_of
from tests.ggufs import dequantized_folder, write_gguf

PROMPTS = [[5, 80, 33, 9, 41, 200, 7], [4, 90, 17] * 7, [12]]
SPECIAL = ("gpt_oss", "gemma3_text")
"""Models that together use all kernels except the one for joint norms."""
Shared = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generate(executor: Any, count: int = 8) -> tuple[list[list[int]], list[float]]:
    """Return the greedy tokens of all prompts, computed in one batch with chunks, and their
    log-probabilities."""
    driver = Driver(executor)
    params = SamplingParams(temperature=0.0, logprobs=0)
    tasks = [Task(list(prompt), params, chunk=9) for prompt in PROMPTS]
    for task in tasks:
        driver.add(task)
    while any(len(task.outputs) < count for task in tasks):
        driver.step()
    logprobs = [one.logprob for task in tasks for one in task.sampled[:count] if one.logprob is not None]
    assert len(logprobs) == count * len(tasks)
    return [task.outputs[:count] for task in tasks], logprobs


def loaded(folder: Path, **fields: Any) -> Any:
    config = ModelConfig(
        path=str(folder), threads=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, dtype="float32",
        **{"backend": "device", **fields},
    )  # fmt: skip
    return load(config)


def assert_same(found: tuple[Any, list[float]], expected: tuple[Any, list[float]], error: float) -> None:
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=error)
    assert len({tuple(tokens) for tokens in found[0]}) == len(PROMPTS)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_compute_every_architecture(shared_checkpoint: Shared, name: str, scale: Scale) -> None:
    if not scale.full and name not in SPECIAL:
        pytest.skip("with --full")
    folder = shared_checkpoint(name, **MODELS[name])
    spec, device = read_spec(folder), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    outcomes = []
    implementations: tuple[Implementation, ...] = ("plain", "kernels")
    for implementation in implementations:
        place = torch.device("cpu") if implementation == "plain" else device
        backend = DeviceBackend.on(place, 16, 400, implementation)
        model = backend.model(Checkpoint(folder), spec, torch.float32)
        cache = backend.cache(spec, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
        executor = DeviceExecutor(backend.runner(model, cache), spec.eos_token_ids)
        outcomes.append(generate(executor, scale.pick(1, 2)))
        executor.close()
    assert_same(outcomes[1], outcomes[0], 2e-4)


@pytest.mark.parametrize("case", CASES)
def test_stored_weights_are_what_they_stand_for(stored: Callable[..., Path], case: str) -> None:
    folder = stored(case)
    quantized = loaded(folder)
    assert isinstance(quantized.model.layers[0].qkv, QuantizedLinear)
    assert quantized.model_info.quantization != "none"
    assert_same(generate(quantized.executor), generate(loaded(dense_of(folder)).executor), 1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_ggufs_are_what_they_stand_for(
    shared_checkpoint: Shared, tmp_path: Path, architecture: str, kind: str
) -> None:
    if architecture != "llama" and kind != "Q4_K":
        pytest.skip("experts have one format as an example")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    source = shared_checkpoint(architecture, **sizes, **(moe if architecture != "llama" else {}))
    dense = write_gguf(source, tmp_path / "model.gguf", kind)
    quantized = loaded(tmp_path / "model.gguf")
    assert quantized.model_info.quantization != "none"
    plain = loaded(dequantized_folder(source, tmp_path / "dense", dense))
    assert_same(generate(quantized.executor), generate(plain.executor), 2e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4:32", "w8a8"])
def test_rounded_weights_are_those_of_the_cpu(shared_checkpoint: Shared, quantization: str) -> None:
    folder = shared_checkpoint()
    quantized = loaded(folder, quantization=quantization, head_quantization="int8")
    format, checkpoint = parse_format(quantization), Checkpoint(folder)
    assert format is not None
    weight = checkpoint.tensor(["model.layers.1.mlp.down_proj.weight"], torch.float32)
    assert torch.equal(unpack(quantized.model.layers[1].down.packed).cpu(), quantize(weight, format).floats())
    assert isinstance(quantized.model.head, QuantizedLinear)
    tokens, _ = generate(quantized.executor)
    assert quantization != "int4:32" or tokens != generate(loaded(folder).executor)[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_keys_and_values_of_8_bits_are_those_of_the_cpu(shared_checkpoint: Shared, name: str) -> None:
    folder = shared_checkpoint(name, **MODELS[name])
    narrow = loaded(folder, kv_cache_dtype="int8")
    assert narrow.cache.data.dtype == torch.int8
    assert "KV cache in int8" in narrow.model_info.precision
    found = generate(narrow.executor)
    reference = loaded(folder, kv_cache_dtype="int8", backend="reference", device="cpu")
    assert_same(found, generate(reference.executor), 1e-3)
    assert found[1] != pytest.approx(generate(loaded(folder).executor)[1], abs=1e-5)


def test_heads_whose_scale_would_not_be_aligned_are_refused_by_name(shared_checkpoint: Shared) -> None:
    folder = shared_checkpoint("llama", head_dim=18)
    with pytest.raises(CheckpointError, match="heads of 18 dimensions, with --kv-cache-dtype int8"):
        loaded(folder, kv_cache_dtype="int8")
