"""One draft model for N targets: throughput, waiting and idle time, load, and the model's prediction beside
them.

The service is real: `streamserve draft` with a draft model inflated so that drafting for one target takes
some milliseconds. The targets are real engines in processes of their own, but *paced*: their verification is
a sleep of so many times S that Z/S is 4, for this machine has no N accelerators. Their texts, and so what is
accepted, are recorded from the packaged model. One at a time and batched, N = 1 to 8; without a draft; with a
draft model of its own beside each target; and over a relay that delays every byte.

    python -m benchmarks.star --seconds 6
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, table, write
from streamserve.policy.star import Star, progress

RATIO = 4.0
DEPTH = 4
WARM = 1.5
PROMPTS = (
    "What is 12 + 7?", "Write a function that returns the larger of two numbers.", "Who are you?",
    "Tom has 8 apples and buys 5 more. How many apples does he have?", "Count from 1 to 20.",
    "What is 48 + 27?", "Tell me a short story.", "Write a function that adds two numbers.",
)  # fmt: skip


def record(count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and what the packaged model answers, greedily, `count` tokens each."""
    from streamserve import LLM, SamplingParams

    found = []
    with LLM("embedded", draft="none", log_level="error") as llm:
        prompts = [llm.render([{"role": "user", "content": text}]) for text in PROMPTS]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for output in llm.generate(prompts, params, use_tqdm=False):
            found.append((list(output.prompt_token_ids), list(output.outputs[0].token_ids)))
    return found


def inflate_draft(folder: Path, hidden: int, layers: int) -> Path:
    """The packaged draft at the cost of a larger one."""
    out = folder / "draft"
    subprocess.run(
        [sys.executable, "-m", "streamserve", "models", "inflate", "embedded-draft", str(out),
         "--hidden", str(hidden), "--layers", str(layers)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return out


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Service:
    """A running `streamserve draft`."""

    def __init__(self, model: Path, batch: int) -> None:
        self._metrics = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "streamserve", "draft", str(model), "--listen", "tcp://127.0.0.1:0",
             "--threads", "1", "--max-batch", str(batch), "--max-batch-ms", "1000", "--no-admission",
             "--num-blocks", "4096", "--metrics", f"127.0.0.1:{self._metrics}", "--log-level", "error"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.address = ""
        for line in self._process.stdout:  # the metrics' address comes before this one
            if " at tcp://" in line:
                self.address = line.split(" at ")[1].strip()
                break
        assert self.address, "the service did not start"

    def figures(self) -> dict[str, float]:
        """All metrics by name."""
        url = f"http://127.0.0.1:{self._metrics}/metrics"
        with urllib.request.urlopen(url) as reply:
            lines = reply.read().decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#") and "{" not in line]
        return {name.removeprefix("streamserve_draft:"): float(value) for name, _, value in pairs}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Targets:
    """Paced targets, each a process that does job after job."""

    def __init__(self, count: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.star_target"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(count)
        ]  # fmt: skip

    def run(self, count: int, job: dict[str, Any]) -> list[dict[str, float]]:
        """The first `count` do this job at the same time."""
        chosen = self._processes[:count]
        for number, process in enumerate(chosen):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**job, "number": number}) + "\n")
            process.stdin.flush()
        found = []
        for process in chosen:
            assert process.stdout is not None
            found.append(json.loads(process.stdout.readline()))
        return found

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(20)
            process.stdout.close()


class Relay(threading.Thread):
    """Carries bytes to `port` and back, each way `delay` seconds late, as a longer wire would."""

    def __init__(self, port: int, delay: float) -> None:
        super().__init__(daemon=True)
        self._to, self._delay = port, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._carry(one, other)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        held: list[tuple[float, bytes]] = []
        there = threading.Condition()

        def read() -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    with there:
                        held.append((time.monotonic() + self._delay, data))
                        there.notify()

        def write_late() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with there:
                        while not held:
                            there.wait()
                        due, data = held.pop(0)
                    time.sleep(max(0.0, due - time.monotonic()))
                    sink.sendall(data)

        for body in (read, write_late):
            threading.Thread(target=body, daemon=True).start()

    def close(self) -> None:
        self._listener.close()


def measure(
    targets: Targets, service: Service, count: int, job: dict[str, Any], address: str = ""
) -> dict[str, Any]:
    """N targets on a service: what they got, and what it measured of itself meanwhile."""
    job = {**job, "endpoint": address or service.address}
    samples: list[dict[str, float]] = []

    def sample() -> None:
        for pause in (WARM + 0.7, job["seconds"] - 0.9):
            time.sleep(pause)
            samples.append(service.figures())

    watcher = threading.Thread(target=sample)
    watcher.start()
    found = targets.run(count, job)
    watcher.join()
    return summary(count, found, *samples)


def summary(
    count: int, found: list[dict[str, float]], before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    """Differences of the service's sums, and the model with the means of the same time."""
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    requests, passes = max(change["requests_total"], 1), max(change["passes_total"], 1)
    rounds, batches = max(change["rounds_total"], 1), max(change["batches_total"], 1)
    t_s = change["pass_seconds_total"] / passes
    turn = change["busy_seconds_total"] / batches
    batch = requests / batches
    star = Star(turn, after["back_seconds"], max(1, round(batch)), turn)
    beta = change["accepted_total"] / max(change["guesses_total"], 1)
    speeds = [one["tokens_per_second"] for one in found]
    clock = max(change["at"], 1e-9)  # reports come twice a second: their span is not exactly ours
    return {
        "targets": count,
        "tokens_per_second": sum(speeds),
        "per_target": speeds,
        "rounds_per_second": sum(one["rounds_per_second"] for one in found) / count,
        "service_requests_per_second": requests / clock,
        "accepted_per_tree": sum(one["accepted_per_tree"] for one in found) / count,
        "share_with_trees": sum(one["share_with_trees"] for one in found) / count,
        "t_s": t_s,
        "t_s_variance": max(0.0, change["pass_squares_total"] / passes - t_s * t_s),
        "S": turn,
        "batch": batch,
        "Z": after["back_seconds"],
        "t_v": after["verify_seconds"],
        "t_c": after["communication_seconds"],
        "beta": beta,
        "T_wait": change["waited_seconds_total"] / requests,
        "T_idle_per_request": change["idle_seconds_total"] / requests,
        "T_idle_per_round": change["idle_seconds_total"] / rounds * count,
        "round": change["round_seconds_total"] / rounds,
        "load": change["busy_seconds_total"] / clock,
        "predicted_round": star.round(count),
        "predicted_idle_per_round": star.idle(count),
        "predicted_load": star.load(count),
        "predicted_N_full": star.full,
        "predicted_tokens_per_second": count * progress(beta, DEPTH) / star.round(count),
        "wrong_texts": sum(one["wrong_texts"] for one in found),
    }


def calibrate(targets: Targets, model: Path, job: dict[str, Any]) -> float:
    """The verification time for which Z is so many times S."""
    service = Service(model, 1)
    verify = 0.03
    for _ in range(3):
        found = measure(targets, service, 1, {**job, "verify": verify, "seconds": 3.0})
        verify += RATIO * found["S"] - found["Z"]
    service.close()
    return verify


def memory(budget: int = 1 << 26) -> dict[str, float]:
    """KV blocks of the packaged target in `budget` bytes, alone and with the packaged draft beside it, which
    takes weights and a plane of its own in every block: counted, not measured."""
    import torch

    from streamserve.embedded import path
    from streamserve.execution.kv_cache import bytes_per_block
    from streamserve.execution.spec import read_spec
    from streamserve.execution.weights import weight_bytes

    target, draft = read_spec(path("embedded")), read_spec(path("embedded-draft"))
    own = bytes_per_block(target, 16, torch.bfloat16)
    beside = bytes_per_block(draft, 16, torch.bfloat16)
    weights = weight_bytes(target, torch.bfloat16, False), weight_bytes(draft, torch.bfloat16, False)
    return {
        "budget_bytes": budget,
        "target_alone_blocks": (budget - weights[0]) // own,
        "target_with_draft_blocks": (budget - sum(weights)) // (own + beside),
    }


@contextlib.contextmanager
def services(model: Path, batch: int) -> Iterator[Service]:
    """A service for a while."""
    service = Service(model, batch)
    try:
        yield service
    finally:
        service.close()


def sweep(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and figures."""
    from streamserve.execution.drafters.fingerprints import fingerprints

    model = inflate_draft(folder, arguments.hidden, arguments.layers)
    texts = record(arguments.outputs)
    tokenizer, vocabulary = fingerprints(model, 4096)
    job: dict[str, Any] = {
        "texts": texts, "tokenizer": tokenizer, "vocabulary": vocabulary, "vocab_size": 4096,
        "policy": f"fixed:{DEPTH}", "seconds": arguments.seconds, "warm": WARM,
    }  # fmt: skip
    targets = Targets(max(*arguments.counts, *arguments.batched, 5))
    try:
        verify = calibrate(targets, model, job)
        job["verify"] = verify
        settings = {
            "targets": "paced: verification is slept, acceptance is that of the packaged pair",
            "draft": f"packaged draft inflated to {arguments.hidden} x {arguments.layers}, 1 thread",
            "depth": DEPTH, "verify_seconds": verify, "ratio_wanted": RATIO, "seconds": arguments.seconds,
            "network": "loopback; delays by a relay process",
        }  # fmt: skip
        figures: dict[str, Any] = {"one_at_a_time": [], "batched": [], "delayed": []}
        figures["without"] = targets.run(1, {**job, "endpoint": "", "policy": "off"})[0]
        figures["own_draft"] = targets.run(1, {**job, "endpoint": "", "draft": str(model)})[0]
        print("without", figures["without"], "with a draft of its own", figures["own_draft"], flush=True)
        for name, batch in (("one_at_a_time", 1), ("batched", 16)):
            for count in arguments.counts if batch == 1 else arguments.batched:
                with services(model, batch) as service:
                    figures[name].append(measure(targets, service, count, job))
                    show(name, figures[name][-1])
        for delay in arguments.delays:
            with services(model, 1) as service:
                relay = Relay(int(service.address.rpartition(":")[2]), delay)
                relay.start()
                for count in (1, 5):
                    found = measure(targets, service, count, job, relay.address)
                    figures["delayed"].append({"delay_each_way": delay, **found})
                    show(f"delayed by {delay * 1000:.0f} ms", found)
                relay.close()
        figures["memory"] = memory()
    finally:
        targets.close()
    return settings, figures


def show(name: str, found: dict[str, Any]) -> None:
    """A line as soon as there is something to tell."""
    print(
        f"{name} N={found['targets']}: {found['tokens_per_second']:.0f} tokens/s, load {found['load']:.1%} "
        f"(predicted {found['predicted_load']:.1%}), S {found['S'] * 1e3:.2f} ms, "
        f"Z {found['Z'] * 1e3:.2f} ms, idle "
        f"a round {found['T_idle_per_round'] * 1e3:.2f} ms (predicted "
        f"{found['predicted_idle_per_round'] * 1e3:.2f}), batch {found['batch']:.2f}",
        flush=True,
    )


def print_tables(figures: dict[str, Any]) -> None:
    """All that was measured, N by N."""
    alone = figures["without"]["tokens_per_second"]
    for name in ("one_at_a_time", "batched", "delayed"):
        rows = [
            [
                str(one["targets"])
                + (f", +{one['delay_each_way'] * 1e3:.0f} ms" if name == "delayed" else ""),
                f"{one['tokens_per_second']:.0f}",
                f"{min(one['per_target']):.1f}–{max(one['per_target']):.1f}",
                f"{one['t_s'] * 1e3:.2f} ({one['t_s_variance'] * 1e6:.3f})",
                f"{one['T_wait'] * 1e3:.2f}",
                f"{one['T_idle_per_round'] * 1e3:.2f} / {one['predicted_idle_per_round'] * 1e3:.2f}",
                f"{one['load']:.1%} / {one['predicted_load']:.1%}",
                f"{one['batch']:.2f}",
            ]
            for one in figures[name]
        ]
        columns = (
            "N", "tokens/s", "a target", "t_s ms (variance)", "T_wait ms", "T_idle a round / predicted",
            "load / predicted", "batch",
        )  # fmt: skip
        table(f"{name.replace('_', ' ')}; a target without a draft: {alone:.1f} tokens/s", columns, rows)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Throughput and load by N."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    for name, style in (("one_at_a_time", "o-"), ("batched", "s-")):
        counts = [one["targets"] for one in figures[name]]
        label = name.replace("_", " ")
        left.plot(counts, [one["tokens_per_second"] for one in figures[name]], style, label=label)
        means = [one["tokens_per_second"] / one["targets"] for one in figures[name]]
        middle.plot(counts, means, style, label=label)
        right.plot(counts, [one["load"] for one in figures[name]], style, label=f"{label}, measured")
        right.plot(
            counts, [one["predicted_load"] for one in figures[name]], "--", label=f"{label}, predicted"
        )
    middle.axhline(figures["without"]["tokens_per_second"], color="grey", label="without a draft")
    for axis, title in ((left, "tokens/s, all targets"), (middle, "tokens/s a target"), (right, "load")):
        axis.set(title=title, xlabel="paced targets", ylim=(0, None))
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--counts", type=int, nargs="*", default=list(range(1, 9)), help="N, one at a time")
    parser.add_argument("--batched", type=int, nargs="*", default=list(range(1, 9)), help="N, batched")
    parser.add_argument("--hidden", type=int, default=512, help="of the inflated draft")
    parser.add_argument("--layers", type=int, default=8, help="of the inflated draft")
    parser.add_argument("--outputs", type=int, default=200, help="tokens recorded of each text")
    parser.add_argument("--delays", type=float, nargs="*", default=[0.005], help="seconds each way")
    parser.add_argument("--out", default="star", help="name of the results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings, figures = sweep(arguments, Path(folder))
    print_tables(figures)
    print(write(arguments.out, settings, figures))
    plot(figures, RESULTS / f"{arguments.out}.png")


if __name__ == "__main__":
    main()
