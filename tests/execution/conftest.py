"""Tests use one thread (other processes share the machine), and small checkpoints that a whole run shares."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamserve.execution.backends.native.library import Path as KernelPath
from streamserve.execution.backends.native.library import ThreadPool
from tests.checkpoints import make_checkpoint
from tests.execution.backends.native.paths import EVERY_PATH, name_of, repeated
from tests.execution.storing import CASES, SIZES, write
from tests.processor import note


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function like `make_checkpoint` that shares one folder for equal arguments. Tests must not
    change it."""
    folders: dict[str, Path] = {}

    def make(architecture: str = "llama", dtype: str = "float32", **overrides: object) -> Path:
        key = repr((architecture, dtype, sorted(overrides.items(), key=str)))
        if key not in folders:
            folders[key] = make_checkpoint(
                tmp_path_factory.mktemp(architecture), architecture, dtype, **overrides
            )
        return folders[key]

    return make


@pytest.fixture(scope="session")
def stored(
    shared_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function for the folder of a case of storing.py, written once. Tests must not change it."""
    folders: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in folders:
            source = shared_checkpoint("llama", "float16", **SIZES)
            folders[case] = write(source, tmp_path_factory.mktemp("stored") / "folder", *CASES[case])
        return folders[case]

    return make


@pytest.fixture
def available(request: pytest.FixtureRequest) -> Callable[[ThreadPool, torch.dtype], list[KernelPath]]:
    """Return the paths that a pool's library has for a number format; missing paths are recorded."""

    def paths(pool: ThreadPool, dtype: torch.dtype) -> list[KernelPath]:
        every = [path for path, numbers in EVERY_PATH if numbers == dtype]
        for path in every:
            if not pool.supports(path, dtype) and not repeated(request.node):
                note(request.node, name_of(path, dtype))
        return [path for path in every if pool.supports(path, dtype)]

    return paths
