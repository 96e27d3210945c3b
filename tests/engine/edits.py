"""Clients whose prompts arrive in parts and change, and a loop that serves them."""

import random
from collections import Counter

from streamserve.engine.engine import Engine
from streamserve.protocol.messages import Edit
from streamserve.protocol.sampling import SamplingParams
from tests.engine.drive import Collected, submit

PARAMS = SamplingParams(temperature=0, max_tokens=6)


def opened(prompt, name="r", params=PARAMS, **fields):
    return submit(name, prompt, params, open=True, **fields)


class StreamClient:
    """A client that opens a prompt stream, edits it at random and finishes it."""

    def __init__(self, rng: random.Random, number: int, limit: int) -> None:
        self.rng, self.name, self.limit = rng, f"r{number}", limit
        self.prompt = self._piece(rng.randint(0, 24))
        self.edits = rng.randint(0, 6)
        self.version = 0
        self.early = rng.random() < 0.4
        self.params = SamplingParams(
            n=rng.choice((1, 1, 3)), temperature=rng.choice((0.0, 1.0)), seed=number,
            max_tokens=rng.randint(1, 12),
        )  # fmt: skip

    def _piece(self, length: int) -> list[int]:
        # Few different tokens in aligned runs: prompts share prefixes, and edits restore earlier ones.
        return [(index * 7) % 13 if self.rng.random() < 0.97 else 90 for index in range(length)]

    def start(self):
        return opened(
            list(self.prompt), self.name, self.params, arrival=self.rng.random() * 9,
            answer_early=self.early, tail=self._tail(),
        )  # fmt: skip

    def _tail(self) -> int:
        return self.rng.choice((0, min(len(self.prompt), 5)))

    def edit(self, arrival: float) -> Edit:
        """Return the next edit; the last edit finishes the prompt."""
        self.version += 1
        last = self.version > self.edits
        retained = self.rng.choice(
            (len(self.prompt), len(self.prompt), self.rng.randint(0, len(self.prompt)))
        )
        added = self._piece(self.rng.randint(0, 20))
        if last and self.rng.random() < 0.5:
            retained, added = len(self.prompt), []
        before, self.prompt = self.prompt, (self.prompt[:retained] + added)[: self.limit]
        if last and not self.prompt:
            self.prompt = [1]
        while retained and self.prompt[:retained] != before[:retained]:
            retained -= 1
        retained = min(retained, len(self.prompt))
        return Edit(
            self.name,
            0,
            self.version,
            retained,
            self.prompt[retained:],
            finish=last,
            tail=self._tail(),
            arrival=arrival,
        )

    @property
    def finished(self) -> bool:
        return self.version > self.edits


def run_scripts(rng: random.Random, engine: Engine, clients: list[StreamClient]) -> tuple[Counter, Collected]:
    """Let the clients edit between and during steps until all requests have finished."""
    collected, count = Collected(), Counter(scripts=len(clients))
    for client in clients:
        collected.take(engine.handle(client.start()))
    run = engine.executor.run

    def run_and_edit(plan):
        result = run(plan)
        if rng.random() < 0.2 and (open_scripts := [client for client in clients if not client.finished]):
            count["mid_step"] += 1
            assert engine.handle(rng.choice(open_scripts).edit(10.0)) == []
        return result

    engine.executor.run = run_and_edit
    for step in range(20_000):
        open_scripts = [client for client in clients if not client.finished]
        if open_scripts and (rng.random() < 0.15 or not engine.has_work or engine.stalled):
            collected.take(engine.handle(rng.choice(open_scripts).edit(10.0 + step)))
        if engine.has_work:
            collected.take(engine.step())
        elif not open_scripts:
            break
    engine.executor.run = run
    assert not engine.scheduler.sequences, "all have finished"
    while engine.has_work:
        engine.step()
    pool, swap = engine.scheduler.tables.pool, engine.scheduler.swap
    assert (pool.free, swap.free) == (pool.size, swap.size)
    report = engine.report()
    count["invalidated"] = report.streams.invalidated
    count["withdrawn"] = report.streams.withdrawn
    count["swaps"] = report.evictions.swaps
    count["swapped_back"] = report.evictions.blocks_back
    count["recomputes"] = report.evictions.recomputes
    count["copies"] = report.copies_on_write
    return count, collected
