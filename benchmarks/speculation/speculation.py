"""Speculation against plain decoding: families of tasks, concurrent streams, settings, greedy and sampled.

The target is the packaged model inflated to about 345 M parameters, so that a step costs what such a model's
does; the draft is the packaged one. One engine serves a closed loop of `streams` requests and only the policy
changes: each setting runs for a window of time, in alternation, and every text is compared with the plain
one. Acceptance and calibration are counted on the packaged pair itself, which computes the same function.

The whole grid takes an hour. It is measured in pieces which are kept in build/speculation/, so it can be run
`--seconds` at a time; each call writes the results so far.

    python -m benchmarks.speculation.speculation
    python -m benchmarks.speculation.speculation --seconds 100 --streams 1 8 --temperature 0
"""

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.options import cache, parse, pick
from benchmarks.report import commit
from benchmarks.speculation.speculation_report import report
from streamserve import embedded
from streamserve.baselines.fixed import fixed_shape
from streamserve.baselines.speculation import parse_policy
from streamserve.engine.engine import Engine
from streamserve.execution.formats.inflate import ModelShape, inflate
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.draft import draft_cost
from streamserve.execution.profile.measure import load_or_measure_profile
from streamserve.execution.profile.profile import Profile, ProfileStore
from streamserve.protocol.config import ModelConfig, SpeculationMode
from streamserve.protocol.messages import Cancel, Submit, Token
from streamserve.protocol.reports import Report
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.checkpoints import packaged_draft
from streamserve.speculation.controller import MeasuredStep, Round, Speculation, SpeculationBatch

sys.path.insert(0, str(Path(__file__).parents[2] / "packaged_model"))
from embedded_data import FAMILIES

CACHE = Path(__file__).parents[2] / "build" / "speculation"
SHAPE = ModelShape(hidden=1024, layers=24)
TASKS = ("instructions", "arithmetic", "functions", "articles")
STREAMS = (1, 4, 8, 16, 32, 64)
SETTINGS = (
    "off", "goodput", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:5", "fixed:6", "fixed:7", "fixed:8",
    "fixed-tree:2x3", "fixed-tree:3x4",
)  # fmt: skip
DEEPEST = 160
"""Query tokens of a step above which fixed settings are measured only once: they are far slower, and take
minutes."""
LEARNING = 1.5
"""Seconds in which goodput adapts to a family before it is measured, since the previous family was different
traffic."""
APART = 8
"""Difference between the request numbers of two turns, so that each turn serves other requests."""
BLOCK = 16
PROMPTS = 16
"""Number of distinct prompts of a family. Sampled requests also differ in their seeds."""
MAX_TOKENS = 64
MIN_STEPS, MIN_SECONDS = 4, 0.1


@dataclass(frozen=True)
class Piece:
    """A part of the grid that is measured and stored as a whole."""

    family: str
    temperature: float
    streams: int
    round: int

    @property
    def name(self) -> str:
        return f"{self.family}-T{self.temperature:g}-{self.streams}-{self.round}"


@dataclass(frozen=True)
class Window:
    """The measurements of one setting in a piece, and its texts by request, as far as they were generated."""

    seconds: float
    tokens: int
    steps: int
    scheduling: float
    draft: float
    target: float
    accepted: int
    drafts: int
    texts: Mapping[str, list[int]]


def prompts(family: str, split: Any, seed: int) -> list[list[int]]:
    """Return the token ids of the first questions of chats. Prompts have only lengths that the prefix index
    covers except for one to three tokens, because the cost of prompts is not measured here."""
    tokenizer = Tokenizer.from_file(str(embedded.path("embedded") / "tokenizer.json"))
    rng, measured = random.Random(seed), []
    while len(measured) < PROMPTS:
        messages, _, _ = FAMILIES[family](rng, split).replies()[0]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        ids = tokenizer.encode(text + "<|im_start|>assistant\n").ids
        if ids and len(ids) % BLOCK in (1, 2, 3):
            measured.append(ids)
    return measured


def target() -> Path:
    """Return the inflated target. The first call writes it; a smoke run writes a small one."""
    folder = cache(CACHE) / "target"
    if not folder.exists():
        inflate(embedded.path("embedded"), folder, pick(SHAPE, ModelShape(256, 8)))
    return folder


class Bench:
    """A loaded pair. The engine keeps its prefix index, and each setting its learned state."""

    def __init__(self, target: Path, mode: SpeculationMode = "coupled", profiles: Path | None = None) -> None:
        config = ModelConfig(
            path=str(target), draft=str(packaged_draft(target) or "none"), speculation_mode=mode,
            num_blocks=2048, block_size=BLOCK, max_num_seqs=64, max_model_len=2048,
        )  # fmt: skip
        self.loaded: Loaded = load(config)
        self.profile: Profile = load_or_measure_profile(
            str(target), self.loaded, ProfileStore(profiles or cache(CACHE) / "profiles")
        )
        self.cost = self.profile.cost.in_tokens(self.profile.kv_token_bytes)
        self.draft_cost = draft_cost(self.loaded)
        self.speculations: dict[str, Speculation] = {}
        self.engine = Engine(
            self.loaded.engine_config, self.loaded.model_info, self.loaded.executor, time.perf_counter,
            self.loaded.drafter, self.speculation("off"),
        )  # fmt: skip
        gc.freeze()  # as a worker does

    def speculation(self, setting: str) -> Speculation:
        return self.speculations.setdefault(
            setting, Speculation(parse_policy(setting), self.cost, self.draft_cost)
        )

    def run(
        self, setting: str, requests: Sequence[list[int]], temperature: float, streams: int, seconds: float,
        first: int = 0,
    ) -> Window:  # fmt: skip
        """Run a closed loop of `streams` requests for `seconds`, beginning with number `first`. The window
        begins when all initial requests have begun, and ends before the remaining ones are cancelled."""
        engine = self.engine
        engine.speculation = self.speculation(setting)
        texts: dict[str, list[int]] = defaultdict(list)
        open_: set[str] = set()
        numbers = itertools.count(first)
        before, started, tokens = engine.report(), 0.0, 0
        while not started or _going(engine.report(), before, time.perf_counter() - started, seconds):
            while len(open_) < streams:
                number = next(numbers)
                params = SamplingParams(temperature=temperature, seed=number, max_tokens=MAX_TOKENS)
                request = Submit(
                    str(number),
                    requests[number % len(requests)],
                    params,
                    outputs={0: []},
                    arrival=float(number),
                )
                engine.handle(request)
                open_.add(request.request)
            for event in engine.step():
                if isinstance(event, Token):
                    texts[event.request].append(event.token)
                    tokens += 1
                    if event.finish:
                        open_.discard(event.request)
            if not started and len(texts) >= streams:
                before, started, tokens = engine.report(), time.perf_counter(), 0
        spent, after = time.perf_counter() - started, engine.report()
        for name in open_:
            engine.handle(Cancel(name))
        while engine.has_work:
            engine.step()
        return _window(before, after, spent, tokens, texts)


def _going(now: Report, before: Report, spent: float, seconds: float) -> bool:
    return spent < seconds or now.steps - before.steps < MIN_STEPS


def _window(
    before: Report, after: Report, seconds: float, tokens: int, texts: Mapping[str, list[int]]
) -> Window:
    assert before.step_parts is not None
    assert after.step_parts is not None
    assert before.speculation is not None
    assert after.speculation is not None
    return Window(
        seconds, tokens, after.steps - before.steps,
        after.step_parts.scheduling - before.step_parts.scheduling,
        after.step_parts.draft - before.step_parts.draft,
        after.step_parts.target - before.step_parts.target,
        after.speculation.accepted - before.speculation.accepted,
        after.speculation.drafts - before.speculation.drafts,
        dict(texts),
    )  # fmt: skip


def measure(bench: Bench, piece: Piece, args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a piece: all settings in alternation, several times, each time in another order.
    Other programs change the machine's speed, so only values of the same turn are compared."""
    requests = prompts(piece.family, args.split, args.seed)
    # computes the prompts into the cache
    bench.run("off", requests, piece.temperature, min(piece.streams, PROMPTS), 0.0)
    bench.run("goodput", requests, piece.temperature, piece.streams, pick(LEARNING, 0.0))
    windows: dict[str, list[Window]] = defaultdict(list)
    for turn in range(args.turns):
        order = [name for name in args.settings if not turn or not _far_off(name, piece.streams)]
        random.Random(f"{piece.name}-{turn}").shuffle(order)
        for setting in order:
            seconds = MIN_SECONDS if _far_off(setting, piece.streams) else args.window
            measured = bench.run(setting, requests, piece.temperature, piece.streams, seconds, turn * APART)
            windows[setting].append(measured)
    pairs = [
        (plain, other)
        for measured in windows.values()
        for plain, other in zip(windows["off"], measured, strict=False)
        if other is not plain
    ]
    return {
        "family": piece.family, "temperature": piece.temperature, "streams": piece.streams,
        "round": piece.round, "commit": commit(), "budget": budget(bench),
        "settings": {name: _figures(measured) for name, measured in windows.items()},
        "texts_compared": sum(len(plain.texts.keys() & other.texts.keys()) for plain, other in pairs),
        "texts_that_differ": sum(_differing(plain, other) for plain, other in pairs),
    }  # fmt: skip


def _far_off(setting: str, streams: int) -> bool:
    """Return whether a setting's steps are so large that the setting cannot be among the fastest."""
    shape = fixed_shape(setting)
    return shape is not None and shape.nodes > 1 and streams * (1 + shape.nodes) > DEEPEST


def budget(bench: Bench) -> float:
    """Return the token budget B: the query tokens of a step that costs twice as much as a step of one token,
    according to the profile."""
    return next((float(rows) for rows in range(2, 1024) if bench.cost(rows, 0) >= 2 * bench.cost(1, 0)), 1e3)


def _figures(windows: Sequence[Window]) -> dict[str, Any]:
    seconds, tokens = sum(w.seconds for w in windows), sum(w.tokens for w in windows)
    drafts = sum(w.drafts for w in windows)
    return {
        "tokens_per_second": tokens / seconds,
        "by_turn": [w.tokens / w.seconds for w in windows],
        "tokens_per_step": tokens / sum(w.steps for w in windows),
        "accepted_per_tree": sum(w.accepted for w in windows) / drafts if drafts else 0.0,
        "scheduling_share": sum(w.scheduling for w in windows) / seconds,
        "draft_share": sum(w.draft for w in windows) / seconds,
        "target_share": sum(w.target for w in windows) / seconds,
    }


def _differing(plain: Window, other: Window) -> int:
    """Return the number of texts that differ from the plain texts within their common length."""
    pairs = [(plain.texts[name], other.texts[name]) for name in plain.texts.keys() & other.texts.keys()]
    return sum(any(a != b for a, b in zip(one, two, strict=False)) for one, two in pairs)


class Watched(Speculation):
    """Records for every verified draft token its predicted acceptance probability and whether it was
    accepted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[float, bool]] = []

    def begin(self, batch: SpeculationBatch) -> Round:
        """Begin a round that records its draft tokens."""
        return WatchedRound(self, batch)


class WatchedRound(Round):
    """A step's round that records its verified draft tokens."""

    def __init__(self, watched: Watched, batch: SpeculationBatch) -> None:
        super().__init__(watched, batch)
        self._seen = watched.seen

    def learn(self, step: MeasuredStep) -> None:
        """Learn from the step, and record each draft token's prediction and outcome."""
        for _, tree, tokens in step.verified:
            path = tree.follow(tokens)
            self._seen += [(tree.accept[node], node in path) for node in range(1, len(tree))]
        super().learn(step)


def acceptance(args: argparse.Namespace, mode: SpeculationMode) -> list[dict[str, Any]]:
    """Return the acceptance of the packaged pair itself: chains and trees, by family and temperature, and the
    calibration of predicted probabilities."""
    bench = Bench(embedded.path("embedded"), mode)
    measured = []
    for setting, temperature in itertools.product(("fixed:4", "fixed-tree:3x4"), args.temperature):
        for family in args.families:
            watched = Watched(parse_policy(setting), bench.cost)
            bench.speculations[setting] = watched
            requests = prompts(family, args.split, args.seed)
            window = bench.run(setting, requests, temperature, 8, args.window)
            bins = [[0.0, 0, 0] for _ in range(10)]
            for chance, came in watched.seen[len(watched.seen) // 4 :]:
                position = bins[min(int(chance * 10), 9)]
                position[0], position[1], position[2] = (
                    position[0] + chance,
                    position[1] + came,
                    position[2] + 1,
                )
            measured.append(
                {
                    "mode": mode, "setting": setting, "temperature": temperature, "family": family,
                    "tokens": window.tokens, "accepted_per_tree": window.accepted / max(window.drafts, 1),
                    "calibration": bins, "commit": commit(),
                }
            )  # fmt: skip
    return measured


def pieces(args: argparse.Namespace) -> Iterator[Piece]:
    """Yield the grid, one round after the other."""
    for number in range(args.rounds):
        for temperature, streams in itertools.product(args.temperature, args.streams):
            for family in args.families:
                yield Piece(family, temperature, streams, number)


def main() -> None:
    """Measure missing pieces for a limited time; then print and write all stored pieces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=list(TASKS), choices=list(FAMILIES))
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), help="policies to measure; `off` is always included"
    )
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument(
        "--window", type=float, default=1.0, help="seconds for which a setting runs in each turn"
    )
    parser.add_argument("--turns", type=int, default=4, help="number of turns in a piece")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no piece after this time; 0: only report"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--split", choices=("train", "heldout"), default="heldout", help="which wordings of the tasks"
    )
    parser.add_argument("--name", default="speculation", help="name of the result files")
    parser.add_argument("--acceptance", action="store_true", help="measure acceptance instead of the grid")
    args = parse(
        parser,
        families=["functions"],
        streams=[1],
        settings=["goodput", "fixed:1"],
        temperature=[0.0],
        window=0.05,
        turns=1,
    )
    args.settings = list(dict.fromkeys(("off", *args.settings)))
    started = time.perf_counter()
    folder = cache(CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    if args.acceptance:
        counted = [record for mode in ("coupled", "rejection") for record in acceptance(args, mode)]
        (folder / "acceptance.json").write_text(json.dumps(counted))
    else:
        todo = [piece for piece in pieces(args) if not (folder / f"grid-{piece.name}.json").exists()]
        if todo and args.seconds > 0:
            bench = Bench(target())
        for piece in todo:
            if time.perf_counter() - started < args.seconds:
                record = measure(bench, piece, args)
                (folder / f"grid-{piece.name}.json").write_text(json.dumps(record))
                print(piece.name, {k: round(v["tokens_per_second"]) for k, v in record["settings"].items()})
    cached = ("window", "turns", "rounds", "seed", "split")
    settings = {name: getattr(args, name) for name in cached}
    report(
        folder, args.name, settings | {"max_tokens": MAX_TOKENS, "prompts": PROMPTS, "layers": SHAPE.layers}
    )


if __name__ == "__main__":
    main()
