"""Every benchmark has a smoke run, which writes its results into a temporary folder. See smoke_runs.py."""

import importlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import options
from streamserve import embedded
from tests.benchmarks.smoke_runs import COMMAND_LINE_ONLY, IN_PROCESS, LONG, WITH_NAMESPACES
from tests.cluster.namespaces import why_no_wire, why_not_permitted
from tests.conftest import Scale

Run = Callable[[str], list[str]]
"""Runs a benchmark's command line with `--smoke`; returns the names of the files that it wrote."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(options, "_scratch", [])
    monkeypatch.setenv("STREAMSERVE_PROFILE", "false")
    threads, before = torch.get_num_threads(), result_files()

    def run(command: str) -> list[str]:
        name, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--smoke"])
        importlib.import_module(name).main()
        return sorted(file.name for file in options.results_folder().iterdir())

    yield run
    torch.set_num_threads(threads)
    assert result_files() == before, "a smoke run changed benchmarks/results"


def result_files() -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in options.RESULTS.iterdir()}


def check(run: Run, command: str, begins: str) -> None:
    written = run(command.format(model=embedded.path("embedded")))
    assert any(name.startswith(begins) for name in written), written


@pytest.mark.parametrize("command", IN_PROCESS)
def test_a_smoke_run_in_this_process(run: Run, command: str) -> None:
    check(run, command, IN_PROCESS[command])


@pytest.mark.parametrize("command", LONG)
def test_a_long_smoke_run(run: Run, scale: Scale, command: str) -> None:
    if not scale.full:
        pytest.skip("with --full: takes many seconds")
    check(run, command, LONG[command])


@pytest.mark.parametrize("command", WITH_NAMESPACES)
def test_a_smoke_run_on_machines(run: Run, scale: Scale, command: str) -> None:
    if not scale.full:
        pytest.skip("with --full: starts servers on several machines")
    if reason := why_not_permitted() or why_no_wire():
        pytest.skip(reason)
    check(run, command, WITH_NAMESPACES[command])


def test_a_smoke_run_under_a_quota(run: Run, scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full: starts workers")
    if not os.access("/sys/fs/cgroup", os.W_OK):
        pytest.skip("control groups cannot be made here")
    check(run, "benchmarks.robustness.quota --model embedded", "quota.json")


def test_a_mixture_is_written(run: Run, tmp_path: Path) -> None:
    """Comparing it with llama.cpp needs llama.cpp."""
    run("benchmarks.kernels.mixture write")
    assert list(options.results_folder().rglob("1-layers/model.gguf"))


def test_a_comparison_of_speculation_is_reported(run: Run, tmp_path: Path) -> None:
    """Measuring it needs the other engines."""
    rounds = [
        {"slice": "a", "round": 0, "streams": 1, "engine": engine, "seconds": seconds, "tokens": 10}
        for engine, seconds in (("streamserve", 1.0), ("vllm", 2.0))
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, rounds)))
    command = f"benchmarks.engines.peers_speculation --folder {tmp_path} --kept {tmp_path}/rounds.jsonl"
    assert "peers_speculation.json" in run(command)
    written = json.loads((options.results_folder() / "peers_speculation.json").read_text())
    assert written["figures"]["streams"]["1"]["best_peer"] == "vllm"


@pytest.mark.parametrize("name", COMMAND_LINE_ONLY)
def test_a_command_line_is_parsed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    for arguments, status in ((["--help"], 0), (["--no-such-option"], 2)):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == status
    assert "usage:" in capsys.readouterr().out


def test_options_of_a_smoke_run_take_precedence_over_its_smallest_counts(run: Run) -> None:
    run("benchmarks.overhead.fleet_scale --streams 30")
    written = json.loads((options.results_folder() / "fleet_scale.json").read_text())
    assert written["settings"] == {"workers": 4, "streams": 30, "seed": 1}
