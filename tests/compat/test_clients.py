"""Third-party clients work unchanged, each in a separate venv (created by `make verify`)."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compat.tool_tasks import ENOUGH
from tests.serving import Served

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("COMPAT", HERE.parent.parent / "build" / "compat"))
TOKENIZER = HERE.parent.parent / "src" / "streamserve" / "embedded" / "target"
ANSWER = "12 + 7 = 19."


def run(client: str, program: str, *arguments: str) -> str:
    """Run a program in a client's venv and return its output. The program may only connect to the server."""
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
    result = json.loads(run("litellm", "python", str(HERE / "use_litellm.py"), served.url).splitlines()[-1])
    assert (result["whole"], result["streamed"]) == (ANSWER, ANSWER)
    assert result["prompt_tokens"] > 5


def test_langchain(served: Served, record: Callable[..., None]) -> None:
    printed = run("langchain-openai", "python", str(HERE / "use_langchain.py"), served.url)
    result = json.loads(printed.splitlines()[-1])
    assert (result["whole"], result["streamed"]) == (ANSWER, ANSWER)
    assert result["tool"] == ["choose"]
    assert result["structured"] in ("red", "green")
    assert sum(result["loops"]) >= ENOUGH
    record(tool_loops=len(result["loops"]), right=sum(result["loops"]))


def test_ollama(served: Served, record: Callable[..., None]) -> None:
    printed = run("ollama", "python", str(HERE / "use_ollama.py"), served.url)
    result = json.loads(printed.splitlines()[-1])
    assert {result[name] for name in ("whole", "streamed", "generated", "asynchronous")} == {ANSWER}
    assert result["models"] == ["small:latest"]
    assert "tools" in result["capabilities"]
    assert result["format"] in ("red", "green")
    assert result["tokens"] > 5
    assert min(result["durations"]) > 0
    assert [status for status, _ in result["errors"]] == [404, 404, 400, 400]
    assert "streamserve models pull" in result["errors"][0][1]
    assert sum(result["loops"]) >= ENOUGH
    record(tool_loops=len(result["loops"]), right=sum(result["loops"]))


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
