"""Checkpoints in the compressed-tensors format give the weights that the package decompresses, or are
refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from streamserve.execution.backends.native.library import kernels
from streamserve.execution.formats.check import check_weights
from streamserve.execution.formats.checkpoint import SINGLE, Checkpoint
from streamserve.execution.formats.quantization import WeightFormat, join
from streamserve.execution.formats.stored.words import pack, unpack
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.model.shapes import matrix_bytes, matrix_shapes
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.sampling import SamplingParams
from tests.checkpoints import reference_model
from tests.execution.backends.native.integer_reference import reference
from tests.execution.compressing import INT8_ACTIVATIONS, compress, parameters, stored_format
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Task, run_alone

CASES: dict[str, dict[str, Any]] = {
    "W4A16": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "W4A16 with zero points": {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    "W4A16, float32 scales": {
        "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False,
        "scale_dtype": torch.float32,
    },
    "W4A16 by channel": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "W8A16": {"num_bits": 8, "strategy": "group", "group_size": 64, "scale_dtype": torch.float16},
    "W8A16 with zero points": {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
    "W8A16 by channel": {"num_bits": 8, "strategy": "channel"},
    "W8A8": {
        "num_bits": 8, "strategy": "channel", "format": "int-quantized", "activations": INT8_ACTIVATIONS,
    },
    "W8A8 with zero points": {
        "num_bits": 8, "strategy": "channel", "symmetric": False, "format": "int-quantized",
        "activations": INT8_ACTIVATIONS,
    },
    "W4A8": {
        "num_bits": 4, "strategy": "group", "group_size": 32, "format": "int-quantized",
        "activations": INT8_ACTIVATIONS,
    },
}  # fmt: skip
WEIGHTS = WeightFormat(4, None, symmetric=False)
Q_PROJ = "model.layers.1.self_attn.q_proj"

Shared = Callable[..., Path]


@pytest.fixture
def source(shared_checkpoint: Shared) -> Path:
    return shared_checkpoint("qwen2", "bfloat16", intermediate_size=192)


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A quantized checkpoint that a test may change."""
    compress(source, tmp_path / "folder", **CASES["W4A16 with zero points"])
    return tmp_path / "folder"


def config(folder: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), threads=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **fields)


def check(folder: Path) -> None:
    check_weights(Checkpoint(folder), read_spec(folder))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        check(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Set tensors of the file; None removes a tensor."""
    content = load_file(folder / SINGLE) | tensors
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, folder / SINGLE)


@given(
    bits=st.sampled_from([4, 8]), rows=st.integers(1, 40), columns=st.integers(1, 70), seed=st.integers(0, 99)
)  # fmt: skip
def test_numbers_are_packed_as_the_package_packs_them(bits: int, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=generator)
    signed = (numbers.to(torch.int16) - (1 << bits - 1)).to(torch.int8)
    words = pack(numbers, bits)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(unpack(words, bits, columns), numbers)
    along_rows = pack(numbers.T, bits).T.contiguous()
    assert torch.equal(along_rows, pack_to_int32(signed, bits, packed_dim=0))
    assert torch.equal(unpack(along_rows.T, bits, rows).T, numbers)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_the_package_decompresses(source: Path, tmp_path: Path, name: str) -> None:
    decompressed = compress(source, tmp_path / "target", **CASES[name])
    check(tmp_path / "target")
    spec, checkpoint = read_spec(tmp_path / "target"), Checkpoint(tmp_path / "target")
    shapes = matrix_shapes(spec)
    assert shapes.keys() == decompressed.keys()
    for module, shape in shapes.items():
        weight = stored_format(spec, module).read(checkpoint, module, shape).whole()
        assert torch.equal(weight.floats(), decompressed[module])


@pytest.mark.parametrize("dynamic", [True, False])
def test_floats_are_those_that_the_package_decompresses(source: Path, tmp_path: Path, dynamic: bool) -> None:
    eight_bits: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    activations = {**eight_bits, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    decompressed = compress(
        source,
        tmp_path / "target",
        "float-quantized",
        activations=activations,
        strategy="channel",
        **eight_bits,
    )
    if not dynamic:
        change(tmp_path / "target", **{f"{module}.input_scale": torch.ones(1) for module in decompressed})
    check(tmp_path / "target")
    spec, checkpoint = read_spec(tmp_path / "target"), Checkpoint(tmp_path / "target")
    assert str(spec.stored) == "fp8:channel"
    for module, weight in decompressed.items():
        stored = stored_format(spec, module).read(checkpoint, module, matrix_shapes(spec)[module]).whole()
        assert torch.equal(stored.floats(), weight)


def test_a_folder_that_the_package_saves_by_itself_is_read(source: Path, tmp_path: Path) -> None:
    model, folder = reference_model(source, "bfloat16"), tmp_path / "saved"
    arguments = QuantizationArgs(num_bits=4, group_size=32, symmetric=False)
    scheme = QuantizationScheme(targets=["re:.*proj$"], weights=arguments)
    config = QuantizationConfig(config_groups={"group_0": scheme}, quantization_status="frozen")
    apply_quantization_config(model, config)
    quantized = [name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")]
    for name in quantized:
        module = model.get_submodule(name)
        for key, value in parameters(module.weight.data, arguments).items():
            getattr(module, key).data.copy_(value)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    check(folder)
    compressor.decompress_model(model)
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    assert set(quantized) == matrix_shapes(spec).keys()
    for name, shape in matrix_shapes(spec).items():
        floats = stored_format(spec, name).read(checkpoint, name, shape).whole().floats()
        assert torch.equal(floats.bfloat16(), model.get_submodule(name).weight)


def layer_input(width: int) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def parts(folder: Path, modules: str) -> list[Any]:
    """Return the weights of the first layer's modules as they are read."""
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    return [
        stored_format(spec, name).read(checkpoint, name, matrix_shapes(spec)[name]).whole()
        for name in (f"model.layers.0.{module}" for module in modules.split())
    ]


needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels on this machine")


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_layers_compute_the_formula_of_the_kernels(source: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "target"
    compress(source, folder, **CASES[name])
    loaded = load(config(folder))
    layer = loaded.model.layers[0]
    bias = torch.cat([load_file(folder / SINGLE)[f"model.layers.0.self_attn.{n}_proj.bias"] for n in "qkv"])
    for linear, modules, added in [
        (layer.qkv, "self_attn.q_proj self_attn.k_proj self_attn.v_proj", bias.float()),
        (layer.out, "self_attn.o_proj", 0.0),
        (layer.down, "mlp.down_proj", 0.0),
    ]:
        x = layer_input(linear.in_features)
        expected = torch.from_numpy(reference(join(parts(folder, modules)), x)) + added
        assert torch.equal(linear(x, wide=True), expected)


@needs_kernels
def test_a_loaded_model_names_its_precision(folder: Path, source: Path) -> None:
    loaded, plain = load(config(folder)), load(config(source))
    info = loaded.model_info
    assert info.precision == "bfloat16, layers in int4:64"
    assert info.fingerprint != plain.model_info.fingerprint
    assert info.parameters == plain.model_info.parameters
    saved = plain.model_info.weight_bytes - info.weight_bytes
    assert saved == matrix_bytes(plain.model.spec, 2) - matrix_bytes(loaded.model.spec, 2)
    layers: list[Any] = loaded.model.layers
    stored = sum(layer.out.nbytes + layer.down.nbytes for layer in layers)
    planned = {
        name: loaded.format.nbytes(*shape)
        for name, shape in matrix_shapes(loaded.model.spec).items()
        if loaded.format and name.endswith(("o_proj", "down_proj"))
    }
    assert stored == sum(planned.values())


@needs_kernels
def test_matrices_may_stay_in_16_bits(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    weights = compress(source, folder, ignore=".*(0.mlp.down|o)_proj", **CASES["W4A16 by channel"])
    loaded, plain = load(config(folder)), load(config(source))
    info = loaded.model_info
    assert info.precision == "bfloat16, layers in int4:channel, unquantized"
    layers: list[Any] = loaded.model.layers
    assert [layer.down.format for layer in layers] == ["bf16", "int4"]
    assert [layer.qkv.format for layer in layers] == ["int4", "int4"]
    x = layer_input(layers[0].down.in_features)
    assert torch.equal(layers[0].down(x), plain.model.layers[0].down(x))
    saved = plain.model_info.weight_bytes - info.weight_bytes
    assert saved == sum(2 * weight.numel() - WEIGHTS.nbytes(*weight.shape) for weight in weights.values())
    tokens = run_alone(loaded.executor, Task([5, 6, 7], SamplingParams(temperature=0.0)), 20)
    assert len(tokens) == 20


@needs_kernels
def test_a_quantized_checkpoint_can_be_the_draft_model(folder: Path, source: Path) -> None:
    loaded: Loaded = load(config(source, draft=str(folder)))
    drafter: Any = loaded.drafter
    assert drafter._passes.model.layers[0].qkv.format == "int4"
    assert loaded.model.layers[0].qkv.format == "bf16"  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=f"{folder} in int4:64 needs the kernels"):
        load(config(source, draft=str(folder), backend="reference"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization": "int8"}, "--quantization int8:128: .* quantized already, in int4:64"),
        ({"backend": "reference"}, "in int4:64 needs the kernels: use --backend native"),
    ],
)
def test_settings_that_do_not_serve_it_are_refused(folder: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        load(config(folder, **fields))


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("weight_packed", None, "no file holds tensor"),
        ("weight_scale", None, "no file holds tensor"),
        ("weight_zero_point", None, "no file holds tensor"),
        ("weight_shape", None, "no file holds tensor"),
        ("weight_packed", torch.zeros(64, 7, dtype=torch.int32), "has shape [64, 7], not [64, 8]"),
        ("weight_packed", torch.zeros(64, 8), "has dtype F32, not I32"),
        ("weight_scale", torch.zeros(64, 2), "has shape [64, 2], not [64, 1]"),
        ("weight_scale", torch.zeros(64, 1, dtype=torch.int32), "has dtype I32, not F32 or BF16 or F16"),
        ("weight_zero_point", torch.zeros(64, 1, dtype=torch.int32), "has shape [64, 1], not [8, 1]"),
        ("weight", torch.zeros(64, 64), "is unknown to this architecture"),
        ("input_scale", torch.zeros(1), "is unknown to this architecture"),
        ("weight_g_idx", torch.zeros(64, dtype=torch.bool), "has dtype BOOL, not I32 or I64"),
        ("weight_g_idx", torch.arange(63) // 64, "has shape [63], not [64]"),
    ],
)
def test_a_tensor_that_is_not_as_expected_is_named(
    folder: Path, name: str, tensor: torch.Tensor | None, reason: str
) -> None:
    change(folder, **{f"{Q_PROJ}.{name}": tensor})
    assert f"{Q_PROJ}.{name}" in refusal(folder)
    assert reason in refusal(folder)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("weight_scale", torch.full((64, 1), torch.inf), "not finite"),
        ("weight_shape", torch.tensor([64, 63]), r"says \[64, 63\], not \[64, 64\]"),
    ],
)
def test_values_that_the_format_does_not_have_are_named(
    folder: Path, name: str, tensor: torch.Tensor, reason: str
) -> None:
    change(folder, **{f"{Q_PROJ}.{name}": tensor})
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.{name} .*{reason}"):
        load(config(folder))


@needs_kernels
def test_numbers_of_more_than_four_bits_are_refused(source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "folder", **CASES["W4A8"])
    change(tmp_path / "folder", **{f"{Q_PROJ}.weight": torch.full((64, 64), 8, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.weight holds numbers of more than 4 bits"):
        load(config(tmp_path / "folder"))


def test_groups_in_the_inputs_order_may_be_listed(folder: Path) -> None:
    change(folder, **{f"{Q_PROJ}.weight_g_idx": torch.arange(64, dtype=torch.int32) // 64})
    check(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) - 100])
    assert f"{folder / SINGLE}: cannot be read" in refusal(folder)
