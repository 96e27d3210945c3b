"""A folder's tensors are found in one file or in many, and errors in them are named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from streamserve.execution.formats.check import check_weights
from streamserve.execution.formats.checkpoint import INDEX, SINGLE, Checkpoint, plain_name
from streamserve.execution.model.shapes import EMBEDDING, HEAD, weight_shapes
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.errors import CheckpointError

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(shared_checkpoint, tmp_path) -> Path:
    """A checkpoint of one file that a test may damage."""
    return Path(shutil.copytree(shared_checkpoint(), tmp_path / "single"))


@pytest.fixture
def sharded(shared_checkpoint, tmp_path) -> Path:
    """The same checkpoint in several files."""
    folder = Path(shutil.copytree(shared_checkpoint(max_shard_size="100KB"), tmp_path / "sharded"))
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Set tensors of the single file; None removes a tensor."""
    content = load_file(folder / SINGLE) | tensors
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, folder / SINGLE)


def check(folder: Path) -> None:
    check_weights(Checkpoint(folder), read_spec(folder))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        check(folder)
    return str(error.value)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_names_and_shapes_are_those_that_transformers_writes(shared_checkpoint, architecture, tied):
    folder = shared_checkpoint(architecture, tie_word_embeddings=tied)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(folder / SINGLE).items()}
    assert weight_shapes(read_spec(folder)) == written


def test_shards_hold_the_same_tensors_as_one_file(folder, sharded):
    check(sharded)
    one, many = Checkpoint(folder), Checkpoint(sharded)
    for name in weight_shapes(read_spec(folder)):
        assert torch.equal(one.tensor([name], torch.float32), many.tensor([name], torch.float32))
    assert one.fingerprint() == many.fingerprint()


def test_tensors_are_joined_and_converted(folder):
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    content = load_file(folder / SINGLE)
    joined = Checkpoint(folder).tensor(names, torch.bfloat16)
    assert torch.equal(joined, torch.cat([content[name] for name in names]).bfloat16())


def test_a_loaded_tensor_is_a_copy_that_outlives_its_file(folder):
    content = load_file(folder / SINGLE)[EMBEDDING].clone()
    tensor = Checkpoint(folder).tensor([EMBEDDING], torch.float32)
    with open(folder / SINGLE, "r+b") as file:
        file.write(b"\0" * 1000)
        file.truncate(1000)
    assert torch.equal(tensor, content)


def test_a_folder_without_safetensors_is_refused(folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    assert SINGLE in refusal(folder)
    assert INDEX in refusal(folder)


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: file is missing" in refusal(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded):
    index = json.loads((sharded / INDEX).read_text())
    others = set(index["weight_map"].values()) - {index["weight_map"][Q_PROJ]}
    index["weight_map"][Q_PROJ] = wrong = min(others)
    (sharded / INDEX).write_text(json.dumps(index))
    assert str(sharded / wrong) in refusal(sharded)
    assert Q_PROJ in refusal(sharded)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "pipe", "pipe.bin", 1])
def test_an_index_may_only_name_safetensors_files_of_its_folder(sharded, shard):
    """Other files of the folder may be pipes, which would keep the start waiting."""
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][Q_PROJ] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"must name a .safetensors file of the folder, not {shard!r}" in refusal(sharded)


def test_an_index_without_a_map_is_refused(sharded):
    (sharded / INDEX).write_text("{}")
    assert "weight_map is missing" in refusal(sharded)


def test_a_damaged_file_is_named(folder):
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) // 2])
    assert f"{folder / SINGLE}: cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (None, "no file holds"),
        (torch.zeros(64, 63), "has shape [64, 63], not [64, 64]"),
        (torch.zeros(64, 64, dtype=torch.float8_e4m3fn), "has dtype F8_E4M3"),
        (torch.zeros(64, 64, dtype=torch.int8), "has dtype I8"),
    ],
)
def test_a_tensor_that_is_not_as_expected_is_named(folder, tensor, reason):
    change(folder, **{Q_PROJ: tensor})
    assert Q_PROJ in refusal(folder)
    assert reason in refusal(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "extra"]
)
def test_a_tensor_we_would_not_compute_with_is_refused(folder, name):
    change(folder, **{name: torch.zeros(64)})
    assert f"{folder / SINGLE}: tensor {name} is unknown" in refusal(folder)


WRAPPED = {
    "module": lambda name: f"module.{name}",
    "_orig_mod": lambda name: f"_orig_mod.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "compiled layers": lambda name: name.replace(".self_attn.", "._orig_mod.self_attn."),
    "fsdp": lambda name: "_fsdp_wrapped_module." + name.replace(".mlp.", "._fsdp_wrapped_module.mlp."),
    "model.language_model": lambda name: name.replace("model.", "model.language_model.", 1),
    "language_model": lambda name: f"language_model.{name}",
    "all": lambda name: f"module._orig_mod.{name.replace('model.', 'model.language_model.', 1)}",
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_names_of_wrapped_and_contained_models_are_understood(folder, tmp_path, kind):
    wrapped = Path(shutil.copytree(folder, tmp_path / "wrapped"))
    content = {WRAPPED[kind](name): tensor for name, tensor in load_file(folder / SINGLE).items()}
    assert content.keys() != load_file(folder / SINGLE).keys()
    save_file(content, wrapped / SINGLE)
    check(wrapped)
    one, other = Checkpoint(folder), Checkpoint(wrapped)
    assert one.fingerprint() == other.fingerprint()
    assert torch.equal(one.tensor([Q_PROJ], torch.float32), other.tensor([Q_PROJ], torch.float32))
    other.read_ahead(1)
    other.release()
    content[WRAPPED[kind](Q_PROJ)] = torch.zeros(3)
    save_file(content, wrapped / SINGLE)
    assert f"tensor {WRAPPED[kind](Q_PROJ)} has shape [3], not [64, 64]" in refusal(wrapped)


@given(parts=st.lists(st.sampled_from(["module", "_orig_mod", "_fsdp_wrapped_module"]), max_size=3))
def test_every_name_of_a_model_is_found_with_wrappers_anywhere(shared_checkpoint, parts):
    for name in weight_shapes(read_spec(shared_checkpoint())):
        assert plain_name(name) == name
        steps = name.split(".")
        for place in range(len(steps)):
            assert plain_name(".".join([*steps[:place], *parts, *steps[place:]])) == name


def test_two_tensors_of_one_name_are_refused(folder):
    change(folder, **{f"module.{Q_PROJ}": torch.zeros(64, 64)})
    assert f"{Q_PROJ} are both {Q_PROJ}: remove one of them" in refusal(folder)


def test_stored_rope_frequencies_are_ignored(folder):
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    check(folder)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(shared_checkpoint, tmp_path):
    folder = Path(shutil.copytree(shared_checkpoint(tie_word_embeddings=True), tmp_path / "tied"))
    embedding = load_file(folder / SINGLE)[EMBEDDING]
    change(folder, **{HEAD: embedding.clone()})
    check(folder)
    change(folder, **{HEAD: embedding + 1})
    assert "tie_word_embeddings" in refusal(folder)
    assert HEAD in refusal(folder)


def test_fingerprints_tell_weights_apart(folder):
    before = Checkpoint(folder).fingerprint("spec")
    assert before == Checkpoint(folder).fingerprint("spec")
    assert before != Checkpoint(folder).fingerprint("other spec")
    weight = load_file(folder / SINGLE)[Q_PROJ]
    seen = {before}
    for changed in (weight + 1e-6, weight.bfloat16(), weight.view(32, 128)):
        change(folder, **{Q_PROJ: changed})
        seen.add(Checkpoint(folder).fingerprint("spec"))
    assert len(seen) == 4


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 1337, 4095])
def test_numbers_that_are_not_finite_are_refused_by_name(folder, stored, value, place):
    weight = load_file(folder / SINGLE)[Q_PROJ].to(stored)
    change(folder, **{Q_PROJ: weight})
    Checkpoint(folder).tensor([Q_PROJ], torch.float32)
    weight.view(-1)[place] = value
    change(folder, **{Q_PROJ: weight})
    with pytest.raises(CheckpointError, match="not finite") as error:
        Checkpoint(folder).tensor([Q_PROJ], torch.float32)
    assert f"{folder / SINGLE}: tensor {Q_PROJ}" in str(error.value)


def test_numbers_that_the_computed_dtype_cannot_hold_are_refused(folder):
    weight = load_file(folder / SINGLE)[Q_PROJ]
    weight[3, 3] = 3.4e38
    change(folder, **{Q_PROJ: weight})
    Checkpoint(folder).tensor([Q_PROJ], torch.float32)
    with pytest.raises(CheckpointError, match="bfloat16 cannot hold"):
        Checkpoint(folder).tensor([Q_PROJ], torch.bfloat16)
