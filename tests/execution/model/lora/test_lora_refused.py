"""LoRA adapters that cannot be computed exactly are refused by name, whatever their files contain."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.model.lora.config import read_config
from streamserve.execution.model.lora.weights import read_adapter
from streamserve.protocol.adapters import open_adapter
from streamserve.protocol.errors import CheckpointError
from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("refused") / "base")


def read(folder: Path, base: Path) -> Any:
    adapter = open_adapter("a", str(folder))
    spec = open_checkpoint(base)[0]
    return read_adapter(adapter.path, adapter.fingerprint, spec, torch.float32, 64, 1 << 30)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True: DoRA is not served"),
        ({"bias": "lora_only"}, "bias must be none, not 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True: biases"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: modules trained in full"),
        ({"trainable_token_indices": [1]}, "trained embeddings"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
        ({"peft_type": "LOHA"}, "peft_type must be LORA, not 'LOHA'"),
        ({"task_type": "SEQ_CLS"}, "task_type must be CAUSAL_LM"),
        (
            {"use_telepathy": True},
            "use_telepathy is True, which this version of streamserve does not support",
        ),
        ({"r": 65}, "above the largest rank"),
        ({"r": 0}, "r must be a positive integer"),
        ({"r": True}, "r must be a positive integer"),
        ({"lora_alpha": -1}, "lora_alpha must be a positive number"),
        ({"lora_alpha": "16"}, "lora_alpha must be a positive number"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"rank_pattern": {"q_proj": 100}}, "rank_pattern is 100, above"),
        ({"rank_pattern": {"(a+)+": 4}}, "too complex"),
        ({"rank_pattern": {"a*b*c*": 4}}, "too complex"),
        ({"rank_pattern": {"(.|.)" * 5: 4}}, "too complex"),
        ({"rank_pattern": {"(q_proj": 4}}, "not a regular expression"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"target_modules": 7}, "target_modules must be a list of modules' names or a pattern, not 7"),
        ({"target_modules": ["q_proj", 7]}, "target_modules must be a list of modules' names or a pattern"),
        ({"exclude_modules": {"q_proj": 1}}, "exclude_modules must be a list of modules' names or a pattern"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform must be layers' numbers"),
        ({"target_modules": "(q_proj"}, "target_modules has a pattern that is not a regular expression"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configurations(fields: dict[str, Any], message: str) -> None:
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    with pytest.raises(CheckpointError, match=message):
        read_config("adapter_config.json", json.dumps(plain | fields).encode(), 64)


def test_what_training_leaves_in_the_file_is_taken() -> None:
    fields = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear",
        "layers_to_transform": [0], "loftq_config": {}, "megatron_core": "megatron.core", "eva_config": None,
        "use_dora": False, "modules_to_save": None, "init_lora_weights": True, "peft_version": "0.17.0",
        "qalora_group_size": 16, "revision": None, "use_qalora": False, "corda_config": None,
    }  # fmt: skip
    config = read_config("adapter_config.json", json.dumps(fields).encode(), 64)
    assert (config.rank, config.scale_of("model.layers.0.self_attn.q_proj")) == (4, 2.0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff"])
def test_configurations_that_are_no_objects(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_config("adapter_config.json", content, 64)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (f"{Q}.lora_magnitude_vector", (64,), "DoRA is not served: train with use_dora=False, or merge"),
        (f"{Q}.lora_magnitude_vector.weight", (64,), "DoRA is not served"),
        ("base_model.model.lm_head.weight", (320, 64), r"trained in full \(modules_to_save\) are not served"),
        ("base_model.model.model.norm.weight", (64,), "trained in full .*: merge them into the model"),
        ("base_model.model.lm_head.modules_to_save.bias", (320,), "trained in full"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 320), "adapters of embeddings"),
        ("base_model.model.lm_head.lora_A.weight", (4, 64), "adapters of the output head"),
        (f"{Q}.bias", (64,), "biases of adapters"),
        (f"{Q}.lora_A.weight", (4, 63), r"has shape \[4, 63\], not \[4, 64\]"),
        (f"{Q}.lora_B.weight", (64, 5), r"has shape \[64, 5\], not \[64, 4\]"),
        (Q.replace("layers.0", "layers.7") + ".lora_A.weight", (4, 64), "no such linear module"),
        (Q.replace("model.model.model", "model.model.language_model") + ".lora_A.weight", (4, 64), "no such"),
        ("base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight", (4, 64), "experts"),
    ],
)
def test_tensors(base: Path, tmp_path: Path, name: str, shape: tuple[int, ...], message: str) -> None:
    folder = write_adapter(tmp_path / "adapter", base)
    tensors = load_file(folder / "adapter_model.safetensors") | {name: torch.zeros(shape)}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message) as refused:
        read(folder, base)
    assert "adapter_model.safetensors" in str(refused.value)


NAMED = [
    ["q_proj", "up_proj"],
    ["self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"],
    "all-linear",
    None,
    r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    r"model\.layers\.\d+\.(self_attn|mlp)\.(q|up)_proj",
    r"^(?!.*visual).*(?:q_proj|up_proj).*",
    r"(model\.)?layers\.[01]\.(self_attn\.q_proj|mlp\.up_proj)",
]
UNNAMED = [
    ["q_proj"],
    ["q_proj", "layers.0.mlp.up_proj"],
    ["q_proj", "p_proj", "mlp", "up"],
    [r".*_proj"],
    [],
    r".*\.q_proj",
    r"self_attn\.q_proj|mlp\.up_proj",
    r".*\.(q_proj|up_pro)",
]


@pytest.mark.parametrize("targets", NAMED, ids=str)
def test_tensors_of_modules_that_the_targets_name_are_served(
    base: Path, tmp_path: Path, targets: Any
) -> None:
    modules = ("q_proj", "up_proj")
    folder = write_adapter(tmp_path / "adapter", base, modules, target_modules=targets)
    assert len(read(folder, base).parts) == 4


COMPLEX = [
    r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp|ffn).*?(?:k_proj|v_proj|q_proj|up_proj|o_proj).*?)",
    r"^(?!.*(?:visual|vision)).*(?:self_attn|mlp).*(?:q_proj|k_proj|v_proj|up_proj)$",
    r"(a+)+",
    r"(?x)((?:[a-z_.0-9]+) +) +!",
    "|".join(f"model.layers.{n}.self_attn.q_proj" for n in range(40)),
]
"""Patterns whose matching may take long."""


@pytest.mark.parametrize("targets", COMPLEX, ids=range(len(COMPLEX)))
def test_a_complex_pattern_is_not_evaluated(base: Path, tmp_path: Path, targets: str) -> None:
    """A complex pattern is not evaluated, because the tensors show which modules have an adapter."""
    folder = write_adapter(tmp_path / "adapter", base, ("q_proj", "up_proj"), target_modules=targets)
    assert len(read(folder, base).parts) == 4


def test_a_module_named_in_full_is_served_whatever_the_layers(base: Path, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    folder = write_adapter(
        tmp_path / "adapter", base, ("q_proj",), target_modules=names, layers_to_transform=[1]
    )
    assert len(read(folder, base).parts) == 2


@pytest.mark.parametrize("targets", UNNAMED, ids=str)
def test_tensors_of_modules_that_the_targets_do_not_name_are_refused(
    base: Path, tmp_path: Path, targets: Any
) -> None:
    modules = ("q_proj", "up_proj")
    folder = write_adapter(tmp_path / "adapter", base, modules, target_modules=targets)
    with pytest.raises(CheckpointError, match=r"_proj\.lora_A\.weight is not served: .* \(target_modules"):
        read(folder, base)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"exclude_modules": ["up_proj"]}, "0.mlp.up_proj"),
        ({"exclude_modules": r".*layers\.1.*q_proj"}, "1.self_attn.q_proj"),
        ({"layers_to_transform": [0]}, "1.self_attn.q_proj"),
        ({"layers_to_transform": 1}, "0.self_attn.q_proj"),
        ({"layers_to_transform": [0, 1], "exclude_modules": ["gate_proj"], "layers_pattern": "layers"}, None),
    ],
    ids=str,
)
def test_tensors_of_excluded_modules_and_other_layers_are_refused(
    base: Path, tmp_path: Path, fields: dict[str, Any], refused: str | None
) -> None:
    folder = write_adapter(tmp_path / "adapter", base, ("q_proj", "up_proj"), **fields)
    if refused is None:
        assert read(folder, base).parts
        return
    with pytest.raises(CheckpointError, match=f"layers.{refused}.lora_A.weight is not served"):
        read(folder, base)


def test_matrices_that_are_missing_not_finite_or_of_another_type(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: each for name, each in tensors.items() if name != f"{Q}.lora_B.weight"}, file)
    with pytest.raises(CheckpointError, match="lora_B is missing"):
        read(folder, base)
    save_file(tensors | {f"{Q}.lora_B.weight": torch.full((64, 4), torch.inf)}, file)
    with pytest.raises(CheckpointError, match="not finite"):
        read(folder, base)
    save_file(tensors | {f"{Q}.lora_B.weight": torch.zeros(64, 4, dtype=torch.int64)}, file)
    with pytest.raises(CheckpointError, match="dtype I64"):
        read(folder, base)
    save_file({}, file)
    with pytest.raises(CheckpointError, match="holds no adapter"):
        read(folder, base)
    for content in (b"", b"\xff" * 100, (1 << 40).to_bytes(8, "little") + b"{}"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            read(folder, base)


def test_files_that_are_missing_or_too_large(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="as PEFT saves it"):
        open_adapter("a", str(tmp_path / "nowhere"))
    folder = write_adapter(tmp_path / "adapter", base)
    (folder / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="has more than 1048576 bytes"):
        open_adapter("a", str(folder))


def test_weights_of_gigabytes_are_refused_by_their_header(base: Path, tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "adapter", base) / "adapter_model.safetensors"

    def refusal(shape: list[int], **limits: int) -> str:
        """Return why a sparse file with a single tensor of this shape is refused."""
        end = 4 * math.prod(shape)
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
        header = json.dumps({f"{Q}.lora_A.weight": entry}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(file, file.stat().st_size + end)
        with pytest.raises(CheckpointError) as error:
            open_adapter("a", str(file.parent), **limits)
        return str(error.value)

    assert "no module has more than 1048576 inputs" in refusal([64, 60_000_000], max_rank=64)
    assert "above the largest rank" in refusal([1_000_000, 4000], max_rank=64)
    assert "raise --max-lora-rank (now 64)" in refusal([65, 64], max_rank=64)
    assert "see --max-lora-bytes" in refusal([64, 1_000_000], max_rank=64, max_bytes=1 << 20)
    os.truncate(file, 15 << 30)
    with pytest.raises(CheckpointError, match="its header does not cover all of it"):
        open_adapter("a", str(file.parent))


def test_adapters_of_experts_are_refused_and_those_of_attention_beside_them_served(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "mixtral", num_local_experts=2, num_experts_per_tok=1)
    folder = write_adapter(tmp_path / "adapter", base, ("q_proj",))
    assert read(folder, base).parts
    file = folder / "adapter_model.safetensors"
    expert = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight"
    save_file(load_file(file) | {expert: torch.zeros(4, 64)}, file)
    with pytest.raises(CheckpointError, match="is an adapter of experts"):
        read(folder, base)
