"""Every benchmark has a smoke run, which writes its results into a temporary folder. See runs.py."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import options
from benchmarks.engines import peers_speculation
from benchmarks.kernels import mixture
from benchmarks.overhead import fleet_scale
from benchmarks.papers import streaming, streaming_evictions
from benchmarks.robustness import quota
from benchmarks.robustness.hostile import server
from streamserve import embedded
from tests.benchmarks.conftest import Smoke
from tests.benchmarks.smoke.runs import COMMAND_LINE_ONLY, IN_PROCESS, LONG, WITH_NAMESPACES
from tests.conftest import Scale
from tests.extras.cluster.namespaces import why_no_wire, why_not_permitted


def check(smoke: Smoke, command: str, begins: str) -> None:
    name, _, arguments = command.format(model=embedded.path("embedded")).partition(" ")
    written = smoke(importlib.import_module(name), arguments)
    assert any(name.startswith(begins) for name in written), written


@pytest.mark.parametrize("command", IN_PROCESS)
def test_a_smoke_run_in_this_process(smoke: Smoke, command: str) -> None:
    check(smoke, command, IN_PROCESS[command])


@pytest.mark.parametrize("command", LONG)
def test_a_long_smoke_run(smoke: Smoke, scale: Scale, command: str) -> None:
    if not scale.full:
        pytest.skip("with --full: takes many seconds")
    check(smoke, command, LONG[command])


@pytest.mark.parametrize("command", WITH_NAMESPACES)
def test_a_smoke_run_on_machines(smoke: Smoke, scale: Scale, command: str) -> None:
    if not scale.full:
        pytest.skip("with --full: starts servers on several machines")
    if reason := why_not_permitted() or why_no_wire():
        pytest.skip(reason)
    check(smoke, command, WITH_NAMESPACES[command])


def test_a_smoke_run_under_a_quota(smoke: Smoke, scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full: starts workers")
    if not os.access("/sys/fs/cgroup", os.W_OK):
        pytest.skip("control groups cannot be made here")
    assert "quota.json" in smoke(quota, "--model embedded")


def test_prompt_streams_against_a_server(smoke: Smoke, scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full: starts a server")
    flags = ["--draft", "none", "--num-blocks", "300", "--max-model-len", "4096", "--swap-space", "0.2"]
    with server(*flags) as (_, target):
        url = f"http://{target.host}:{target.port}"
        assert "streaming-live-evictions.json" in smoke(streaming_evictions, url)
        assert "streaming-live-append.json" in smoke(streaming, f"--live {url} --scale 0.01")


def test_a_mixture_is_written(smoke: Smoke) -> None:
    """A mixture's file is written. Comparing it with llama.cpp is not tested, as that needs llama.cpp."""
    smoke(mixture, "write")
    assert list(options.results_folder().rglob("1-layers/model.gguf"))


def test_a_comparison_of_speculation_is_reported(smoke: Smoke, tmp_path: Path) -> None:
    """Records of engines' speculation are reported. Measuring is not tested, as it needs the other
    engines."""
    rounds = [
        {"slice": "a", "round": 0, "streams": 1, "engine": engine, "seconds": seconds, "tokens": 10}
        for engine, seconds in (("streamserve", 1.0), ("vllm", 2.0))
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, rounds)))
    arguments = f"--folder {tmp_path} --kept {tmp_path}/rounds.jsonl"
    assert "peers_speculation.json" in smoke(peers_speculation, arguments)
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


def test_options_of_a_smoke_run_take_precedence_over_its_smallest_counts(smoke: Smoke) -> None:
    smoke(fleet_scale, "--streams 30")
    written = json.loads((options.results_folder() / "fleet_scale.json").read_text())
    assert written["settings"] == {"workers": 4, "streams": 30, "seed": 1}
