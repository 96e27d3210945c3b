"""As long as there are no results from a GPU, serving on a GPU warns that this version has not run on one."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from streamserve.api.ops.models import card_of
from streamserve.cli.main import app
from streamserve.cli.run_server import _notice
from streamserve.execution.backends.cuda.device import NOT_YET_RUN, notice
from streamserve.protocol.messages import ModelInfo
from tests.gpu.check import environment, parts

MODEL = ModelInfo(
    architecture="LlamaForCausalLM", parameters=1, vocab_size=320, max_model_len=64, eos_token_ids=(3,),
    weight_bytes=4, dtype="bfloat16", row_invariant=False, fingerprint="0",
)  # fmt: skip
ROOT = Path(__file__).parent.parent


def card(info: Any) -> dict[str, Any]:
    llm: Any = SimpleNamespace(model=info, created=0, root="/", adapters={})
    return msgspec.to_builtins(card_of(llm, "m"))


def test_there_is_a_notice_of_models_that_are_divided_among_gpus() -> None:
    assert notice(torch.device("cuda", 0), 2) == NOT_YET_RUN
    assert notice(torch.device("cuda", 0)) == ""
    assert notice(torch.device("cpu"), 2) == ""


def test_clients_and_the_start_of_a_server_show_it() -> None:
    info = msgspec.structs.replace(MODEL, notice=NOT_YET_RUN)
    assert "has not yet run on GPUs" in card(info)["notice"]
    assert "has not yet run on GPUs" in _notice(info)
    assert "notice" not in card(MODEL)
    assert _notice(MODEL) == ""


def test_the_check_of_a_gpu_needs_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no CUDA device: --without-gpu runs the parts on the CPU" in done.stderr


def test_the_check_of_a_gpu_runs_files_that_exist() -> None:
    for part in parts(90, 2):
        assert all((ROOT / word).exists() for word in part.command if word.startswith("tests/"))
    assert environment(Path("/site"))["PYTHONPATH"].endswith("/site")


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "-tp"])
def test_the_degree_has_vllms_flags(flag: str) -> None:
    result = CliRunner().invoke(app, ["serve", "embedded", flag, "4", "--print-config"])
    assert result.exit_code == 0, result.output
    assert "tensor_parallel_size = 4" in result.output
