"""Latency targets live, and the same requests in virtual time: validates the simulation.

The pair of slo_costs.py in one engine in this process; requests arrive at their times. The prompts are those
with recorded texts, so draft tokens are accepted at the same positions live and in virtual time. Virtual time
uses a profile that was measured just before and refined while engines served other requests, and their
scheduling time.

    python -m benchmarks.papers.slo_live --rates 1 2 3
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from benchmarks.options import parse, pick
from benchmarks.papers.slo import (
    Load,
    Outcome,
    WorkloadRequest,
    engine_config,
    figures,
    goals,
    minimum,
    outcome,
    parse_setting,
    recorded,
    sampling,
    simulate,
    workload,
)
from benchmarks.papers.slo_costs import EFFORT, Hardware
from benchmarks.report import PACKAGED_PAIR, table, write
from benchmarks.speculation.record_acceptance import questions
from benchmarks.speculation.speculation import target
from streamserve import embedded
from streamserve.baselines.orders import ORDERS
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.plan import DraftRequest, StepPlan
from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.draft import draft_cost
from streamserve.execution.profile.measure import QUICK, measure
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.messages import Submit, Token
from streamserve.speculation.controller import Speculation

COMPARED = ("attainment", "goodput", "ttft", "tpot")


@dataclass
class Meter:
    """Sums of measured seconds and of the seconds that the profile predicts."""

    measured: float = 0.0
    predicted: float = 0.0

    @property
    def slowdown(self) -> float:
        """Return the ratio of measured to predicted seconds."""
        return self.measured / self.predicted if self.predicted else 1.0


class Metered:
    """An executor or a drafter whose calls are timed; `predict` returns the seconds of a call from its
    argument."""

    def __init__(self, inner: Any, call: str, predict: Callable[[Any], float]) -> None:
        self.meter, self._inner, self._call, self._predict = Meter(), inner, call, predict

    def __getattr__(self, name: str) -> Any:
        return self._timed if name == self._call else getattr(self._inner, name)

    def _timed(self, argument: Any) -> Any:
        started = time.perf_counter()
        result = getattr(self._inner, self._call)(argument)
        self.meter.measured += time.perf_counter() - started
        self.meter.predicted += self._predict(argument)
        return result


class Pair:
    """The loaded pair and its costs on this machine."""

    def __init__(self) -> None:
        draft = str(embedded.path("embedded").parent / "draft")
        self.loaded: Loaded = load(
            ModelConfig(
                path=str(target()), draft=draft, num_blocks=2048, max_num_seqs=256, max_model_len=1024
            )
        )
        (profile,) = measure([("target", self.loaded)], pick(EFFORT, QUICK))
        drafting = draft_cost(self.loaded)
        assert drafting is not None
        self.drafting: CostCurve = drafting
        self.hardware = Hardware(
            "here", profile.cost.in_tokens(profile.kv_token_bytes), lambda tokens: drafting(tokens),
            "measured in this run",
        )  # fmt: skip

    def step_said(self, plan: StepPlan) -> float:
        """Return the predicted seconds of a step."""
        rows = sum(span.query_tokens for span in plan.spans)
        return self.hardware.step(rows, sum(span.start for span in plan.spans)) if rows else 0.0

    def draft_said(self, requests: Sequence[DraftRequest]) -> float:
        """Return the predicted seconds of drafting, with one pass for each level."""
        levels = range(max((one.depth for one in requests), default=0))
        rows = [sum(one.width if level else 1 for one in requests if one.depth > level) for level in levels]
        return sum(self.hardware.draft(each) for each in rows)

    def engine(self, setting: str) -> Engine:
        """Return a new engine without learned state."""
        loaded = self.loaded
        policy, _ = parse_setting(setting)
        config = engine_config(self.hardware, setting, loaded.engine_config.num_blocks)
        config = msgspec.structs.replace(config, block_size=loaded.engine_config.block_size)
        return Engine(
            config, loaded.model_info, Metered(loaded.executor, "run", self.step_said), time.perf_counter,
            None if policy == "off" else Metered(loaded.drafter, "begin", self.draft_said),
            Speculation(parse_policy(policy), self.hardware.step, self.drafting), orders=ORDERS,
        )  # fmt: skip


def as_served(hardware: Hardware, engine: Engine) -> Hardware:
    """Return the profile scaled to the machine's speed while this engine served, with the measured host
    overhead of steps."""
    report = engine.report()
    assert report.step_parts is not None
    host_seconds = report.step_seconds - report.step_parts.draft - report.step_parts.target
    host, slowdown = host_seconds / report.steps, engine.executor.meter.slowdown
    drafting = engine.drafter.meter.slowdown if engine.drafter else 1.0
    return replace(
        hardware,
        step=lambda tokens, kv: host + slowdown * hardware.step(tokens, kv),
        draft=lambda tokens: drafting * hardware.draft(tokens),
    )


def requests(
    pair: Pair, load: Load, seed: int, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> list[WorkloadRequest]:
    """Return the requests of a workload, with the recorded prompts and output lengths."""
    return [
        replace(one, text=text, prompt=len(prompts[text]), output=min(one.output, lengths[text]))
        for one in workload(pair.hardware, load, seed)
        for text in (one.text % len(prompts),)
    ]


def serve(
    pair: Pair,
    engine: Engine,
    setting: str,
    load: Load,
    trace_requests: Sequence[WorkloadRequest],
    prompts: Sequence[list[int]],
) -> tuple[list[Outcome], dict[str, float]]:
    """Serve the requests live; return the outcome of each request, and the seconds of the parts of steps."""
    targets = goals(pair.hardware, load)
    times: dict[str, list[float]] = defaultdict(list)
    pending, started = list(enumerate(trace_requests)), time.perf_counter()
    while pending or engine.has_work:
        now = time.perf_counter() - started
        while pending and pending[0][1].at <= now:
            number, one = pending.pop(0)
            params = sampling(setting, load, one, targets[one.kind])
            prompt = prompts[one.text]
            engine.handle(Submit(str(number), prompt, params, outputs={0: []}, arrival=started + one.at))
        if not engine.has_work:
            time.sleep(min(0.005, max(0.0, pending[0][1].at - now)))
            continue
        for event in engine.step():
            if isinstance(event, Token):
                times[event.request].append(time.perf_counter() - started)
    split = engine.report().step_parts
    assert split is not None
    served = [outcome(one, times[str(i)], load, targets[one.kind]) for i, one in enumerate(trace_requests)]
    return served, {"scheduling": split.scheduling, "drafting": split.draft, "target": split.target}


def means(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each value."""
    return {name: float(np.mean([one[name] for one in measured])) for name in measured[0]}


def compared(live: float, virtual: float) -> str:
    """Return the live and the simulated value and their ratio, which is left out if the simulated value is
    0."""
    return f"{live:.3f} / {virtual:.3f}" + (f" = {live / virtual:.3f}" if virtual else "")


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
    parser.add_argument("--name", default="slo_live", help="name of the result file")
    args = parse(parser, rates=[8.0], settings=["goodput"], requests=2)
    recording, pair = recorded(), Pair()
    prompts, lengths = questions(pair.loaded, recording)
    serve(
        pair,
        pair.engine("goodput"),
        "goodput",
        Load(),
        [WorkloadRequest(0.0, 0, len(prompts[0]), 16, 0)],
        prompts,
    )  # done once
    measured: dict[tuple[float, str], list[tuple[dict[str, float], dict[str, float]]]] = defaultdict(list)
    for seed in range(args.seeds):
        for rate in args.rates:
            load = Load(rate=rate, requests=args.requests)
            trace_requests = requests(pair, load, seed, prompts, lengths)
            for setting in random.Random(f"{seed} {rate}").sample(args.settings, len(args.settings)):
                engine = pair.engine(setting)
                served, split = serve(pair, engine, setting, load, trace_requests, prompts)
                costs, targets = as_served(pair.hardware, engine), goals(pair.hardware, load)
                played, _ = simulate(costs, recording, setting, load, trace_requests, targets)
                both = figures(served, trace_requests[0].at) | split, figures(played, trace_requests[0].at)
                measured[rate, setting].append(both)
                print(seed, rate, setting, {n: [round(b[n], 3) for b in both] for n in COMPARED}, flush=True)
    records = [
        {"rate": rate, "setting": setting, "live": live, "virtual": virtual,
         "ratio": {name: live[name] / virtual[name] if virtual[name] else None for name in COMPARED}}
        for rate in args.rates
        for setting in args.settings
        for live, virtual in [map(means, zip(*measured[rate, setting], strict=True))]
    ]  # fmt: skip
    hardware = pair.hardware
    rows = [
        [
            f"{r['rate']:g}",
            r["setting"],
            *(compared(r["live"][n], r["virtual"][n]) for n in COMPARED),
        ]
        for r in records
    ]
    table(f"live / virtual; B = {hardware.budget}", ["rate", "setting", *COMPARED], rows)
    profiled = {rows: 1e3 * hardware.step(rows, 0) for rows in pick(EFFORT, QUICK).query_tokens}
    write(args.name, {**vars(args), "B": hardware.budget, "minimum_tpot_ms": 1e3 * minimum(hardware),
                      "step_ms": profiled}, records, PACKAGED_PAIR)  # fmt: skip


if __name__ == "__main__":
    main()
