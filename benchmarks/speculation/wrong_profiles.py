"""Speculation priced by a wrong profile, in virtual time: throughput after 100 steps against plain decoding.

Step costs follow a true curve; speculation starts from a profile that is wrong by a factor of 3, overall or
at some batch sizes, for the target, the draft or both. A cell is one engine in a closed loop of streams.
Ratios are tokens a second after the first 100 steps, relative to plain decoding on the same true curve.

    python -m benchmarks.speculation.wrong_profiles                         # the whole grid
    python -m benchmarks.speculation.wrong_profiles --every 20 --name ""    # a few cells, nothing written
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.options import parse, pick
from benchmarks.recorded import KINDS, Node, RecordedDrafter, Recording, unpack
from benchmarks.report import SIMULATED, table, write
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.cost import fit
from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.messages import ModelInfo, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.executor import CostExecutor
from streamserve.speculation.controller import Speculation

DATA = Path(__file__).parents[1] / "data"
FACTOR = 3.0
WARM_UP = 100
"""Number of first steps that are not counted."""
MEASURED = {1: 1200, 8: 400, 32: 200}
"""Number of measured steps by number of streams."""
MIN_RATIO = 0.98
"""The minimum ratio to plain decoding that every cell must reach."""
STREAMS = tuple(MEASURED)
MAX_TOKENS = 64
MODEL = ModelInfo(
    architecture="simulated", parameters=0, vocab_size=4096, max_model_len=1024, eos_token_ids=(),
    weight_bytes=0, dtype="none", row_invariant=True, fingerprint="simulated",
)  # fmt: skip
CONFIG = EngineConfig(
    num_blocks=4096, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=512, max_chunk=64,
    enable_prefix_caching=False,
)  # fmt: skip
Step = Callable[[int, int], float]


@dataclass(frozen=True)
class Curve:
    """The true costs: seconds of a step by query tokens and KV tokens, and seconds of a draft pass."""

    step: Step
    draft: Callable[[float], float]


def _milliseconds(tokens: tuple[int, ...], figures: tuple[float, ...], further: float) -> CostCurve:
    return fit(tokens, [0], [[figure / 1000] for figure in figures], token_seconds=further / 1000)


def _curve(cost: CostCurve, draft: float) -> Curve:
    """Return the cost curve of a target. A draft pass takes the share `draft` of a step with a quarter of the
    rows."""
    return Curve(lambda rows, kv: cost(rows) * (1 + 1e-5 * kv), lambda rows: draft * cost(1 + (rows - 1) / 4))


def _measured() -> Curve:
    """Return the curve of the packaged pair at the cost of 345 M parameters (benchmarks.papers.slo_costs)."""
    read = json.loads((DATA / "costs.json").read_text())
    target, draft = (msgspec.convert(read[name]["cost"], CostCurve) for name in ("target", "draft"))
    return Curve(target.in_tokens(read["target"]["kv_token_bytes"]), draft)


CURVES: dict[str, Callable[[], Curve]] = {
    "memory-bound (measured, AMX)": _measured,
    "steep": lambda: _curve(
        _milliseconds((1, 2, 4, 8, 16, 32, 64, 128), (40, 41, 47, 66, 115, 220, 430, 860), 6.7), 1 / 50
    ),
    "flat": lambda: _curve(_milliseconds((1, 256, 512), (20, 21, 42), 0.1), 1 / 30),
    "staircase": lambda: _curve(
        _milliseconds(
            (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256),
            (20, 20, 30, 30, 44, 44, 80, 80, 150, 150, 290, 290), 1.2,
        ), 1 / 40,
    ),
}  # fmt: skip


def _even(recording_seed: int, right: float, scores: tuple[float, float]) -> Recording:
    """Return a synthetic recording whose first draft token is accepted with the same probability at every
    level, and whose siblings hardly ever are."""
    rng = random.Random(recording_seed)
    depths = {"1": 16, "2": 10, "3": 8, "4": 8, "specinfer": 8}
    positions = 512
    trees: dict[str, list[tuple[Node, ...]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        width = int(kind) if kind.isdigit() else 1
        for _ in range(positions):
            nodes: list[Node] = []
            parent, good = 0, True
            for _ in range(depths[kind]):
                first = len(nodes) + 1
                good = good and rng.random() < right
                for rank in range(width):
                    nodes.append((parent, rng.uniform(*scores) / (1 + 3 * rank), good and rank == 0))
                parent = first
            trees[kind].append(tuple(nodes))
    return Recording(trees, tuple(range(0, positions + 1, 64)), ("made up",) * (positions // 64))


@cache
def _recorded() -> Recording:
    """Return the recorded draft trees of the packaged draft on held-out chats
    (benchmarks.speculation.record_acceptance)."""
    with np.load(DATA / "acceptance.npz", allow_pickle=False) as arrays:
        return unpack({name: arrays[name] for name in arrays.files})


DRAFTS: dict[str, Callable[[], Recording]] = {
    "recorded chats": _recorded,
    "bad": cache(lambda: _even(1, 0.06, (0.3, 0.95))),
    "middling": cache(lambda: _even(3, 0.4, (0.3, 0.95))),
    "good": cache(lambda: _even(2, 0.93, (0.7, 0.99))),
}

Scale = Callable[[float, int], float]
"""The ratio of a profile's prediction to the true cost, by query tokens and number of decoding streams."""


def _only(where: Callable[[float, int], bool], factor: float) -> Scale:
    return lambda rows, streams: factor if where(rows, streams) else 1.0


TARGETS: dict[str, Scale] = {
    "right": lambda rows, streams: 1.0,
    "all slow": lambda rows, streams: FACTOR,
    "all fast": lambda rows, streams: 1 / FACTOR,
    "one token slow": _only(lambda rows, streams: rows == 1, FACTOR),
    "one token fast": _only(lambda rows, streams: rows == 1, 1 / FACTOR),
    "plain slow": _only(lambda rows, streams: rows <= streams, FACTOR),
    "plain fast": _only(lambda rows, streams: rows <= streams, 1 / FACTOR),
    "few slow": _only(lambda rows, streams: rows < 2 * streams + 2, FACTOR),
    "few fast": _only(lambda rows, streams: rows < 2 * streams + 2, 1 / FACTOR),
    "many slow": _only(lambda rows, streams: rows >= 2 * streams + 2, FACTOR),
    "many fast": _only(lambda rows, streams: rows >= 2 * streams + 2, 1 / FACTOR),
    "rising": lambda rows, streams: min(FACTOR, FACTOR ** (2 * min(rows, 128) ** 0.5 / 128**0.5 - 1)),
    "falling": lambda rows, streams: max(1 / FACTOR, FACTOR ** (1 - 2 * min(rows, 128) ** 0.5 / 128**0.5)),
    "zigzag": lambda rows, streams: FACTOR if int(rows).bit_length() % 2 else 1 / FACTOR,
}
WRONG: list[tuple[str, float]] = [
    *((name, 1.0) for name in TARGETS),
    *(("right", factor) for factor in (FACTOR, 1 / FACTOR)),
    *(
        (name, factor)
        for name in ("all slow", "all fast", "plain slow", "many fast")
        for factor in (FACTOR, 1 / FACTOR)
    ),
]
"""The wrong profiles: how the target's profile is wrong, and the factor of the draft's profile."""


@dataclass
class Loop:
    """An engine in a closed loop of `streams`, whose clock advances by the true costs of steps and
    drafting."""

    curve: Curve
    recording: Recording
    streams: int
    speculation: Speculation | None
    now: float = 0.0
    steps: int = 0
    produced: int = 0
    running: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.executor = CostExecutor(CONFIG.num_blocks, CONFIG.block_size, MODEL.vocab_size, self.curve.step)
        drafter = RecordedDrafter(self.recording, self.executor, self.curve.draft)
        self.engine = Engine(
            CONFIG, MODEL, self.executor, lambda: self.now + self.executor.seconds,
            drafter if self.speculation else None,
            self.speculation or Speculation(parse_policy("off"), self.curve.step),
        )  # fmt: skip
        self._numbers = itertools.count()

    def step(self) -> None:
        """Start requests until all streams are busy, and run a step. Prompts have one token, so they change
        no batch size."""
        while len(self.running) < self.streams:
            number = next(self._numbers)
            params = SamplingParams(temperature=0.0, seed=number * 7, max_tokens=MAX_TOKENS - number * 5 % 32)
            self.engine.handle(
                Submit(
                    str(number),
                    [number * 7 % 4000],
                    params,
                    outputs={0: []},
                    arrival=float(number),
                )
            )
            self.running.add(str(number))
        self.executor.seconds = 0.0
        for event in self.engine.step():
            if isinstance(event, Token):
                self.produced += 1
                if event.finish:
                    self.running.discard(event.request)
        self.now += self.executor.seconds
        self.steps += 1

    def rate(self, steps: int) -> float:
        """Return tokens a second over the next `steps`."""
        began, had = self.now, self.produced
        for _ in range(steps):
            self.step()
        return (self.produced - had) / (self.now - began)


def speculating(curve: Curve, streams: int, wrong: str, draft: float) -> Speculation:
    """Return speculation that starts from a wrong profile."""
    scale = TARGETS[wrong]
    return Speculation(
        parse_policy("goodput"),
        lambda rows, kv: curve.step(rows, kv) * scale(rows, streams),
        lambda rows: curve.draft(rows) * draft,
    )


@cache
def _known(name: str) -> Curve:
    return CURVES[name]()


@cache
def plain_rate(curve: str, streams: int, warm_up: int, steps: int) -> float:
    """Return tokens a second of plain decoding."""
    loop = Loop(_known(curve), _recorded(), streams, None)
    loop.rate(warm_up)
    return loop.rate(steps)


def ratio(curve: str, draft: str, streams: int, wrong: str, factor: float) -> float:
    """Return tokens a second after the first 100 steps, relative to plain decoding."""
    known = _known(curve)
    loop = Loop(known, DRAFTS[draft](), streams, speculating(known, streams, wrong, factor))
    warm_up, steps = pick(WARM_UP, 1), pick(MEASURED[streams], 20)
    loop.rate(warm_up)
    return loop.rate(steps) / plain_rate(curve, streams, warm_up, steps)


def cells() -> Iterator[tuple[str, str, int, str, float]]:
    """Yield all cells of the grid."""
    for curve, draft, streams in itertools.product(CURVES, DRAFTS, STREAMS):
        for wrong, factor in WRONG:
            yield curve, draft, streams, wrong, factor


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--every", type=int, default=1, help="run each N-th cell, and all cells with a correct profile"
    )
    parser.add_argument("--name", default="wrong_profiles", help="name of the result file; empty: write none")
    parser.add_argument(
        "--only", nargs="*", default=[], help="run only curves whose names begin with these words"
    )
    args = parse(parser, every=1 << 20, only=["flat"])
    records: list[dict[str, Any]] = []
    for number, (curve, draft, streams, wrong, factor) in enumerate(cells()):
        if args.only and not curve.startswith(tuple(args.only)):
            continue
        if number % args.every and (wrong, factor) != ("right", 1.0):
            continue
        measured = ratio(curve, draft, streams, wrong, factor)
        records.append({
            "curve": curve, "draft": draft, "streams": streams, "target profile": wrong,
            "draft profile": round(factor, 3), "against plain": round(measured, 4),
        })  # fmt: skip
        print(*records[-1].values(), sep=", ", flush=True)
    show(records)
    if args.name:
        write(
            args.name,
            vars(args) | {"warm-up steps": WARM_UP, "measured steps": MEASURED, "factor": FACTOR},
            records,
            SIMULATED,
        )


def show(records: list[dict[str, Any]]) -> None:
    """Print the lowest ratio by draft and streams, and the cells below the minimum."""
    rows = []
    for curve, draft, streams in itertools.product(CURVES, DRAFTS, STREAMS):
        measured = [r for r in records if (r["curve"], r["draft"], r["streams"]) == (curve, draft, streams)]
        if measured:
            right = [
                f"{r['against plain']:.3f}"
                for r in measured
                if (r["target profile"], r["draft profile"]) == ("right", 1)
            ]
            worst = min(measured, key=lambda r: r["against plain"])
            rows.append([
                f"{curve}, {draft}, {streams}", *(right or [""]),
                f"{worst['against plain']:.3f}", f"{worst['target profile']}, {worst['draft profile']}",
            ])  # fmt: skip
    table("against plain decoding", ["curve, draft, streams", "right", "lowest", "with"], rows)
    below = [r for r in records if r["against plain"] < MIN_RATIO]
    print(f"{len(below)} of {len(records)} cells below {MIN_RATIO}")


if __name__ == "__main__":
    main()
