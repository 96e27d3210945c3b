"""Replay a trace of prompt streams: through the engine in virtual time, or against a server."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.papers.arriving_traces import Query
from streamserve.client import AsyncPromptStream
from streamserve.contracts.cost import SwapCost
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import Drafter
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Deliver, Open
from streamserve.fleet.worker_state import Topology
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.messages import ModelInfo, Token
from streamserve.protocol.reports import Report
from streamserve.protocol.sampling import NO_SLO, SamplingParams, Slo
from streamserve.simulate.executor import Cost, CostExecutor
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from streamserve.text.retokenize import common_prefix

VOCABULARY = 30_000


@dataclass(frozen=True)
class ReplayResult:
    """Seconds from each prompt's end to its first token, and from the start of the run to its last token. If
    answers have more tokens: also the seconds to the `second` token, and for each token after the first
    (`tpot`)."""

    ttft: list[float]
    completion: float
    reports: tuple[Report, ...] = ()
    second: tuple[float, ...] = ()
    tpot: tuple[float, ...] = ()


def merged(runs: Sequence[ReplayResult]) -> ReplayResult:
    """Merge several runs: all their times to first token, and the sum of their durations."""
    ttft = [seconds for run in runs for seconds in run.ttft]
    reports = tuple(report for run in runs for report in run.reports)
    return ReplayResult(ttft, sum(run.completion for run in runs), reports)


@dataclass(frozen=True)
class Machine:
    """The costs of virtual time: seconds of a step by query tokens and context, of swapping blocks, and of
    sending a block to another worker. `curve` has the step costs that workers report."""

    step: Cost
    swap: SwapCost
    wire: float = 0.0
    curve: CostCurve | None = None


@dataclass(frozen=True)
class Server:
    """The simulated server: its workers, their `drafter` (which has KV), and the `slo` of requests."""

    topology: Topology = field(default_factory=Topology)
    drafter: Callable[[CostExecutor], Drafter] | None = None
    slo: Slo = NO_SLO


def virtual(
    queries: Sequence[Query],
    rate: float,
    engine: EngineConfig,
    machine: Machine,
    streaming: bool = True,
    query_last: bool = True,
    server: Server | None = None,
) -> ReplayResult:
    """Run the engine and the fleet of a `server`, by default one worker, on `queries`, `rate` a second.
    Without `streaming` each prompt is sent when it is complete. Without `query_last` the query after the
    context is computed after every event."""
    server = server or Server()
    model = ModelInfo(
        architecture="simulated",
        parameters=1,
        vocab_size=VOCABULARY,
        max_model_len=engine.max_model_len,
        eos_token_ids=(),
        weight_bytes=1,
        dtype="float32",
        row_invariant=True,
        fingerprint="simulated",
    )
    fleet = FleetConfig(server.topology, max_requests=1 << 20, max_waiting_tokens=1 << 40)
    spec = WorkerSpec(
        engine, model, machine.step, swap_cost=machine.swap, start_seconds=0.0, wire_seconds=machine.wire,
        drafter=server.drafter, groups=2 if server.drafter else 1, curve=machine.curve,
    )  # fmt: skip
    simulation = Simulation(fleet, spec)
    ends: dict[str, float] = {}
    for number, query in enumerate(queries):
        name, at = f"q{number}", query.at / rate
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=query.output, slo=server.slo)
        ends[name] = at + query.retrieval
        prompts = _prompts(query, number)
        if not streaming:
            simulation.at(ends[name], Open(name, prompts[-1], params))
            continue
        before: list[int] = []
        simulation.at(at, Open(name, [], params, open=True))
        for version, (event, ids) in enumerate(zip(query.events, prompts, strict=True), 1):
            retained, last = common_prefix(before, ids), version == len(prompts)
            tail = query.query if query_last and not last else 0
            edit = ClientEdit(name, version, retained, ids[retained:], last, params if last else None, tail)
            simulation.at(at + event.after, edit)
            before = ids
    tokens: dict[str, list[float]] = {}
    completion = 0.0
    for received in simulation.run():
        if not isinstance(received.message, Deliver):
            raise RuntimeError(f"{received.message.request} was refused: {received.message.error}")
        for event in received.message.events:
            if isinstance(event, Token):
                tokens.setdefault(event.request, []).append(received.time)
                completion = received.time
    reports = tuple(worker.engine.report() for worker in simulation.workers.values())
    ttft = [tokens[name][0] - end for name, end in ends.items()]
    long = [seen for seen in tokens.values() if len(seen) > 1]
    second = tuple(seen[1] - seen[0] for seen in long)
    tpot = tuple((seen[-1] - seen[0]) / (len(seen) - 1) for seen in long)
    return ReplayResult(ttft, completion, reports, second, tpot)


def _prompts(query: Query, seed: int) -> list[list[int]]:
    """Return the prompt's token ids after each event."""
    rng = random.Random(seed)
    query_tokens = [rng.randrange(VOCABULARY) for _ in range(query.query)]
    chunks: dict[int, list[int]] = {}
    prompts = []
    for context in query.contexts():
        for made, tokens in context:
            if made not in chunks:
                chunks[made] = [rng.randrange(VOCABULARY) for _ in range(tokens)]
        prompts.append([token for made, _ in context for token in chunks[made]] + query_tokens)
    return prompts


WORDS = ["the", "sea", "wind", "ship", "town", "bridge", "market", "stone", "river", "road", "light"]


def _words(count: int, rng: random.Random) -> str:
    """Return text of about `count` tokens."""
    return "".join(" " + rng.choice(WORDS) for _ in range(count))


async def live(
    queries: Sequence[Query], rate: float, url: str, streaming: bool = True, delay: float = 1.0
) -> ReplayResult:
    """Replay against a server, in real time. A chunk of n tokens is n words."""
    started = time.perf_counter()
    done: list[float] = []

    async def one(query: Query, seed: int) -> float:
        rng = random.Random(seed)
        begun = started + query.at / rate
        await _until(begun)
        question = _words(query.query, rng)
        fields = {"query": question, "temperature": 0, "max_tokens": query.output, "ignore_eos": True}
        texts: list[str] = []
        stream = AsyncPromptStream(url, **fields)
        if streaming:
            await stream.open()
        for event in query.events:
            await _until(begun + delay * event.after)
            operations = []
            for kind, index, tokens in event.edits:
                text = _words(tokens, rng)
                if kind == "remove":
                    texts.pop(index)
                    operations.append({"op": "remove", "index": index})
                else:
                    position = len(texts) if kind == "append" else index
                    texts.insert(position, text)
                    operations.append({"op": "insert", "index": position, "text": text})
            if streaming:
                await stream.edit(*operations)
        # The query's time is the planned time: a late client counts as waiting.
        end = begun + delay * query.retrieval
        if not streaming:
            await stream.open()
            await stream.edit({"op": "append", "text": "".join(texts)})
        first = 0.0
        async for _ in stream.answer():
            first = first or time.perf_counter()
        first = first or time.perf_counter()  # not every token has text
        done.append(time.perf_counter() - started)
        await stream.close()
        return first - end

    ttft = await asyncio.gather(*(one(query, seed) for seed, query in enumerate(queries)))
    return ReplayResult(list(ttft), max(done))


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - time.perf_counter()))


async def capacity(url: str, words: int, count: int = 12) -> float:
    """Return the words a second that a server computes if all requests are prompts of `words` words."""
    rng = random.Random(0)
    bodies = [{"prompt": _words(words, rng), "max_tokens": 1, "temperature": 0} for _ in range(count)]
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        started = time.perf_counter()
        replies = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    for reply in replies:
        reply.raise_for_status()
    return count * words / (time.perf_counter() - started)
