"""Speculation against plain decoding: families of tasks, streams at once, settings, greedy and sampled.

One engine, one set of weights; only the policy differs; rounds are interleaved. The target is the packaged
model inflated to about 345 M parameters, so that a step costs what such a model's does, and the draft is the
packaged one. Every text is compared with the plain one.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --concurrency 1 8 --settings off goodput fixed:4 --rounds 3
"""

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.report import RESULTS, table, write
from streamserve import embedded
from streamserve.checkpoints import packaged_draft
from streamserve.engine.engine import Engine
from streamserve.engine.speculation import Speculation, guessed_cost
from streamserve.execution.inflate import Shape, inflate
from streamserve.execution.load import load
from streamserve.policy.speculation import parse_policy
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Submit, Token
from streamserve.protocol.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from embedded_data import FAMILIES

SHAPE = Shape(hidden=1024, layers=24)
TASKS = ("instructions", "arithmetic", "functions", "articles")
SETTINGS = (
    "off", "goodput", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:5", "fixed:6", "fixed:8",
    "fixed-tree:2x3", "fixed-tree:3x4",
)  # fmt: skip
CONCURRENCY = (1, 4, 8, 16, 32, 64)
MAX_TOKENS = 64


@dataclass
class Run:
    """What one setting did in one round."""

    seconds: float
    tokens: int
    steps: int
    texts: dict[str, list[int]]


def prompts(family: str, count: int, seed: int, split: Any) -> list[list[int]]:
    """Token ids of the first question of `count` chats."""
    folder = embedded.path("embedded")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng, found = random.Random(seed), []
    while len(found) < count:
        messages, _, _ = FAMILIES[family](rng, split).replies()[0]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        found.append(tokenizer.encode(text + "<|im_start|>assistant\n").ids)
    return found


class Bench:
    """One loaded pair, and a speculation for each setting, which keeps what it learned over the rounds."""

    def __init__(self, target: Path, draft: str, settings: Sequence[str]) -> None:
        if draft == "auto":
            draft = str(packaged_draft(target) or "none")
        self.loaded = load(
            ModelConfig(path=str(target), draft=draft, num_blocks=8192, max_num_seqs=64, max_model_len=2048)
        )
        self.speculations = {name: Speculation(parse_policy(name), guessed_cost) for name in settings}

    def run(self, setting: str, asked: Sequence[list[int]], temperature: float, streams: int) -> Run:
        """All prompts, `streams` at a time, in a fresh engine; the prefix index starts empty."""
        loaded = self.loaded
        engine = Engine(
            loaded.engine_config, loaded.model_info, loaded.executor, time.perf_counter,
            loaded.drafter, self.speculations[setting],
        )  # fmt: skip
        texts: dict[str, list[int]] = defaultdict(list)
        waiting, active, started = list(enumerate(asked)), 0, time.perf_counter()
        while waiting or engine.has_work:
            while waiting and active < streams:
                number, prompt = waiting.pop(0)
                params = SamplingParams(temperature=temperature, seed=number, max_tokens=MAX_TOKENS)
                engine.handle(Submit(str(number), 0, prompt, params, {0: []}, float(number)))
                active += 1
            for event in engine.step():
                if isinstance(event, Token):
                    texts[event.request].append(event.token)
                    active -= event.finish is not None
        seconds = time.perf_counter() - started
        return Run(seconds, sum(map(len, texts.values())), engine.scheduler.steps, dict(texts))


def measure(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each family, temperature and number of streams."""
    records = []
    grid = [(f, t, c) for t in args.temperature for c in args.concurrency for f in args.families]
    for family, temperature, streams in track(grid, description="measuring"):
        asked = prompts(family, max(args.requests, 2 * streams), args.seed, args.split)
        for setting in args.settings:  # caches, and what a policy learns from its first requests
            bench.run(setting, asked[: 2 * streams], temperature, streams)
        rates: dict[str, list[float]] = defaultdict(list)
        per_step: dict[str, float] = {}
        differing = 0
        for number in range(args.rounds):
            order = list(args.settings)
            random.Random(number).shuffle(order)
            runs = {setting: bench.run(setting, asked, temperature, streams) for setting in order}
            for setting, run in runs.items():
                rates[setting].append(run.tokens / run.seconds)
                per_step[setting] = run.tokens / run.steps
                differing += sum(run.texts[key] != text for key, text in runs["off"].texts.items())
        ratios = {
            setting: float(np.median(np.array(found) / np.array(rates["off"])))
            for setting, found in rates.items()
        }
        records.append(
            {
                "family": family, "temperature": temperature, "streams": streams,
                "tokens_per_second": {s: float(np.median(r)) for s, r in rates.items()},
                "tokens_per_step": per_step, "ratio": ratios, "texts_that_differ": differing,
            }
        )  # fmt: skip
    return records


def show(records: list[dict[str, Any]], settings: Sequence[str]) -> None:
    """Print speeds relative to plain decoding, and the geometric means over the families."""
    rows = []
    for record in records:
        cells = [f"{record['ratio'][setting]:.2f}" for setting in settings]
        rows.append(
            [f"{record['family']} T={record['temperature']:g}", str(record["streams"]),
             f"{record['tokens_per_second']['off']:.0f}", *cells, str(record["texts_that_differ"])]
        )  # fmt: skip
    for key in sorted({(r["temperature"], r["streams"]) for r in records}):
        group = [r for r in records if (r["temperature"], r["streams"]) == key]
        means = [np.exp(np.mean([np.log(r["ratio"][setting]) for r in group])) for setting in settings]
        rows.append([f"mean T={key[0]:g}", str(key[1]), "", *(f"{mean:.2f}" for mean in means), ""])
    table(
        "Tokens a second, as a multiple of plain decoding",
        ["family", "streams", "plain tok/s", *settings, "texts differ"],
        rows,
    )


def plot(records: list[dict[str, Any]], settings: Sequence[str]) -> None:
    """Geometric mean over the families against the number of streams, a panel a temperature."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    temperatures = sorted({record["temperature"] for record in records})
    figure, panels = plt.subplots(1, len(temperatures), figsize=(6 * len(temperatures), 4), squeeze=False)
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        streams = sorted({r["streams"] for r in records if r["temperature"] == temperature})
        for setting in settings:
            means = [
                np.exp(np.mean([
                    np.log(r["ratio"][setting]) for r in records
                    if (r["temperature"], r["streams"]) == (temperature, count)
                ]))
                for count in streams
            ]  # fmt: skip
            panel.plot(streams, means, marker="o", label=setting, linewidth=3 if setting == "goodput" else 1)
        panel.set(
            xscale="log", xlabel="streams", ylabel="multiple of plain decoding", title=f"T={temperature:g}"
        )
        panel.axhline(1.0, color="grey", linewidth=0.5)
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / "speculation.png", dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=list(TASKS), choices=list(FAMILIES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCY))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), help="policies; off is always there")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--requests", type=int, default=6, help="prompts a run, at least twice the streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--split", choices=("train", "heldout"), default="train", help="wordings of the tasks"
    )
    parser.add_argument("--draft", default="auto", help="as in streamserve serve")
    parser.add_argument("--target", type=Path, help="a target to use instead of the inflated packaged one")
    parser.add_argument("--name", default="speculation", help="name of the result files")
    args = parser.parse_args()
    args.settings = list(dict.fromkeys(("off", *args.settings)))
    with tempfile.TemporaryDirectory() as scratch:
        target = args.target or Path(scratch) / "target"
        if args.target is None:
            inflate(embedded.path("embedded"), target, SHAPE)
        bench = Bench(target, args.draft, args.settings)
        records = measure(bench, args)
    show(records, args.settings)
    settings = {key: value for key, value in vars(args).items() if key not in ("target", "name")}
    write(args.name, settings, records)
    if args.name == "speculation":
        plot(records, args.settings)


if __name__ == "__main__":
    main()
