"""Engines in virtual time with idle prompt streams: all other requests are served, in a bounded number of
steps.

A trial draws the engine's limits, its order, eviction and drafter; opens streams that are edited a few times
and then left alone; and submits requests of all priorities, some of which are aborted.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import get_args

from streamserve.baselines.orders import ORDERS
from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.protocol.config import Eviction
from streamserve.protocol.messages import Cancel, Edit
from streamserve.protocol.sampling import SamplingParams, Slo
from tests.engine.drive import Collected, expected, make_engine, submit

MAX_MODEL_LEN = 140
REQUESTS = 30


@dataclass
class IdleStream:
    """A client that opens a prompt stream, edits it `edits` times, and never finishes it."""

    name: str
    prompt: list[int]
    edits: int
    version: int = 0

    def edit(self, rng: random.Random, arrival: float) -> Edit:
        self.version += 1
        retained = rng.randint(0, len(self.prompt))
        added = _piece(rng, rng.randint(0, MAX_MODEL_LEN - 20 - retained))
        self.prompt = self.prompt[:retained] + added
        return Edit(self.name, 0, self.version, retained, added, arrival=arrival)


@dataclass(frozen=True)
class Pending:
    """A request of at most `tokens` tokens, prompt and outputs of all choices together."""

    prompt: list[int]
    params: SamplingParams
    tokens: int
    aborted: bool


def trial(seed: int) -> Counter[str]:
    """Run one engine until all requests have ended and no stream has tokens left to compute. Raises
    AssertionError for a wrong text, and for more steps than `_most_steps` allows."""
    rng = random.Random(seed)
    engine = _engine(rng)
    collected, count = Collected(), Counter[str](requests=REQUESTS)
    streams = [_open(rng, engine, number) for number in range(rng.choice((6, 24)))]
    for _ in range(rng.choice((0, 50, 300))):
        if engine.has_work:
            collected.take(engine.step())
    pending = _submit(rng, engine)
    bound = _most_steps(engine, streams, pending)
    ended: dict[str, int] = {}
    for step in range(bound):
        _disturb(rng, engine, streams, pending, collected, step)
        if not engine.has_work:
            break
        collected.take(engine.step())
        for name in pending.keys() - ended.keys():
            if not engine.scheduler.of(name):
                ended[name] = step
    assert not engine.has_work, f"not done after {bound} steps"
    assert not pending.keys() - ended.keys(), f"{sorted(pending.keys() - ended.keys())} have no end"
    for name, request in pending.items():
        for choice in () if request.aborted else range(request.params.n):
            text = expected(request.prompt, request.params, choice, MAX_MODEL_LEN)
            assert collected.tokens[name, choice] == text, name
    report = engine.report()
    count["preempted"], count["swapped"] = report.preemptions, report.evictions.swaps
    count["held"] = sum(len(s.kv.blocks) for s in engine.scheduler.sequences.values())
    count["steps"] = max(ended.values())
    count["percent_of_bound"] = 100 * count["steps"] // bound
    return count


def _engine(rng: random.Random) -> Engine:
    config = EngineConfig(
        num_blocks=rng.choice((40, 80, 150, 300)),
        block_size=4,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice((3, 4, 8, 64)),
        max_num_batched_tokens=rng.choice((8, 24, 64, 512)),
        max_chunk=rng.choice((3, 12, 64)),
        enable_prefix_caching=rng.random() < 0.8,
        order=rng.choice(tuple(ORDERS)),
        eviction=rng.choice(get_args(Eviction)),
        swap_blocks=rng.choice((0, 20, 400)),
        draft_nodes=4,
    )
    return make_engine(config, draft_model=rng.choice((None, None, 0.7)))


def _piece(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(90) for _ in range(length)]


def _open(rng: random.Random, engine: Engine, number: int) -> IdleStream:
    stream = IdleStream(f"idle{number}", _piece(rng, rng.randint(0, MAX_MODEL_LEN - 20)), rng.randint(0, 3))
    params = SamplingParams(max_tokens=4, n=rng.choice((1, 3)), temperature=0.0)
    message = submit(
        stream.name, stream.prompt, params, open=True, priority=rng.choice((-5, 0, 5)),
        answer_early=rng.random() < 0.2, tail=min(rng.choice((0, 3)), len(stream.prompt)),
    )  # fmt: skip
    assert engine.handle(message) == []
    return stream


def _submit(rng: random.Random, engine: Engine) -> dict[str, Pending]:
    shared = _piece(rng, 30)
    pending = {}
    for number in range(REQUESTS):
        prompt = shared[: rng.choice((0, 0, 17, 30))] + _piece(rng, rng.randint(1, 50))
        params = SamplingParams(
            max_tokens=rng.randint(1, 30), n=rng.choice((1, 3)), temperature=0.0,
            slo=Slo(tpot_ms=rng.choice((None, None, 2e3)), ttft_ms=rng.choice((None, None, 2e4))),
        )  # fmt: skip
        name, tokens = f"r{number}", len(prompt) + params.n * params.max_tokens
        pending[name] = Pending(prompt, params, tokens, rng.random() < 0.1)
        assert (
            engine.handle(submit(name, prompt, params, 1.0 + number, priority=rng.choice((-5, 0, 5)))) == []
        )
    return pending


def _most_steps(engine: Engine, streams: list[IdleStream], pending: dict[str, Pending]) -> int:
    """Return the maximum number of steps of the trial. A step computes at least one token, and a token may be
    recomputed after an eviction, so four steps are allowed for each token of a request, a stream or an
    edit."""
    tokens = sum(request.tokens for request in pending.values())
    edits = sum(1 + stream.edits for stream in streams) * MAX_MODEL_LEN
    return 4 * (tokens + edits)


def _disturb(
    rng: random.Random,
    engine: Engine,
    streams: list[IdleStream],
    pending: dict[str, Pending],
    collected: Collected,
    step: int,
) -> None:
    """Edit a stream at random, and abort the requests that are marked as aborted."""
    if rng.random() < 0.05 and (editing := [s for s in streams if s.version < s.edits]):
        collected.take(engine.handle(rng.choice(editing).edit(rng, float(step))))
    if step == 20:
        for name, request in pending.items():
            if request.aborted:
                collected.take(engine.handle(Cancel(name)))
