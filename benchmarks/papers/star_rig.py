"""Common parts of the draft service benchmarks: a running service, paced targets, and the evaluation of their
metrics.

The service is real: `streamserve draft`. The targets are real engines in separate processes, but *paced*:
their verification is a sleep, as this machine has no N accelerators; their texts are recorded from the
packaged model, and so is which draft tokens are accepted.
"""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamserve.draft_service.star import Star, progress

DEPTH = 4
WARM = 1.5
PROMPTS = (
    "What is 12 + 7?", "Write a function that returns the larger of two numbers.", "Who are you?",
    "Tom has 8 apples and buys 5 more. How many apples does he have?", "Count from 1 to 20.",
    "What is 48 + 27?", "Tell me a short story.", "Write a function that adds two numbers.",
)  # fmt: skip


def record(count: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and the packaged model's greedy answers of `count` tokens each."""
    from streamserve import LLM, SamplingParams

    measured = []
    with LLM("embedded", draft="none", log_level="error") as llm:
        prompts = [llm.render([{"role": "user", "content": text}]) for text in PROMPTS]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for output in llm.generate(prompts, params, use_tqdm=False):
            measured.append((list(output.prompt_token_ids), list(output.outputs[0].token_ids)))
    return measured


def inflate(model: str, out: Path, hidden: int, layers: int) -> Path:
    """Write a packaged model inflated to the cost of a larger one."""
    subprocess.run(
        [sys.executable, "-m", "streamserve", "models", "inflate", model, str(out),
         "--hidden", str(hidden), "--layers", str(layers)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return out


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Service:
    """A running `streamserve draft` with these `flags`, whose command begins with `prefix`. `metrics` is the
    HOST:PORT of its metrics as seen from here."""

    def __init__(
        self, model: Path, *flags: str, listen: str = "tcp://127.0.0.1:0", prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self._metrics = f"{host}:{free_port()}"
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "streamserve", "draft", str(model), "--listen", listen,
             "--threads", "1", "--num-blocks", "4096", "--metrics", self._metrics, "--log-level", "error",
             *flags],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.address = ""
        for line in self._process.stdout:  # the log names the metrics' address before this one
            if " --draft tcp://" in line:
                self.address = line.split(" --draft ")[1].strip()
                break
        assert self.address, "the service did not start"

    def figures(self) -> dict[str, float]:
        """Return all metrics by name."""
        lines = self.read(f"http://{self._metrics}/metrics").splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#") and "{" not in line]
        return {name.removeprefix("streamserve_draft:"): float(value) for name, _, value in pairs}

    def read(self, url: str) -> str:
        """Return the content at `url`."""
        with urllib.request.urlopen(url) as reply:
            text: str = reply.read().decode()
        return text

    def kill(self) -> None:
        """Kill the service abruptly, as a failure of its machine would."""
        self._process.kill()
        self._process.wait(20)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()


def one_at_a_time(model: Path, *flags: str) -> Service:
    """Return a service that drafts for one target at a time, without admission control."""
    return Service(model, "--max-batch", "1", "--no-admission", *flags)


def batching(model: Path, *flags: str) -> Service:
    """Return a service that drafts for up to 16 targets at a time, without admission control."""
    return Service(model, "--max-batch", "16", "--max-batch-ms", "1000", "--no-admission", *flags)


class Targets:
    """Paced targets, each a process that runs job after job. `prefixes` has the beginning of each process's
    command."""

    def __init__(self, count: int, prefixes: Sequence[Sequence[str]] = ((),)) -> None:
        self._processes = [
            subprocess.Popen(
                [*prefixes[number % len(prefixes)], sys.executable, "-m", "benchmarks.papers.star_target"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for number in range(count)
        ]  # fmt: skip

    def run(self, count: int, job: dict[str, Any]) -> list[dict[str, float]]:
        """Run this job on the first `count` targets at the same time."""
        chosen = self._processes[:count]
        for number, process in enumerate(chosen):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**job, "number": number}) + "\n")
            process.stdin.flush()
        measured = []
        for process in chosen:
            assert process.stdout is not None
            measured.append(json.loads(process.stdout.readline()))
        return measured

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(20)
            process.stdout.close()


def measure(
    targets: Targets, service: Service, count: int, job: dict[str, Any], address: str = ""
) -> dict[str, Any]:
    """Measure N targets on a service; return the targets' results, and the service's metrics of the same
    interval."""
    job = {**job, "endpoint": address or service.address}
    samples: list[dict[str, float]] = []

    def sample() -> None:
        for pause in (job["warm"] + 0.7, job["seconds"] - 0.9):
            time.sleep(pause)
            samples.append(service.figures())

    watcher = threading.Thread(target=sample)
    watcher.start()
    measured = targets.run(count, job)
    watcher.join()
    return summary(count, measured, *samples)


def summary(
    count: int, measured: list[dict[str, float]], before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    """Return the differences of the service's sums, and the model's prediction from the means of the same
    interval."""
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    requests, passes = max(change["requests_total"], 1), max(change["passes_total"], 1)
    rounds, batches = max(change["rounds_total"], 1), max(change["batches_total"], 1)
    t_s = change["pass_seconds_total"] / passes
    batch_seconds = change["busy_seconds_total"] / batches
    batch = requests / batches
    return_seconds = change["away_seconds_total"] / max(change["returns_total"], 1)
    star = Star(batch_seconds, return_seconds, max(1, round(batch)), batch_seconds)
    beta = change["accepted_total"] / max(change["draft_tokens_total"], 1)
    speeds = [one["tokens_per_second"] for one in measured]
    # Reports come twice a second, so their interval is not exactly the measured one.
    clock = max(change["at"], 1e-9)
    return {
        "targets": count,
        "tokens_per_second": sum(speeds),
        "per_target": speeds,
        "rounds_per_second": sum(one["rounds_per_second"] for one in measured) / count,
        "service_requests_per_second": requests / clock,
        "accepted_per_tree": sum(one["accepted_per_tree"] for one in measured) / count,
        "share_with_trees": sum(one["share_with_trees"] for one in measured) / count,
        "t_s": t_s,
        "t_s_variance": max(0.0, change["pass_squares_total"] / passes - t_s * t_s),
        "S": batch_seconds,
        "batch": batch,
        "Z": return_seconds,
        "t_v": after["verify_seconds"],
        "t_c": after["communication_seconds"],
        "beta": beta,
        "T_wait": change["waited_seconds_total"] / requests,
        "T_idle_per_request": change["idle_seconds_total"] / requests,
        "T_idle_per_round": change["idle_seconds_total"] / rounds * count,
        "round": change["round_seconds_total"] / rounds,
        "load": change["busy_seconds_total"] / clock,
        "not_idle": 1.0 - change["idle_seconds_total"] / clock,
        "warm_passes_per_second": change["warm_passes_total"] / clock,
        "predicted_round": star.round(count),
        "predicted_idle_per_round": star.idle(count),
        "predicted_load": star.load(count),
        "predicted_N_full": star.n_full,
        "predicted_tokens_per_second": count * progress(beta, DEPTH) / star.round(count),
        "wrong_texts": sum(one["wrong_texts"] for one in measured),
    }


def make_job(model: Path, seconds: float, outputs: int) -> dict[str, Any]:
    """Return the job of paced targets, without its verification time and endpoint."""
    from streamserve.execution.drafters.fingerprints import fingerprints

    tokenizer, vocabulary = fingerprints(model, 4096)
    return {
        "texts": record(outputs), "tokenizer": tokenizer, "vocabulary": vocabulary, "vocab_size": 4096,
        "policy": f"fixed:{DEPTH}", "seconds": seconds, "warm": WARM,
    }  # fmt: skip


def show(name: str, measured: dict[str, Any]) -> None:
    """Print one line of results."""
    print(
        f"{name} N={measured['targets']}: {measured['tokens_per_second']:.0f} tokens/s, "
        f"load {measured['load']:.1%} (predicted {measured['predicted_load']:.1%}), "
        f"S {measured['S'] * 1e3:.2f} ms, "
        f"Z {measured['Z'] * 1e3:.2f} ms, idle "
        f"a round {measured['T_idle_per_round'] * 1e3:.2f} ms (predicted "
        f"{measured['predicted_idle_per_round'] * 1e3:.2f}), batch {measured['batch']:.2f}",
        flush=True,
    )
