"""Prompt streams on one stream pair: time to first token compared with sending at finish and with a unified
worker, and what draft tokens and latency targets add.

The crawler's trace of papers/streaming.py, with answers of several tokens, at load 0.8 of the measured
capacity of one worker. Virtual time runs the real engine and fleet on papers/streaming.py's cost model of two
H200. A pair has one such machine for each half; a unified worker has one machine in total. Each seed is one
trace, and each row is compared with another on the same trace: median of the ratios, with a bootstrap
interval over the seeds.

    python -m benchmarks.papers.pair_streams --seeds 6            # in virtual time
    python -m benchmarks.papers.pair_streams --live --rounds 3    # one pair and one worker of this machine
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from benchmarks.options import parse, results_folder
from benchmarks.papers.arriving_replay import VOCABULARY, Machine, ReplayResult, Server, virtual
from benchmarks.papers.arriving_traces import TRACES, Query
from benchmarks.papers.pairs_live import prompt, serving, times
from benchmarks.papers.streaming import ENGINE, PAPER, SCALE, measured_capacity
from benchmarks.report import PACKAGED_PAIR, SIMULATED, table, write
from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.fleet.worker_state import pairs, unified
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.config import Order
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.sampling import NO_SLO, SamplingParams, Slo
from streamserve.simulate.drafter import SimulatedDrafter
from streamserve.simulate.executor import CostExecutor, next_token
from streamserve.text.output import ChoiceDelta

LOAD = 0.8
OUTPUT = 32
"""Number of tokens of an answer."""
SLO = Slo(ttft_ms=2000.0, tpot_ms=40.0)
TPOT = Slo(tpot_ms=40.0)
SERVICE_SECONDS = 1e-3
"""Seconds that a draft service takes to answer."""
ACCURACY = 0.7
"""Probability that a draft token is the target's."""
DRAFT_SHARE = 0.05
"""A draft pass takes this share of the target's time for a token."""
COMPARED = (
    ("pair", "pair, sent at finish", "ttft_p50"),
    ("pair", "pair, sent at finish, by arrival", "ttft_p50"),
    ("pair", "unified", "ttft_p50"),
    ("pair", "unified", "ttft_p95"),
    ("pair, TPOT targets", "pair", "ttft_p50"),
    ("pair, TPOT targets", "pair", "ttft_p95"),
    ("pair, draft service and TPOT targets", "pair", "ttft_p50"),
    ("pair, draft service and TPOT targets", "pair", "ttft_p95"),
    ("pair, draft service and TPOT targets", "pair", "second_p50"),
    ("pair, draft service and TPOT targets", "pair", "tpot_p50"),
    ("pair, targets", "pair", "ttft_p50"),
    ("pair, targets", "pair", "ttft_p95"),
    ("pair, targets", "pair", "tpot_p50"),
    ("pair, draft and targets", "pair", "ttft_p50"),
    ("pair, draft and targets", "pair", "ttft_p95"),
    ("pair, draft and targets", "pair", "second_p50"),
    ("pair, draft and targets", "pair", "tpot_p50"),
    ("pair, draft and targets", "unified, draft and targets", "ttft_p50"),
)
"""Pairs of rows that are compared, and the compared values."""


def hardware() -> Machine:
    """Return the costs of one worker, and of the wire between two workers."""
    base = PAPER.machine()
    tokens, kv_tokens = (1, 64, 256, 1024), (0, 1_000_000)
    curve = CostCurve(
        tokens=tokens,
        kv_bytes=kv_tokens,
        seconds=tuple(tuple(base.step(count, context) for context in kv_tokens) for count in tokens),
        pair_seconds=0.0,
        token_seconds=PAPER.token / SCALE,
        byte_seconds=1e-8,
    )
    return replace(base, wire=PAPER.block / SCALE, curve=curve)


def drafter(executor: CostExecutor) -> SimulatedDrafter:
    """Return a draft model."""
    return SimulatedDrafter(
        executor, ACCURACY, cost=lambda tokens: 4e-4 + DRAFT_SHARE * PAPER.token / SCALE * tokens
    )


class ServiceDrafter:
    """A drafter without KV on the worker, like a draft service: it answers the requests of a step within
    `SERVICE_SECONDS`, and reads prompts on another machine."""

    group = None

    def __init__(self, executor: CostExecutor) -> None:
        self._executor = executor
        self._random = random.Random(0)
        self._trees: dict[int, TokenTree] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._trees = {request.id: self._draft(request) for request in requests}
        self._executor.seconds += SERVICE_SECONDS if requests else 0.0

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        return self._trees

    def release(self, ids: Sequence[int]) -> None:
        pass

    def _draft(self, request: DraftRequest) -> TokenTree:
        """Draft a chain in which each token equals the target's token with probability ACCURACY."""
        tokens = list(request.tokens[: request.length])
        chain = [tokens[-1]]
        for _ in range(min(request.depth, request.nodes)):
            token = next_token(np.array(tokens, np.int64), request.params, request.choice, VOCABULARY)
            token = token if self._random.random() < ACCURACY else (token + 1) % VOCABULARY
            tokens.append(token)
            chain.append(token)
        likely = tuple(ACCURACY**depth for depth in range(len(chain)))
        return TokenTree(tuple(chain), tuple(range(-1, len(chain) - 1)), likely, likely)


ROWS: dict[str, tuple[Server, bool, Order]] = {
    "pair": (Server(pairs(1)), True, "slo"),
    "pair, sent at finish": (Server(pairs(1)), False, "slo"),
    "pair, sent at finish, by arrival": (Server(pairs(1)), False, "arrival"),
    "unified": (Server(unified(1)), True, "slo"),
    "pair, TPOT targets": (Server(pairs(1), slo=TPOT), True, "slo"),
    "pair, targets": (Server(pairs(1), slo=SLO), True, "slo"),
    "pair, draft and targets": (Server(pairs(1), drafter, SLO), True, "slo"),
    "pair, draft service and TPOT targets": (Server(pairs(1), ServiceDrafter, TPOT), True, "slo"),
    "unified, draft and targets": (Server(unified(1), drafter, SLO), True, "slo"),
}
"""The rows: the kind of server, whether prompts are streamed, and the service order."""


def figures(done: ReplayResult) -> dict[str, float]:
    """Return the reported results of a run."""
    values = {"ttft": done.ttft, "second": done.second, "tpot": done.tpot}
    measured = {
        f"{name}_{label}": _quantile(seconds, share)
        for name, seconds in values.items()
        for label, share in (("p50", 0.5), ("p95", 0.95))
    }
    transfers = [report.transfer for report in done.reports if report.transfer]
    drafts = [report.speculation for report in done.reports if report.speculation]
    sent = sum(one.sent_bytes for one in transfers)
    return measured | {
        "completion": done.completion,
        "arriving_share": sum(one.arriving_bytes for one in transfers) / max(sent, 1),
        "deferred": float(sum(one.deferred for one in transfers)),
        "accepted": float(sum(one.accepted for one in drafts)),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def simulate(seed: int, count: int, known: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Simulate the rows that are not yet in `known` on the trace of one seed; return all rows."""
    machine = hardware()
    queries = [replace(query, output=OUTPUT) for query in TRACES["append"](count, seed, SCALE)]
    rate = LOAD * measured_capacity(queries) / statistics.fmean(query.tokens for query in queries)
    engine = msgspec.structs.replace(ENGINE, num_blocks=round(PAPER.blocks * SCALE), eviction="recompute")
    rows = {}
    for name, (server, streaming, order) in ROWS.items():
        ordered = msgspec.structs.replace(engine, order=order)
        rows[name] = known.get(name) or figures(
            virtual(queries, rate, ordered, machine, streaming, server=server)
        )
    return rows


LIVE_ROWS: dict[str, tuple[dict[str, object], bool]] = {
    "pair": ({"pairs": 1, "threads": 1}, True),
    "pair, sent at finish": ({"pairs": 1, "threads": 1}, False),
    "pair, sent at finish, by arrival": ({"pairs": 1, "threads": 1, "order": "arrival"}, False),
    "unified": ({"threads": 1}, True),
    "pair, draft and targets": ({"pairs": 1, "threads": 1, "draft": "auto"}, True),
}
"""Rows on this machine: the server's settings, and whether prompts are streamed."""
LIVE_SCALE, LIVE_DELAY, LIVE_TOKENS = 0.05, 0.1, 1800
"""Factors for the trace's tokens and its seconds, and the maximum tokens of a prompt."""


async def replay(
    llm: AsyncLLM, queries: Sequence[Query], rate: float, streaming: bool, slo: Slo
) -> ReplayResult:
    """Replay a trace in real time, without HTTP."""
    started = time.monotonic()

    async def one(number: int, query: Query) -> list[float]:
        rng = random.Random(number)
        begun, name = started + query.at / rate, f"q{number}"
        ids = prompt(rng, query.tokens)
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, slo=slo)
        await _until(begun if streaming else begun + query.retrieval)
        seen: list[float] = []
        if streaming:
            stream = await llm.open(params, request_id=name)
            length = 0
            for event in query.events[:-1]:
                await _until(begun + event.after)
                length += sum(tokens for _, _, tokens in event.edits)
                await stream.edit(ids[:length] + ids[-query.query :], query.query)
            await _until(begun + query.retrieval)
            items = stream.answer(ids, llm.complete(ids, params))
        else:
            items = llm.submit(ids, params, request_id=name)
        async with aclosing(items) as updates:
            async for item in updates:
                if isinstance(item, ChoiceDelta):
                    seen += [time.monotonic()] * len(item.tokens)
        if streaming:
            await stream.close()
        return [at - begun - query.retrieval for at in seen]

    answers = await asyncio.gather(*(one(number, query) for number, query in enumerate(queries)))
    llm_report = llm.report()
    return ReplayResult(
        [seen[0] for seen in answers],
        time.monotonic() - started,
        (llm_report,) if llm_report else (),
        tuple(seen[1] - seen[0] for seen in answers),
        tuple((seen[-1] - seen[0]) / (len(seen) - 1) for seen in answers),
    )


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - time.monotonic()))


async def live_round(model: str, seed: int, count: int) -> dict[str, dict[str, float]]:
    """Run all live rows on the trace of one seed, at a rate measured with the first row."""
    drawn = TRACES["append"](3 * count, seed, LIVE_SCALE, LIVE_DELAY)
    queries = [query for query in drawn if query.tokens <= LIVE_TOKENS][:count]
    queries = [replace(query, at=float(number)) for number, query in enumerate(queries)]
    mean, rate = statistics.fmean(query.tokens for query in queries), 0.0
    rows = {}
    for name, (options, streaming) in LIVE_ROWS.items():
        async with serving(model, **options) as llm:
            for number in range(3):  # the first touch of memory is slow
                warm = await times(llm, prompt(random.Random(number), round(mean)), 2, f"warm{number}")
            rate = rate or LOAD / (warm[1] - warm[0])
            slo = SLO if "targets" in name else NO_SLO
            rows[name] = figures(await replay(llm, queries, rate, streaming, slo))
    return rows


def compare(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, list[float]]:
    """Return for each comparison the median ratio, and its 95 % bootstrap interval over the rounds."""
    compared = {}
    for name, base, key in COMPARED:
        if any(name not in one or base not in one for one in rounds):
            continue
        ratios = [one[name][key] / one[base][key] for one in rounds]
        rng = random.Random(0)
        medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
        compared[f"{name} / {base}: {key}"] = [statistics.median(ratios), medians[50], medians[1949]]
    return compared


def report(
    file: str, settings: dict[str, str], rounds: Sequence[dict[str, Any]], models: Sequence[str]
) -> None:
    """Print the medians over the rounds and the comparisons, and write them."""
    complete = set.intersection(*(set(one) for one in rounds))
    rows = {
        name: {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        for name in rounds[0]
        if name in complete
    }
    keys = list(next(iter(rows.values())))
    table(file, ["row", *keys], [[name, *(f"{row[key]:.4g}" for key in keys)] for name, row in rows.items()])
    compared = compare(rounds)
    ratios = [[name, *(f"{value:.3f}" for value in values)] for name, values in compared.items()]
    table("ratios", ["", "median", "low", "high"], ratios)
    write(file, settings, {"rows": rows, "ratios": compared, "rounds": list(rounds)}, models)


def known(file: str) -> list[dict[str, Any]]:
    """Return the rounds that a result file has."""
    path = results_folder() / f"{file}.json"
    return list(json.loads(path.read_text())["figures"]["rounds"]) if path.exists() else []


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first-seed", type=int, default=6)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--resume", action="store_true", help="keep the rounds of the result file")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="number of live rounds")
    parser.add_argument("--model", default="embedded")
    args = parse(parser, seeds=1, queries=4, rounds=1)
    settings = {key: str(value) for key, value in vars(args).items() if key != "resume"}
    file = "pair_streams_live" if args.live else "pair_streams"
    rounds = known(file) if args.resume else []
    for number in range(args.rounds if args.live else args.seeds):
        before = rounds[number] if number < len(rounds) else {}
        if set(before) >= set(LIVE_ROWS if args.live else ROWS):
            continue
        if args.live:
            after = asyncio.run(live_round(args.model, number, args.queries))
        else:
            after = simulate(args.first_seed + number, args.queries, before)
        rounds[number : number + 1] = [after]
        report(file, settings, rounds, PACKAGED_PAIR if args.live else SIMULATED)


if __name__ == "__main__":
    main()
