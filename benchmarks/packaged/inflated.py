"""Inflated copies of the packaged model compute the same function at the cost of a larger model.

Logits and greedy texts are compared with the packaged model's in float32; steps are timed in bf16 against a
checkpoint of the same shape with random weights, in interleaved rounds.

    python -m benchmarks.packaged.inflated --prompts 200
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.options import parse, pick
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve import LLM, SamplingParams, embedded
from streamserve.contracts.plan import SequenceState, Span, StepPlan
from streamserve.contracts.tree import root
from streamserve.execution.formats.inflate import ModelShape, inflate
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig

SHAPES = {
    "345 M": ModelShape(1024, 24),
    "1 B": ModelShape(1024, 80),
}
SMALLEST = ModelShape(256, 8)
"""The packaged model's own shape, which a smoke run writes."""
ROWS = (1, 8)
ROUNDS = 9
STEPS = 4
TEXTS = (
    "What is 12 + 7?",
    "Who are you?",
    "Write a function that adds two numbers.",
    "List three fruits.",
    "Rewrite in upper case: the cat sat on the mat.",
    "Tell me about the sea.",
)


def randomized(source: Path, target: Path) -> Path:
    """Write a checkpoint of the same shape with random weights."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(0)
    for shard in target.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            scale = tensor.shape[-1] ** -0.5 if tensor.ndim == 2 else 0.1
            tensors[name] = (noise * scale + (tensor.ndim == 1)).to(tensor.dtype)
        save_file(tensors, shard, metadata={"format": "pt"})
    return target


def stepper(folder: Path, rows: int) -> Callable[[], None]:
    """Return a function that runs one decode step of `rows` sequences, 64 tokens into their texts."""
    executor = load(ModelConfig(path=str(folder), num_blocks=rows * 8, max_model_len=128)).executor
    params = SamplingParams(temperature=0)
    states = [SequenceState(row, 0, params, [5] * 64, []) for row in range(rows)]
    tables = [list(range(row * 8, row * 8 + 8)) for row in range(rows)]
    prompts = [Span(row, 0, [5] * 64, tables[row]) for row in range(rows)]
    executor.run(StepPlan(0, states, [], [], prompts))
    step = [Span(row, 63, [5], tables[row], tree=root(5), choices=(0,)) for row in range(rows)]

    def run() -> None:
        executor.run(StepPlan(1, [], [], [], step))

    return run


def seconds(run: Callable[[], None]) -> float:
    """Return the seconds of one step, as the mean of several steps."""
    started = time.perf_counter()
    for _ in range(STEPS):
        run()
    return (time.perf_counter() - started) / STEPS


def step_cost(inflated: Path, random_weights: Path) -> dict[str, dict[str, float]]:
    """Return by number of rows the milliseconds of both models' steps, and the median ratio of interleaved
    rounds."""
    figures = {}
    for rows in ROWS:
        ours, theirs = stepper(inflated, rows), stepper(random_weights, rows)
        ours(), theirs()
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(pick(ROUNDS, 1))]
        figures[str(rows)] = {
            "inflated_ms": 1e3 * statistics.median(a for a, _ in pairs),
            "random_ms": 1e3 * statistics.median(b for _, b in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
        }
    return figures


def prompts(count: int) -> list[list[dict[str, str]]]:
    """Return chats that repeat a few questions; a number makes each chat unique."""
    rng = random.Random(0)
    return [[{"role": "user", "content": f"{rng.choice(TEXTS)} ({number})"}] for number in range(count)]


def texts(model: str, count: int) -> list[list[int]]:
    """Return the greedy token ids of the model's answers, in float32."""
    with LLM(model, dtype="float32") as llm:
        rendered = [llm.render(chat) for chat in prompts(count)]
        outputs = llm.generate(rendered, SamplingParams(temperature=0, max_tokens=48))
    return [output.outputs[0].token_ids for output in outputs]


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    """Return the logits of one chat and of random tokens, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 4000, (2, 128)))
    return model(ids).logits


def measure(name: str, shape: ModelShape, count: int, folder: Path) -> dict[str, Any]:
    """Return all results of one shape."""
    source = embedded.path("embedded")
    inflate(source, folder / "inflated", shape)
    difference = float((logits(source) - logits(folder / "inflated")).abs().max())
    own, grown = texts("embedded", count), texts(str(folder / "inflated"), count)
    cost = step_cost(folder / "inflated", randomized(folder / "inflated", folder / "random"))
    index = json.loads((folder / "inflated" / "model.safetensors.index.json").read_text())
    return {
        "shape": name,
        "bytes": index["metadata"]["total_size"],
        "largest_logit_difference": difference,
        "prompts": count,
        "equal_texts": sum(a == b for a, b in zip(own, grown, strict=True)),
        "step": cost,
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=200, help="chats whose answers are compared")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="measure only this shape")
    args = parse(parser, prompts=1, shape=["345 M"])
    figures = []
    for name in args.shape or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            figures.append(measure(name, pick(SHAPES[name], SMALLEST), args.prompts, Path(folder)))
    rows = [
        [f["shape"], f"{f['bytes'] / 1e6:.0f}", f"{f['largest_logit_difference']:.1e}",
         f"{f['equal_texts']}/{f['prompts']}",
         *(f"{s['inflated_ms']:.1f} / {s['random_ms']:.1f} = {s['ratio']:.3f}" for s in f["step"].values())]
        for f in figures
    ]  # fmt: skip
    columns = ["shape", "MB", "logits differ by", "equal texts", *(f"{rows} rows, ms" for rows in ROWS)]
    table("Inflated copies of the packaged model", columns, rows)
    print(write("inflated", vars(args), figures, PACKAGED_PAIR))


if __name__ == "__main__":
    main()
