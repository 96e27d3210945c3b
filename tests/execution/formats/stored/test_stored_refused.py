"""Checkpoints of AWQ, GPTQ and fp8 that are damaged, of an unsupported kind, or used with incompatible flags
are refused in one line that names the tensor, field or flag."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from streamserve.cli.main import app
from streamserve.execution.backends.native.library import kernels
from streamserve.execution.formats.checkpoint import SINGLE, Checkpoint
from streamserve.execution.formats.stored.config import read_stored_formats
from streamserve.execution.formats.stored.formats import FUSED_LINEARS, LINEARS, StoredFormats
from streamserve.execution.loading.load import load
from streamserve.execution.model.fields import Fields
from streamserve.execution.model.shapes import matrix_shapes
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from tests.execution.compressing import stored_format
from tests.execution.json_values import JSON
from tests.execution.storing import awq, fp8_blocks, fp8_compressed, gptq

AWQ, GPTQ, REORDERED = "awq, groups of 64", "gptq by activation", "compressed-tensors by activation"
BLOCKS, WITHOUT_BLOCKS, TENSOR = "fp8 in blocks", "fp8 without blocks", "fp8 by tensor"
Q_PROJ = "model.layers.1.self_attn.q_proj"

Make = Callable[..., Path]
needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels on this machine")


@pytest.fixture
def copied(stored: Make, tmp_path: Path) -> Make:
    """Copy the folder of a case, so that a test may change it."""
    return lambda case: shutil.copytree(stored(case), tmp_path / "folder")


def config(folder: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), threads=1, block_size=4, num_blocks=100, **fields)


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Set tensors of the file; None removes a tensor."""
    content = load_file(folder / SINGLE) | tensors
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, folder / SINGLE)


def words(*shape: int, value: int = 0) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32)


NOT_A_NUMBER = torch.full((128, 128), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
DAMAGED: dict[str, list[tuple[str, Tensor | None, str]]] = {
    AWQ: [
        ("qweight", None, "no file holds tensor"),
        ("qzeros", None, "no file holds tensor"),
        ("scales", None, "no file holds tensor"),
        ("qweight", words(16, 128), "has shape [16, 128], not [128, 16]"),
        ("qzeros", words(4, 16), "has shape [4, 16], not [2, 16]"),
        ("qweight", torch.zeros(128, 16), "has dtype F32, not I32"),
        ("scales", torch.full((2, 128), torch.nan), "not finite"),
        ("g_idx", words(128), "is unknown to this architecture"),
        ("bias", torch.zeros(128), "is unknown to this architecture"),
        ("weight", torch.zeros(128, 128), "is unknown to this architecture"),
    ],
    "gptq": [
        ("qweight", None, "no file holds tensor"),
        ("qweight", words(128, 16), "has shape [128, 16], not [16, 128]"),
        ("scales", torch.full((1, 128), torch.inf), "not finite"),
        ("bias", torch.ones(128), "is not zero, but the architecture has no such bias"),
        ("qzeros", words(1, 16, value=0x66666666), "holds zero points other than 8, though sym is true"),
        ("qzeros", words(1, 16, value=-1), "holds a zero point of 16, which has more than 4 bits"),
        ("g_idx", words(128, value=1), "does not divide the inputs into groups of 128"),
        ("g_idx", words(128, value=-7), "does not divide the inputs into groups of 128"),
    ],
    GPTQ: [
        ("g_idx", None, "no file holds tensor"),
        ("g_idx", words(128), "does not divide the inputs into groups of 32"),
        ("g_idx", torch.arange(128), "does not divide the inputs into groups of 32"),
    ],
    REORDERED: [("weight_g_idx", None, "no file holds tensor")],
    BLOCKS: [
        ("weight_scale_inv", None, "no file holds tensor"),
        ("weight_scale_inv", torch.ones(2, 1), "has shape [2, 1], not [1, 1]"),
        ("weight_scale_inv", torch.full((1, 1), torch.nan), "not finite"),
        ("weight_scale_inv", torch.full((1, 1), -1e36), "holds scales of weights that float32 cannot hold"),
        ("weight", torch.zeros(128, 128), "has dtype F32, not F8_E4M3"),
        ("weight", NOT_A_NUMBER, "holds numbers that are not finite"),
        ("input_scale", torch.ones(1), "is unknown to this architecture"),
    ],
    TENSOR: [
        ("weight_scale", torch.ones(2), "has shape [2], not [1]"),
        ("input_scale", None, "no file holds tensor"),
    ],
    WITHOUT_BLOCKS: [
        ("weight_scale_inv", torch.ones(1, 1), "has shape [1, 1], not [1]"),
        ("activation_scale", None, "no file holds tensor"),
    ],
}


@needs_kernels
@pytest.mark.parametrize(
    ("case", "name", "value", "reason"),
    [(case, *damage) for case, damages in DAMAGED.items() for damage in damages],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_that_is_not_as_it_should_be_is_named(
    copied: Make, case: str, name: str, value: Tensor | None, reason: str
) -> None:
    folder = copied(case)
    change(folder, **{f"{Q_PROJ}.{name}": value})
    with pytest.raises(CheckpointError) as error:
        load(config(folder))
    assert re.search(f"{re.escape(Q_PROJ)}.{name}( |$)", str(error.value))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@needs_kernels
def test_matrices_that_are_computed_together_must_group_the_same_inputs(copied: Make) -> None:
    folder = copied(GPTQ)
    index = load_file(folder / SINGLE)[f"{Q_PROJ}.g_idx"]
    change(folder, **{f"{Q_PROJ}.g_idx": index.flip(0)})
    with pytest.raises(CheckpointError, match=r"k_proj groups its inputs differently than .*1.self_attn.q"):
        load(config(folder))


def test_inputs_without_a_group_are_in_order(copied: Make) -> None:
    """Inputs without a group are in order: compressed-tensors writes -1 for them."""
    folder = copied(REORDERED)
    change(folder, **{f"{Q_PROJ}.weight_g_idx": words(128, value=-1)})
    spec = read_spec(folder)
    weight = stored_format(spec, Q_PROJ).read(Checkpoint(folder), Q_PROJ, matrix_shapes(spec)[Q_PROJ])
    assert weight.order is None


@pytest.mark.parametrize("case", [GPTQ, BLOCKS])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization": "int8"}, "--quantization int8:128: .* quantized already, in"),
        ({"backend": "reference"}, "needs the kernels: use --backend native"),
    ],
)
def test_settings_that_do_not_serve_it_are_refused(
    stored: Make, case: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        load(config(stored(case), **fields))


@pytest.mark.parametrize("case", [AWQ, GPTQ, BLOCKS])
def test_it_is_not_quantized_or_inflated_again(stored: Make, tmp_path: Path, case: str) -> None:
    for command in (
        ["quantize", str(stored(case)), str(tmp_path / "out"), "--format", "int4:32"],
        ["inflate", str(stored(case)), str(tmp_path / "out"), "--hidden", "512", "--layers", "2"],
    ):
        result = CliRunner().invoke(app, ["models", *command])
        assert result.exit_code == 2
        assert "its weights are quantized" in result.output
        assert not (tmp_path / "out").exists()


CONFIGS = {"awq": awq(64)[1], "gptq": gptq()[1], "fp8": fp8_blocks()[1], "floats": fp8_compressed("block")[1]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("awq", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
    ("awq", {"quant_method": ["awq"]}, "quant_method ['awq'] is not supported"),
    ("awq", {"version": "gemv"}, "version 'gemv' is not supported (supported: 'gemm', 'GEMM')"),
    ("awq", {"version": None, "format": "marlin"}, "format 'marlin' is not supported"),
    ("awq", {"backend": "llm-awq"}, "backend 'llm-awq' is not supported"),
    ("awq", {"zero_point": False}, "zero_point False is not supported"),
    ("awq", {"bits": 8}, "bits 8 is not supported (supported: 4)"),
    ("awq", {"bits": None}, "bits is missing"),
    ("awq", {"group_size": 16}, "group_size 16 is not supported (supported: 32, 64, 128, -1)"),
    ("awq", {"group_size": None}, "group_size None is not supported"),
    ("awq", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
    ("awq", {"modules_to_not_convert": ["k_proj"]}, "modules_to_not_convert gives self_attn.q_proj"),
    ("awq", {"modules_to_not_convert": ["model"]}, "modules_to_not_convert leaves no matrix of the layers"),
    ("gptq", {"bits": 3}, "bits 3 is not supported (supported: 4, 8)"),
    ("gptq", {"group_size": 1024}, "group_size 1024 is not supported"),
    ("gptq", {"sym": "yes"}, "sym must be true or false"),
    ("gptq", {"desc_act": 1}, "desc_act must be true or false"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    ("gptq", {"checkpoint_format": None, "format": "bitblas"}, "format 'bitblas' is not supported"),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format True is not supported"),
    ("gptq", {"lm_head": True}, "lm_head True is not supported"),
    ("gptq", {"dynamic": {"-:.*down.*": {}}}, "dynamic is not supported: it sets formats for single modules"),
    ("awq", {"dynamic": {"-:.*down.*": {}}}, "a compressed-tensors or GGUF checkpoint"),
    ("gptq", {"pack_dtype": "int8"}, "pack_dtype 'int8' is not supported"),
    ("gptq", {"modules_in_block_to_quantize": [["attn.q"]]}, "'attn.q' is not a linear module of a layer"),
    ("gptq", {"modules_in_block_to_quantize": []}, "leaves no matrix of the layers"),
    ("gptq", {"block_name_to_quantize": "model.decoder"}, "block_name_to_quantize 'model.decoder' is not"),
    ("fp8", {"weight_block_size": [128]}, "weight_block_size [128] is not supported"),
    ("fp8", {"weight_block_size": [128, 96]}, "weight_block_size [128, 96] is not supported"),
    ("fp8", {"weight_block_size": [True, 128]}, "weight_block_size [True, 128] is not supported"),
    ("fp8", {"activation_scheme": "other"}, "activation_scheme 'other' is not supported"),
    ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    ("fp8", {"kv_cache_scheme": "static"}, "kv_cache_scheme is not supported"),
    ("fp8", {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert is not supported"),
    ("fp8", {"ignored_layers": ["gate_proj"]}, "ignored_layers gives mlp.gate_proj, mlp.up_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "fields", "reason"), REFUSED, ids=str)
def test_what_is_not_computed_as_the_config_says_is_refused(
    method: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        read_stored_formats(
            Fields("config.json", {"quantization_config": CONFIGS[method] | fields}), False, [LINEARS] * 2
        )
    assert str(error.value).startswith("config.json: quantization_config: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def read(method: str, **fields: object) -> StoredFormats:
    """Return how a changed quantization_config applies to two layers."""
    config = Fields("config.json", {"quantization_config": {**CONFIGS[method], **fields}})
    formats = read_stored_formats(config, False, [LINEARS] * 2)
    assert formats is not None
    return formats


def formats(method: str, **fields: object) -> list[str]:
    """Return the formats of the linear modules of the second layer."""
    return [str(format.weights) if format else "" for format in read(method, **fields).layers[1]]


def test_modules_may_stay_unquantized() -> None:
    """Modules may stay unquantized. AWQ lists substrings of their names, fp8 whole components of names, GPTQ
    the quantized modules."""
    o_proj_left = ["int4:64"] * 3 + [""] + ["int4:64"] * 3
    assert formats("awq", modules_to_not_convert=["o_pr", "lm_head"]) == o_proj_left
    assert formats("awq", modules_to_not_convert=["layers.0"]) == ["int4:64"] * 7
    assert formats("fp8", modules_to_not_convert=["mlp.gate", "o_pr", "lm_head"]) == ["fp8:128"] * 7
    assert formats("fp8", ignored_layers=["model.layers.1.mlp"]) == ["fp8:128"] * 4 + [""] * 3
    listed = [["self_attn.o_proj"], "mlp.down_proj"]
    expected = [""] * 3 + ["int4:128"] + [""] * 2 + ["int4:128"]
    assert formats("gptq", modules_in_block_to_quantize=listed) == expected


def test_modules_have_the_names_of_the_architecture() -> None:
    def of_joined(name: str) -> list[bool]:
        fields = {"quantization_config": CONFIGS["gptq"] | {"modules_in_block_to_quantize": [[name]]}}
        formats = read_stored_formats(Fields("config.json", fields), False, [FUSED_LINEARS] * 2)
        assert formats is not None
        return [format is not None for format in formats.layers[1]]

    assert of_joined("self_attn.qkv_proj") == [True, False, False, False]
    with pytest.raises(CheckpointError, match=r"'mlp\.up_proj' is not a linear module of a layer"):
        of_joined("mlp.up_proj")


def test_the_file_decides_whether_a_module_is_quantized_as_the_config_says(copied: Make) -> None:
    folder = copied(AWQ)
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["modules_to_not_convert"] = ["o_proj"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"no file holds tensor .*0.self_attn.o_proj.weight$"):
        load(config(folder))


FIELDS = [(method, name) for method, fields in CONFIGS.items() for name in fields]


@given(at=st.sampled_from(FIELDS), value=JSON)
def test_any_value_of_a_field_is_read_or_refused(at: tuple[str, str], value: object) -> None:
    method, name = at
    try:
        outcome = str(read(method, **{name: value}))
    except CheckpointError as error:
        outcome = str(error)
    assert len(outcome.splitlines()) == 1
