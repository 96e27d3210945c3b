"""Traces of prompt streams: Stream2LLM's two workloads, generated with its published statistics.

A trace is JSON lines, a query each, in order of `at`:

    {"at": 1.5, "query": 24, "output": 8, "events": [{"after": 0.7, "edits": [["append", 0, 350]]}, …]}

`after` is in seconds from `at`; an edit is append, insert or remove, at an index, with that many tokens. The
prompt is finished with its last event. Arrival times are for one query a second; a replay scales them.
Answers are one token: the published results were measured on instances that only compute prompts.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Edit = tuple[str, int, int]
"""An edit: append, insert or remove; the index of the chunk; its number of tokens."""


@dataclass(frozen=True)
class Event:
    """Edits that arrive together, `after` seconds after the query's start."""

    after: float
    edits: list[Edit]


@dataclass(frozen=True)
class Query:
    """A query and the arrival of its context. `query` and `output` are numbers of tokens."""

    at: float
    query: int
    output: int
    events: list[Event]

    @property
    def retrieval(self) -> float:
        """Return the seconds from the query's start until its context is complete."""
        return self.events[-1].after

    def contexts(self) -> list[list[tuple[int, int]]]:
        """Return the chunks of the context after each event, as pairs of a unique number and the chunk's
        tokens."""
        chunks: list[tuple[int, int]] = []
        number, all_of_them = 0, []
        for event in self.events:
            for kind, index, tokens in event.edits:
                if kind == "remove":
                    chunks.pop(index)
                else:
                    chunks.insert(len(chunks) if kind == "append" else index, (number, tokens))
                    number += 1
            all_of_them.append(list(chunks))
        return all_of_them

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the finished prompt."""
        return sum(tokens for _, tokens in self.contexts()[-1]) + self.query


def _lognormal(rng: random.Random, median: float, mean: float) -> float:
    """Draw from a heavy-tailed distribution with this median and mean."""
    return rng.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))


PAGES = 8.6
"""Mean number of chunks of a crawl. At 1.15 s for each chunk, a crawl takes the published 9.9 s."""


def crawler(count: int, seed: int, scale: float = 1.0, delay: float = 1.0) -> list[Query]:
    """Generate crawls, whose pages are appended as they are found: tokens 5.8k median, 9.1k mean and 28.9k at
    the 95th percentile, 0.7 s median between chunks, 9.9 s mean in total. `scale` multiplies tokens, `delay`
    the seconds.

    Each page has an independent length, of the same distribution, so a crawl of many pages is a long prompt:
    with pages whose standard deviation is 1.7 times their mean, the totals have these percentiles.
    """
    rng = random.Random(seed)
    queries, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(1.0)
        gaps: list[float] = []
        while not gaps or rng.random() < 1 - 1 / PAGES:
            gaps.append(_lognormal(rng, 0.7, 1.15))
        sizes = [max(1, round(scale * _lognormal(rng, 9100 / PAGES / 2, 9100 / PAGES))) for _ in gaps]
        after, events = 0.0, []
        for gap, size in zip(gaps, sizes, strict=True):
            after += delay * gap
            events.append(Event(after, [("append", 0, size)]))
        queries.append(Query(at, max(1, round(scale * 30)), 1, events))
    return queries


def vector_search(count: int, seed: int, scale: float = 1.0, delay: float = 1.0) -> list[Query]:
    """Generate vector searches: the best ten documents so far, replaced as better ones are found. Tokens 10k
    median and 13k mean, 37 ms median between changes, 4.5 s mean in total. Changes move down the list as it
    converges."""
    rng = random.Random(seed)
    queries, at, documents = [], 0.0, 10
    for _ in range(count):
        at += rng.expovariate(1.0)
        size = max(1, round(scale * _lognormal(rng, 10_000, 13_000) / documents))
        total = _lognormal(rng, 3.6, 4.5)
        times, now = [], 0.0
        while now < total:
            now += _lognormal(rng, 0.037, 0.15)
            times.append(delay * min(now, total))
        events = [Event(times[0], [("append", 0, size) for _ in range(documents)])]
        for number, after in enumerate(times[1:], 1):
            progress = number / len(times)
            index = min(documents - 1, int(documents * rng.random() ** (1 - 0.8 * progress)))
            events.append(Event(after, [("remove", documents - 1, 0), ("insert", index, size)]))
        queries.append(Query(at, max(1, round(scale * 30)), 1, events))
    return queries


TRACES = {"append": crawler, "update": vector_search}


def write(path: Path, queries: Sequence[Query]) -> None:
    """Write a trace to a file."""
    path.write_text("".join(json.dumps(asdict(query)) + "\n" for query in queries), encoding="utf-8")


def read(path: Path) -> list[Query]:
    """Read a trace from a file. Raises ValueError naming the invalid line."""
    queries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            events = [
                Event(
                    float(event["after"]), [(kind, int(at), int(size)) for kind, at, size in event["edits"]]
                )
                for event in entry["events"]
            ]
            query = Query(float(entry["at"]), int(entry["query"]), int(entry["output"]), events)
            query.contexts()
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        queries.append(query)
    return queries
