"""A small hub with one Llama in shards, and `streamserve models` as a process that uses it."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import command_server
from tests.checkpoints import make_checkpoint
from tests.ggufs import write_gguf
from tests.hub.server import FakeHub, Repository, folder_content, serving

Run = Callable[..., subprocess.CompletedProcess[str]]
TOKEN = "hf_secret0123456789"
NOT_LOADED = (
    "pytorch_model.bin", "onnx/model.onnx", "original/consolidated.00.pth", "consolidated.safetensors",
    "README.md", "LICENSE.txt",
)  # fmt: skip
"""Files of repositories that loading a model does not need."""


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a repository: a model in shards, and files that are not loaded."""
    folder = make_checkpoint(tmp_path_factory.mktemp("llama"), max_shard_size="200KB")
    files = folder_content(folder)
    assert sum(name.endswith(".safetensors") for name in files) > 1
    others = (
        "pytorch_model.bin",
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        "README.md",
        "LICENSE.txt",
    )
    return files | dict.fromkeys([*others, "consolidated.safetensors"], b"not loaded")


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    source = make_checkpoint(tmp_path_factory.mktemp("source"), num_hidden_layers=1)
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(source, file)
    return file.read_bytes()


@pytest.fixture
def hub(llama: dict[str, bytes], gguf: bytes) -> Iterator[FakeHub]:
    small = {"config.json": llama["config.json"], "model.safetensors": b"x" * 1000}
    quantized = {
        "tiny-Q8_0.gguf": gguf, "tiny-Q4_K_M.gguf": gguf, "mmproj-F16.gguf": b"x", "imatrix.gguf": b"x",
        "BF16/tiny-BF16-00001-of-00002.gguf": b"1" * 100, "BF16/tiny-BF16-00002-of-00002.gguf": b"2" * 100,
    }  # fmt: skip
    repositories = {
        "tests/llama": Repository({"main": llama, "v1": small}),
        "tests/gguf": Repository({"main": quantized}),
        "tests/torch": Repository({"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}}),
        "tests/gated": Repository({"main": small}, TOKEN, gated=True),
        "tests/private": Repository({"main": small}, TOKEN),
    }
    with serving(FakeHub(repositories)) as hub:
        yield hub


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process that uses the small hub and an empty cache."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "STREAMSERVE"))
    }
    return inherited | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "COLUMNS": "200"}


@pytest.fixture
def models(environment: dict[str, str]) -> Run:
    """Return a function that runs `streamserve models` with arguments, and variables as keywords."""

    def run(*arguments: str, input: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        # Commands that list or show a model import torch.
        kind: command_server.Kind = "torch" if arguments[0] in ("list", "show") else "commands"
        return command_server.run(["models", *arguments], input=input, env=environment | variables, kind=kind)

    return run
