"""Smoke runs of benchmarks, in the test's process."""

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import options

Smoke = Callable[..., list[str]]
"""Runs a benchmark's module with `--smoke` and other arguments; returns the names of the files it wrote."""


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Smoke]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(options, "_scratch", [])
    monkeypatch.setenv("STREAMSERVE_PROFILE", "false")
    threads, before = torch.get_num_threads(), _result_files()

    def run(module: ModuleType, arguments: str = "") -> list[str]:
        monkeypatch.setattr(sys, "argv", [module.__name__, *shlex.split(arguments), "--smoke"])
        module.main()
        return sorted(file.name for file in options.results_folder().iterdir())

    yield run
    torch.set_num_threads(threads)
    assert _result_files() == before, "a smoke run changed benchmarks/results"


def _result_files() -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in options.RESULTS.iterdir()}
