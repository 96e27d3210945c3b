"""The scenarios run on every engine, and the least time the machine could take for each."""

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.engines.peers.checkpoints import WORDS, Model


@dataclass(frozen=True)
class Scenario:
    """Describes a workload: `streams` texts that grow in lockstep, in each of `turns` by `new` prompt tokens
    and `out` answered tokens.

    All texts begin with the same `known` tokens, which every engine has processed just before the clock
    starts; all other tokens are new in each round. `title` is the row's name.
    """

    title: str
    streams: int = 1
    new: int = 64
    out: int = 64
    turns: int = 1
    known: int = 0

    @property
    def tokens(self) -> int:
        """Return the number of tokens by which the speed is counted: output tokens, or input tokens for a
        prefill."""
        return self.streams * self.turns * (self.out if self.out > 1 else self.new)

    @property
    def longest(self) -> int:
        """Return the length of a text at its end, in tokens."""
        return self.known + self.turns * (self.new + self.out)


# Known prompts are multiples of 128 tokens, which every engine's blocks divide.
SCENARIOS = {
    "one": Scenario("one stream"),
    "8": Scenario("8 streams", streams=8),
    "32": Scenario("32 streams", streams=32),
    "64": Scenario("64 streams", streams=64),
    "prefill-1k": Scenario("prefill 1k", new=1024, out=1),
    "prefill-2k": Scenario("prefill 2k", new=2048, out=1),
    "context-2k": Scenario("one at 2k", known=2048, new=1, out=32),
    "context-6k": Scenario("one at 6k", known=6144, new=1, out=32),
    "chat": Scenario("chat", streams=4, known=2048, new=16, out=16, turns=8),
}
QUICK = ("one", "8", "prefill-1k", "chat")
HTTP = Scenario("HTTP, 32 streams", streams=32)


def work(name: str, scenario: Scenario, seed: str) -> dict[str, Any]:
    """Return the input for an engine: the known token ids, then for each turn the new token ids of each
    stream."""
    fixed, fresh = random.Random(name), random.Random(f"{name} {seed}")
    known = fixed.choices(WORDS, k=scenario.known)
    turns = [
        [fresh.choices(WORDS, k=scenario.new) for _ in range(scenario.streams)] for _ in range(scenario.turns)
    ]
    return {
        "name": name,
        "known": known,
        "turns": turns,
        "out": scenario.out,
        "streams": scenario.streams,
        "longest": scenario.longest,
    }


BYTES = {"bf16": 2.0, "int8": 1 + 4 / 128, "int4": 1 / 2 + 8 / 64}
"""Bytes of a layer weight by width, our scales and offsets included. The output head has 8 bits if the layers
have 8 or 4."""


def floor(model: Model, scenario: Scenario, bandwidth: float, rate: float, width: str = "bf16") -> float:
    """Return the least seconds of a scenario: the longer of reading weights and KV once a step, and the
    FLOPs.

    `bandwidth` in bytes a second, `rate` in FLOPs a second of matrices of this width. A turn is one step for
    all its new tokens and then one for each further token; only rows that are sampled need logits.
    """
    streams, seconds, context = scenario.streams, 0.0, scenario.known
    for _ in range(scenario.turns):
        for rows in (scenario.new, *[1] * (scenario.out - 1)):
            seconds += max(
                _step_bytes(model, streams, context + rows, width) / bandwidth,
                _step_flops(model, streams, context, rows) / rate,
            )
            context += rows
        context += 1  # The last answered token is computed with the next turn.
    return seconds


def _step_bytes(model: Model, streams: int, context: int, width: str) -> float:
    head = BYTES["bf16" if width == "bf16" else "int8"] * model.head_parameters
    return BYTES[width] * model.layer_parameters + head + streams * context * model.kv_bytes


def _step_flops(model: Model, streams: int, context: int, rows: int) -> float:
    pairs = rows * context + rows * (rows + 1) / 2
    per_stream = (
        rows * model.layer_parameters + model.head_parameters + 2 * model.layers * model.hidden * pairs
    )
    return 2 * streams * per_stream
