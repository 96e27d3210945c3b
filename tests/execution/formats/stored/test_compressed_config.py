"""A quantization_config of compressed-tensors is read, or refused naming the unsupported field."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.formats.stored.compressed_integers import CompressedIntegers
from streamserve.execution.formats.stored.compressed_tensors import written_config
from streamserve.execution.formats.stored.config import read_stored_formats
from streamserve.execution.formats.stored.formats import LINEARS, StoredFormats
from streamserve.execution.model.fields import Fields
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.errors import CheckpointError
from tests.execution.compressing import INT8_ACTIVATIONS
from tests.execution.json_values import JSON

BASE: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 64, "symmetric": False}},
    },
}  # fmt: skip


def edited(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the quantization_config that is written for int4:64, with changes."""
    stored = read_stored_formats(Fields("", {"quantization_config": BASE}), False, [LINEARS] * 1)
    assert stored is not None
    written = written_config(CompressedIntegers(stored.main, packed=True))
    value: dict[str, Any] = json.loads(json.dumps(written))
    change(value)
    return value


def group(value: dict[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = value["config_groups"]["group_0"]
    return chosen


def weights(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: group(value)["weights"].update(fields)


def inputs(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda value: group(value).update(input_activations={**INT8_ACTIVATIONS, **fields})


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "method": (lambda value: value.update(quant_method="hqq"), "quant_method 'hqq' is not supported"),
    "fp8": (weights(num_bits=8, type="float"), "weights: type 'float' is not supported"),
    "nvfp4": (
        lambda value: group(value).update(format="nvfp4-pack-quantized"),
        "format 'nvfp4-pack-quantized'",
    ),
    "three bits": (weights(num_bits=3), "num_bits 3 is not supported"),
    "no bits": (weights(num_bits=None), "num_bits is missing"),
    "group": (weights(group_size=48), "group_size 48 is not supported (supported: 32, 64, 128, -1)"),
    "huge group": (weights(group_size=10**400), "group_size 10000000"),
    "no group": (weights(group_size=None), "group_size None is not supported"),
    "strategy": (weights(strategy="tensor"), "strategy 'tensor' is not supported"),
    "symmetric": (weights(symmetric="yes"), "symmetric must be true or false"),
    "dynamic": (weights(dynamic=True), "dynamic True is not supported"),
    "actorder": (weights(actorder="row"), "actorder 'row' is not supported"),
    "static activations": (inputs(dynamic=False), "input_activations: dynamic False is not supported"),
    "asymmetric activations": (inputs(symmetric=False), "symmetric False is not supported"),
    "fp8 activations": (inputs(type="float"), "type 'float' is not supported"),
    "four-bit activations": (inputs(num_bits=4), "num_bits 4 is not supported"),
    "activations by tensor": (inputs(strategy="tensor"), "strategy 'tensor' is not supported"),
    "outputs": (lambda value: group(value).update(output_activations=INT8_ACTIVATIONS), "output_activations"),
    "kv cache": (
        lambda value: value.update(kv_cache_scheme={"num_bits": 8}),
        "kv_cache_scheme is not supported",
    ),
    "sparsity": (
        lambda value: value.update(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config",
    ),
    "transforms": (lambda value: value.update(transform_config={"config_groups": {}}), "transform_config"),
    "head": (lambda value: value.update(ignore=[]), "ignore does not name lm_head"),
    "everything ignored": (lambda value: value["ignore"].append("Linear"), "leaves no matrix of the layers"),
    "no targets": (lambda value: group(value).update(targets=[]), "leaves no matrix of the layers"),
    "slow target": (
        lambda value: group(value).update(targets=[r"re:([a-z_.0-9]+)+X"]),
        "is too complex",
    ),
    "repetitions": (lambda value: group(value).update(targets=["re:" + ".*" * 5]), "is too complex"),
    "optional parts": (lambda value: group(value).update(targets=["re:" + ".?" * 60]), "is too complex"),
    "alternatives": (lambda value: group(value).update(targets=["re:" + "(.|.)" * 38]), "is too complex"),
    "flags": (lambda value: value["ignore"].append("re:(?x)(.|.) +"), "is too complex"),
    "many targets": (
        lambda value: group(value).update(targets=[f"re:layer{n}" for n in range(65)]),
        "one of too many",
    ),
    "long target": (lambda value: group(value).update(targets=["re:" + "a" * 300]), "is too complex"),
    "bad target": (lambda value: group(value).update(targets=["re:("]), "'re:(' is not a regular expression"),
    "wrong targets": (lambda value: group(value).update(targets="Linear"), "must be a list of names"),
    "preset": (lambda value: value.update(config_groups={"W4A16": ["Linear"]}), "W4A16 must be an object"),
    "no groups": (lambda value: value.update(config_groups={}), "config_groups is missing"),
    "no weights": (lambda value: group(value).update(weights=None), "weights is missing"),
    "half of a joined weight": (
        lambda value: value["ignore"].append("re:.*k_proj"),
        "gives self_attn.q_proj, self_attn.k_proj, self_attn.v_proj of layer 0 different formats",
    ),
}


def test_patterns_are_bounded_for_all_modules_together() -> None:
    """A pattern that a small model may have would take too long with the names of a large one."""
    value = edited(lambda value: group(value).update(targets=["re:" + ".*" * 4 + "proj"] * 2))
    config = Fields("", {"quantization_config": value})
    assert read_stored_formats(config, False, [LINEARS] * 4) is not None
    with pytest.raises(CheckpointError, match="one of too many patterns"):
        read_stored_formats(config, False, [LINEARS] * 10_000)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_as_the_config_says_is_refused(
    shared_checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    edit, reason = REFUSED[name]
    shutil.copytree(shared_checkpoint(), tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": edited(edit)}))
    with pytest.raises(CheckpointError) as error:
        read_spec(tmp_path / "folder")
    message = str(error.value)
    assert message.startswith(f"{path}: quantization_config: ")
    assert reason in message
    assert "\n" not in message


def paths(value: object, *prefix: str) -> list[tuple[str, ...]]:
    """Return the keys that lead to each value in nested objects."""
    if not isinstance(value, dict):
        return [prefix]
    return [prefix, *(path for key, inner in value.items() for path in paths(inner, *prefix, key))]


def read_or_refusal(config: dict[str, Any]) -> StoredFormats | str:
    try:
        stored = read_stored_formats(
            Fields("config.json", {"quantization_config": config}), False, [LINEARS] * 2
        )
    except CheckpointError as error:
        return str(error)
    assert stored is not None
    return stored


@given(path=st.sampled_from(paths(edited(inputs()))[1:]), value=JSON)
def test_any_value_of_a_field_is_read_or_refused(path: tuple[str, ...], value: object) -> None:
    config = edited(inputs())
    parent: Any = config
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    outcome = read_or_refusal(config)
    if isinstance(outcome, str):
        assert len(outcome.splitlines()) == 1
    else:
        assert outcome.main.bits in (4, 8)


@pytest.mark.parametrize(
    "targets",
    [
        ["re:.*_proj$"],
        ["re:model.layers.*"],
        ["re:.*self_attn.*", "re:.*mlp.*"],
        [f"model.layers.0.{name}" for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")]
        + ["re:.*gate_proj", "re:.*[qkv]_proj"],
    ],
)
def test_targets_may_be_names_and_patterns(targets: list[str]) -> None:
    value = edited(lambda value: (group(value).update(targets=targets), value.update(ignore=None)))
    stored = read_stored_formats(Fields("", {"quantization_config": value}), False, [LINEARS] * 1)
    assert stored is not None
    assert str(stored) == "int4:64"


def test_the_written_config_is_read_as_it_was_meant_by_the_package_too() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    parsed = QuantizationConfig.model_validate(edited(lambda value: None))
    arguments = parsed.config_groups["group_0"].weights
    assert (arguments.num_bits, arguments.group_size, arguments.symmetric) == (4, 64, False)


def test_names_decide_before_patterns_and_patterns_before_the_class() -> None:
    def scheme(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel"}}

    config = edited(lambda value: None)
    config["config_groups"] = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}},
        "some": scheme(8, "re:.*mlp.down_proj"),
        "one": scheme(4, "model.layers.1.mlp.down_proj"),
    }
    config["ignore"] += ["re:.*o_proj", "model.layers.0.mlp.down_proj"]
    stored = read_stored_formats(Fields("", {"quantization_config": config}), False, [LINEARS] * 3)
    assert stored is not None
    down = [stored.of(f"model.layers.{layer}.mlp.down_proj") for layer in range(3)]
    assert [str(each.weights) if each else "" for each in down] == ["", "int4:channel", "int8:channel"]
    assert stored.of("model.layers.2.self_attn.o_proj") is None
    assert str(stored) == "int4:32, int4:channel, int8:channel, unquantized"
    assert str(stored.main) == "int4:32"
