"""Latency targets live, and the same requests in virtual time: is the simulation to be believed?

The pair of `benchmarks.slo_costs` in one engine in this process; requests come when they come. Prompts are
those whose texts were recorded, so that the draft is right at the same places in both. Virtual time runs on
the profile measured just before, as engines refined it that served other requests meanwhile, and with what
they took for scheduling.

    python -m benchmarks.slo_live --rates 1 2 3
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.record_acceptance import questions
from benchmarks.report import table, write
from benchmarks.slo import (
    Asked,
    Load,
    Served,
    engine_config,
    figures,
    goals,
    judged,
    minimum,
    parts,
    play,
    recorded,
    sampling,
    workload,
)
from benchmarks.slo_costs import EFFORT, Hardware
from benchmarks.speculation import SHAPE
from streamserve import embedded
from streamserve.engine.engine import Engine
from streamserve.engine.speculation import Speculation
from streamserve.execution.inflate import inflate
from streamserve.execution.load import Loaded, load
from streamserve.execution.profile_draft import draft_cost
from streamserve.execution.profile_measure import measure
from streamserve.policy.cost import StepCost
from streamserve.policy.speculation import parse_policy
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Submit, Token

KEPT = Path(__file__).parent.parent / "build" / "speculation" / "target"
COMPARED = ("attainment", "goodput", "ttft", "tpot")
WARM_UP = 1000
"""Seed of the requests that costs are refined by: none of those that count."""


class Pair:
    """The loaded pair and what it costs here."""

    def __init__(self) -> None:
        if not KEPT.exists():
            inflate(embedded.path("embedded"), KEPT, SHAPE)
        draft = str(embedded.path("embedded").parent / "draft")
        self.loaded: Loaded = load(
            ModelConfig(path=str(KEPT), draft=draft, num_blocks=2048, max_num_seqs=256, max_model_len=1024)
        )
        (profile,) = measure([("target", self.loaded)], EFFORT)
        drafting = draft_cost(self.loaded)
        assert drafting is not None
        self.drafting: StepCost = drafting
        self.hardware = Hardware(
            "here", profile.cost.in_tokens(profile.kv_token_bytes), lambda rows: drafting(rows),
            "measured in this run",
        )  # fmt: skip

    def as_served(self, asked: Sequence[Asked], prompts: Sequence[list[int]], load: Load) -> Hardware:
        """The costs as an engine finds them to be while it serves, with guesses and without."""
        known = Speculation(parse_policy("goodput"), self.hardware.step, self.drafting)
        scheduling = steps = 0.0
        for setting in ("goodput", "chunked", "equal-greedy+chunked"):
            known.policy = parse_policy(parts(setting)[0])
            _, split = serve(self, setting, load, asked, prompts, known)
            scheduling, steps = scheduling + split["scheduling"], steps + split["steps"]
        host = scheduling / steps
        return Hardware(
            "here", lambda rows, kv: host + known.step_cost(rows, kv), lambda rows: known.pass_cost(rows, 0),
            f"as served, {1e3 * host:.2f} ms of scheduling a step",
        )  # fmt: skip

    def engine(self, setting: str) -> Engine:
        """A fresh one, that has learned nothing."""
        loaded = self.loaded
        policy, _ = parts(setting)
        config = engine_config(self.hardware, setting, loaded.engine_config.num_blocks)
        config = msgspec.structs.replace(config, block_size=loaded.engine_config.block_size)
        return Engine(
            config, loaded.model_info, loaded.executor, time.perf_counter,
            None if policy == "off" else loaded.drafter,
            Speculation(parse_policy(policy), self.hardware.step, self.drafting),
        )  # fmt: skip


def requests(
    pair: Pair, load: Load, seed: int, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> list[Asked]:
    """Those of a workload, with the prompts and outputs that were recorded."""
    return [
        replace(one, text=text, prompt=len(prompts[text]), output=min(one.output, lengths[text]))
        for one in workload(pair.hardware, load, seed)
        for text in (one.text % len(prompts),)
    ]


def serve(
    pair: Pair, setting: str, load: Load, asked: Sequence[Asked], prompts: Sequence[list[int]],
    known: Speculation | None = None,
) -> tuple[list[Served], dict[str, float]]:  # fmt: skip
    """What became of each request, steps and seconds of their parts, live; `known` learns what they cost."""
    engine, targets = pair.engine(setting), goals(pair.hardware, load)
    engine.speculation = known or engine.speculation
    times: dict[str, list[float]] = defaultdict(list)
    coming, started = list(enumerate(asked)), time.perf_counter()
    while coming or engine.has_work:
        now = time.perf_counter() - started
        while coming and coming[0][1].at <= now:
            number, one = coming.pop(0)
            params = sampling(setting, load, one, targets[one.kind])
            prompt = prompts[one.text]
            engine.handle(Submit(str(number), 0, prompt, params, {0: []}, started + one.at))
        if not engine.has_work:
            time.sleep(min(0.005, max(0.0, coming[0][1].at - now)))
            continue
        for event in engine.step():
            if isinstance(event, Token):
                times[event.request].append(time.perf_counter() - started)
    report = engine.report()
    split = report.step_parts
    assert split is not None
    served = [judged(one, times[str(i)], load, targets[one.kind]) for i, one in enumerate(asked)]
    seconds = {"scheduling": split.scheduling, "drafting": split.draft, "target": split.target}
    return served, seconds | {"steps": float(report.steps)}


def means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def main() -> None:
    """Serve, simulate, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 2.0, 4.0])
    parser.add_argument(
        "--settings",
        nargs="+",
        default=["goodput", "equal-greedy+chunked", "chunked"],
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--name", default="slo_live", help="of the result file")
    args = parser.parse_args()
    recording, pair = recorded(), Pair()
    prompts, lengths = questions(pair.loaded, recording)
    serve(pair, "goodput", Load(), [Asked(0.0, 0, len(prompts[0]), 16, 0)], prompts)  # what is done once
    middle = Load(rate=sorted(args.rates)[len(args.rates) // 2], requests=args.requests)
    refined = pair.as_served(requests(pair, middle, WARM_UP, prompts, lengths), prompts, middle)
    found: dict[tuple[float, str], list[tuple[dict[str, float], dict[str, float]]]] = defaultdict(list)
    for seed in range(args.seeds):
        for rate in args.rates:
            load = Load(rate=rate, requests=args.requests)
            asked = requests(pair, load, seed, prompts, lengths)
            for setting in random.Random(f"{seed} {rate}").sample(args.settings, len(args.settings)):
                served, split = serve(pair, setting, load, asked, prompts)
                played, _ = play(refined, recording, setting, load, asked, goals(pair.hardware, load))
                both = figures(served, asked[0].at) | split, figures(played, asked[0].at)
                found[rate, setting].append(both)
                print(seed, rate, setting, {n: [round(b[n], 3) for b in both] for n in COMPARED}, flush=True)
    records = [
        {"rate": rate, "setting": setting, "live": live, "virtual": virtual,
         "ratio": {name: live[name] / virtual[name] for name in COMPARED}}
        for rate in args.rates
        for setting in args.settings
        for live, virtual in [map(means, zip(*found[rate, setting], strict=True))]
    ]  # fmt: skip
    hardware = pair.hardware
    rows = [
        [
            f"{r['rate']:g}",
            r["setting"],
            *(f"{r['live'][n]:.3f} / {r['virtual'][n]:.3f} = {r['ratio'][n]:.3f}" for n in COMPARED),
        ]
        for r in records
    ]
    table(f"live / virtual; B = {hardware.budget}", ["rate", "setting", *COMPARED], rows)
    costs = {rows: 1e3 * hardware.step(rows, 0) for rows in EFFORT.rows}
    write(args.name, {**vars(args), "B": hardware.budget, "minimum_tpot_ms": 1e3 * minimum(hardware),
                      "step_ms": costs, "virtual": refined.note}, records)  # fmt: skip


if __name__ == "__main__":
    main()
