"""Weights that workers share have the bits of private weights, are written once and sealed, and are never
read incomplete."""

import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streamserve.contracts.plan import Span
from streamserve.execution.backends.native.library import kernels
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.weight_arena import HEADER_BYTES, WeightArena
from streamserve.execution.loading.load import load, make_attention
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.config import ModelConfig
from tests.checkpoints import make_checkpoint
from tests.execution.backends.native.forwarding import forward
from tests.execution.variants import TEXT

pytestmark = pytest.mark.skipif(kernels() is None, reason="the kernels are not available")

MODELS = [
    ({"architecture": "llama", "dtype": "bfloat16"}, {}),
    ({"architecture": "qwen2", "dtype": "float32", "tie_word_embeddings": True}, {}),
    ({"architecture": "qwen3", "dtype": "bfloat16"}, {"quantization": "int8"}),
    (
        {"architecture": "llama", "dtype": "bfloat16", "tie_word_embeddings": True},
        {"quantization": "int4:32"},
    ),
    ({"architecture": "mixtral", "dtype": "bfloat16"}, {}),
]


@pytest.fixture
def descriptors() -> Iterator[tuple[int, int]]:
    """Return the files that a server makes for its workers."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    files = os.memfd_create("target", flags), os.memfd_create("draft", flags)
    yield files
    for file in files:
        os.close(file)


def config(folder: Path, **settings: object) -> ModelConfig:
    return ModelConfig(**{"path": str(folder), "threads": 1, "num_blocks": 20, "max_num_seqs": 4, **settings})


def assert_same(shared: Loaded, private: Loaded) -> None:
    """Assert that both weights compute the same bits."""
    assert torch.equal(logits(shared), logits(private))


def logits(loaded: Loaded) -> torch.Tensor:
    """Return the logits of a text."""
    attention = make_attention(loaded.cache, loaded.model.spec, loaded.pool)
    blocks = list(range(loaded.cache.num_blocks))
    return forward(loaded.model, attention, [Span(0, 0, TEXT[0].tolist(), blocks)])


@pytest.mark.parametrize(("model", "settings"), MODELS, ids=lambda value: str(value))
def test_shared_weights_compute_the_same_bits(
    tmp_path: Path, descriptors: tuple[int, int], model: dict[str, str], settings: dict[str, object]
) -> None:
    folder = make_checkpoint(tmp_path, hidden_size=64, **model)
    private = load(config(folder, **settings))
    first = load(config(folder, **settings), weights=descriptors)
    assert WeightArena(descriptors[0]).sealed
    written = WeightArena(descriptors[0]).resident_bytes
    second = load(config(folder, **settings), weights=descriptors)
    assert WeightArena(descriptors[0]).resident_bytes == written >= private.model_info.weight_bytes
    assert not private.weights_shared
    for loaded in (first, second):
        assert loaded.weights_shared
        assert_same(loaded, private)
    assert _address(first) != _address(second), "each process has mapped the file"


def test_a_draft_model_is_shared_too(tmp_path: Path, descriptors: tuple[int, int]) -> None:
    target = make_checkpoint(tmp_path / "target", dtype="bfloat16")
    draft = make_checkpoint(tmp_path / "draft", dtype="bfloat16", seed=1, num_hidden_layers=1)
    for _ in range(2):
        loaded = load(config(target, draft=str(draft)), weights=descriptors)
        assert loaded.drafter is not None
        assert all(WeightArena(descriptor).sealed for descriptor in descriptors)


def test_no_process_can_change_shared_weights(tmp_path: Path, descriptors: tuple[int, int]) -> None:
    load(config(make_checkpoint(tmp_path)), weights=descriptors)
    with pytest.raises(PermissionError):
        os.pwrite(descriptors[0], b"x", HEADER_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptors[0], 0)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptors[0], HEADER_BYTES)


def test_what_a_dead_worker_left_is_not_read(tmp_path: Path, descriptors: tuple[int, int]) -> None:
    """A file that a dead worker left incomplete is not read: it has no seal, and its lock is free."""
    folder = make_checkpoint(tmp_path, dtype="bfloat16")
    os.pwrite(descriptors[0], b"\\xff" * (64 << 20), 0)
    shared = load(config(folder), weights=descriptors)
    assert shared.weights_shared
    assert WeightArena(descriptors[0]).resident_bytes < 64 << 20
    assert_same(shared, load(config(folder)))


def test_weights_of_another_model_are_not_taken(
    tmp_path: Path, descriptors: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    first = make_checkpoint(tmp_path / "first", dtype="bfloat16")
    other = make_checkpoint(tmp_path / "other", dtype="bfloat16", seed=1)
    load(config(first), weights=descriptors)
    for settings in (
        {},
        {"path": str(first), "quantization": "int8"},
        {"path": str(first), "dtype": "float32"},
    ):
        loaded = load(config(other, **settings), weights=descriptors)
        assert not loaded.weights_shared
        assert_same(loaded, load(config(other, **settings)))
        assert "belong to another model" in caplog.text
        caplog.clear()


def test_one_process_writes_at_a_time(tmp_path: Path, descriptors: tuple[int, int]) -> None:
    """One process writes at a time. Others wait for its lock, and find the weights when it has ended."""
    arena = WeightArena(descriptors[0])
    script = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", script, str(descriptors[0])]
    with arena.locked():
        assert subprocess.run(command, pass_fds=descriptors[:1], capture_output=True, check=False).returncode
    subprocess.run(command, pass_fds=descriptors[:1], check=True)
    fcntl.lockf(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_weights_that_do_not_fit_are_private(
    tmp_path: Path,
    descriptors: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("streamserve.execution.loading.load_models.SPARE_BYTES", 1)
    monkeypatch.setattr("streamserve.execution.loading.load_models.PADDED", 0)
    loaded = load(config(make_checkpoint(tmp_path, vocab_size=20_000)), weights=descriptors)
    assert not loaded.weights_shared
    assert not WeightArena(descriptors[0]).resident_bytes
    assert "cannot be shared" in caplog.text


def _address(loaded: Loaded) -> int:
    qkv = loaded.model.layers[0].qkv
    assert isinstance(qkv, NativeLinear)
    return qkv.struct.weight
