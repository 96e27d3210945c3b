"""`streamserve bench serve` works for users, against a real server."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamserve.cli.main import app
from streamserve.extras.bench.command import saved_settings
from streamserve.extras.bench.options import (
    BenchOptions,
    LoadOptions,
    ReportOptions,
    ServerOptions,
    WorkloadOptions,
)
from tests.checkpoints import make_checkpoint
from tests.extras.bench.fake import answering, streaming
from tests.serving import Served, serving

SMALL = ("--num-prompts", "8", "--random-input-len", "12", "--random-output-len", "6", "--ignore-eos")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"))
    with serving(str(folder), "--threads", "1", "--served-model-name", "tiny") as running:
        yield running


def bench(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamserve", "bench", "serve", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


def figure(text: str, label: str) -> float:
    match = re.search(rf"^{re.escape(label)}\s+(\S+)", text, re.MULTILINE)
    assert match, text
    return float(match[1])


def test_completions_of_random_tokens(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    flags = ("--max-concurrency", "3", "--random-vocab-size", "300", "--save-result", str(path))
    done = bench("--base-url", served.url, *SMALL, *flags, "--goodput", "ttft:60000", "tpot:60000")
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout, "Successful requests:") == 8
    assert figure(done.stdout, "Total input tokens:") == 8 * 12
    assert figure(done.stdout, "Total generated tokens:") == 8 * 6
    assert figure(done.stdout, "Peak concurrent requests:") == 3
    throughput = figure(done.stdout, "Request throughput (req/s):")
    assert figure(done.stdout, "Request goodput (req/s):") == throughput > 0
    ttft, tpot, itl, whole = (
        figure(done.stdout, f"Mean {metric} (ms):") for metric in ("TTFT", "TPOT", "ITL", "E2EL")
    )
    assert ttft > 0
    assert itl >= 0, "a client that waits for a CPU core receives all tokens at once"
    assert whole == pytest.approx(ttft + 5 * tpot, abs=0.05)
    report = json.loads(path.read_text())
    assert report["settings"]["model"] == "tiny"
    assert len(report["requests"]) == 8
    assert path.with_suffix(".png").exists()


def test_chats_at_a_rate(served: Served) -> None:
    done = bench("--base-url", f"{served.url}/v1", *SMALL, "--endpoint", "chat", "--request-rate", "40")
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout, "Successful requests:") == 8
    assert figure(done.stdout, "Total generated tokens:") == 8 * 6
    assert figure(done.stdout, "Request rate configured (RPS):") == 40


def test_prompts_of_a_file_at_the_times_of_a_trace(served: Served, tmp_path: Path) -> None:
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "trace"
    prompts.write_text('{"prompt": "the quick", "output_tokens": 3}\n{"prompt": [5, 6]}\n')
    trace.write_text("7.0\n7.4\n")
    flags = ("--dataset", "jsonl", "--dataset-path", str(prompts), "--output-len", "4", "--ignore-eos")
    done = bench("--base-url", served.url, "--num-prompts", "2", *flags, "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout, "Total generated tokens:") == 7
    assert figure(done.stdout, "Benchmark duration (s):") >= 0.4


def test_refusals_of_the_server_are_shown(served: Served) -> None:
    done = bench("--base-url", served.url, *SMALL, "--model", "none")
    assert done.returncode == 1
    assert figure(done.stdout, "Failed requests:") == 8
    assert "8 failed with: 404" in done.stdout


def test_ctrl_c_prints_the_results_so_far() -> None:
    """Ctrl-C prints the results so far: four requests run at a time; the first replies end, the others hang
    until the interrupt."""
    usage = b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n'
    quick, hanging = streaming(usage, b"data: [DONE]\n\n"), streaming(usage, 60.0)
    counter = iter(range(100))

    async def handle(request):  # type: ignore[no-untyped-def]
        number = next(counter)
        if number == 5:
            process.send_signal(signal.SIGINT)
        return await (quick if number < 2 else hanging)(request)

    with answering(handle) as url:
        command = [sys.executable, "-m", "streamserve", "bench", "serve", "--base-url", url, "--model", "a"]
        process = subprocess.Popen(
            [*command, *SMALL, "--max-concurrency", "4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert figure(stdout, "Successful requests:") == 2
    assert figure(stdout, "Interrupted requests:") == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--base-url", "http://127.0.0.1:1"), "cannot reach a server at http://127.0.0.1:1"),
        (("--dataset", "sharegpt"), "--dataset sharegpt needs --dataset-path"),
        (("--goodput", "speed:3"), "goodput target 'speed:3'"),
        (("--percentile-metrics", "speed"), "no metric 'speed'"),
        (("--request-rate", "0"), "must be positive, or inf"),
        (("--trace", "/none", "--request-rate", "3"), "--trace sets the arrival times"),
        (("--model", "a", "--extra-body", "[]"), "--extra-body must be a JSON object"),
        (("--num-prompts", "0"), "num_prompts = 0: must be a whole number of at least 1"),
        (("--endpoint", "chats"), "endpoint = 'chats': must be one of completions, chat"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(flags: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "serve", *flags])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_saved_settings_have_no_api_key() -> None:
    server = ServerOptions(api_key="secret")
    options = BenchOptions(server, WorkloadOptions(seed=3), LoadOptions(), ReportOptions(goodput=("ttft:5",)))
    saved = saved_settings(options, "tiny")
    assert (saved["model"], saved["seed"], saved["request_rate"], saved["goodput"]) == (
        "tiny", 3, "inf", ("ttft:5",),
    )  # fmt: skip
    assert "secret" not in repr(saved)


def test_a_missing_client_library_is_reported_with_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError(name='aiohttp')")
    done = bench("--model", "a", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip install 'streamserve[bench]'" in done.stderr
