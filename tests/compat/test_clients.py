"""Other people's clients, run unchanged, each from a venv of its own (`make verify` makes them)."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Served

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("COMPAT", HERE.parent.parent / "build" / "compat"))
TOKENIZER = HERE.parent.parent / "src" / "streamserve" / "embedded" / "target"
ANSWER = "12 + 7 = 19."


def run(client: str, program: str, *arguments: str) -> str:
    """What a program of this client's venv prints. It may reach no one but the server."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [str(CLIENTS / client / "bin" / program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_litellm(served: Served) -> None:
    told = json.loads(run("litellm", "python", str(HERE / "use_litellm.py"), served.url).splitlines()[-1])
    assert (told["whole"], told["streamed"]) == (ANSWER, ANSWER)
    assert told["prompt_tokens"] > 5


def test_langchain(served: Served) -> None:
    printed = run("langchain-openai", "python", str(HERE / "use_langchain.py"), served.url)
    told = json.loads(printed.splitlines()[-1])
    assert (told["whole"], told["streamed"]) == (ANSWER, ANSWER)
    assert told["tool"] == ["choose"]
    assert told["structured"] in ("red", "green")


@pytest.mark.parametrize("profile", ["kind=concurrent,streams=2", "kind=poisson,rate=4"])
def test_guidellm(served: Served, tmp_path: Path, profile: str, record: Callable[..., None]) -> None:
    path = tmp_path / "report.json"
    run(
        "guidellm",
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={served.url}"),
        *("--profile", profile, "--constraint", "kind=max_requests,count=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", f"kind=json,path={path}", "--disable-progress"),
    )
    (figures,) = json.loads(path.read_text())["benchmarks"]
    totals: dict[str, Any] = figures["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0)
    record(successful=totals["successful"])
