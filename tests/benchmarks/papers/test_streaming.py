"""Traces of prompt streams have the published statistics; they can be written, read and replayed."""

import statistics
from pathlib import Path

import pytest

from benchmarks.papers import arriving_traces
from benchmarks.papers.arriving_traces import TRACES, Event, Query
from benchmarks.papers.streaming import DEFAULT, HARDWARE, NAIVE, NONE, SCALE, TIGHT, figures, run, scaled
from tests.conftest import Scale

PUBLISHED = {"append": (9100, 5800, 28_900, 9.9, 0.7007), "update": (13_000, 10_000, 31_000, 4.5, 0.0367)}
"""Tokens (mean, median, 95th percentile), mean seconds of retrieval, median seconds between chunks."""


@pytest.mark.parametrize("kind", TRACES)
def test_statistics(kind: str) -> None:
    queries = TRACES[kind](1500, seed=1)
    tokens = sorted(query.tokens for query in queries)
    gaps = [
        after.after - before.after
        for query in queries
        for before, after in zip(query.events, query.events[1:], strict=False)
    ]
    measured = (
        statistics.fmean(tokens),
        statistics.median(tokens),
        tokens[int(0.95 * len(tokens))],
        statistics.fmean(query.retrieval for query in queries),
        statistics.median(gaps),
    )
    for value, expected in zip(measured, PUBLISHED[kind], strict=True):
        assert value == pytest.approx(expected, rel=0.15), (measured, PUBLISHED[kind])


def test_a_factor_scales_tokens_and_another_the_delays() -> None:
    plain, small = TRACES["append"](50, 3), TRACES["append"](50, 3, scale=0.1, delay=10.0)
    assert sum(query.tokens for query in small) == pytest.approx(sum(q.tokens for q in plain) / 10, rel=0.05)
    assert [query.retrieval for query in small] == pytest.approx([10 * query.retrieval for query in plain])


@pytest.mark.parametrize("kind", TRACES)
def test_files(kind: str, tmp_path: Path) -> None:
    queries = TRACES[kind](5, seed=2)
    arriving_traces.write(tmp_path / "trace.jsonl", queries)
    assert [query.contexts() for query in arriving_traces.read(tmp_path / "trace.jsonl")] == [
        query.contexts() for query in queries
    ]


@pytest.mark.parametrize(
    "line",
    ["", "{}", '{"at": 0, "query": 1, "output": 1, "events": [{"after": 0, "edits": [["remove", 3, 0]]}]}'],
)
def test_invalid_lines_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1"):
        arriving_traces.read(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("policy", [NONE, NAIVE, DEFAULT], ids=lambda policy: policy.name)
def test_replay(policy: object) -> None:
    """When the query is streamed, only its last chunk remains to be computed at the end."""
    events = [Event(0.5, [("append", 0, 1000)]), Event(3.0, [("append", 0, 40)])]
    done = run([Query(0.0, 10, 4, events)], 1.0, policy, 1000)  # type: ignore[arg-type]
    (ttft,) = done.ttft
    assert (ttft > 0.1) == (policy is NONE)


def test_a_users_trace_is_scaled_like_the_machine() -> None:
    query = Query(0.0, 16, 4, [Event(0.5, [("append", 0, 800)]), Event(1.0, [("remove", 0, 0)])])
    assert scaled(query).events[0].edits == [("append", 0, 800 * SCALE)]
    assert scaled(query).query == 16 * SCALE


def test_prompts_that_do_not_fit_are_swapped_where_that_is_cheap_and_recomputed_where_not(
    scale: Scale,
) -> None:
    queries = TRACES["append"](scale.pick(24, 40), 3, SCALE, delay=10.0)
    fast, slow = (
        figures(run(queries, 4.0, DEFAULT, 4000, hardware)) for hardware in (HARDWARE[0], HARDWARE[1])
    )
    assert fast["swaps"] > fast["recomputes"]
    assert slow["recomputes"] > slow["swaps"]


def test_replaced_prompts_are_swapped_or_recomputed_by_what_is_expected_to_survive(scale: Scale) -> None:
    queries = TRACES["update"](scale.pick(12, 24), 3, SCALE, delay=30.0)
    divided = figures(run(queries, 2.0, DEFAULT, scale.pick(6000, 12_000), TIGHT[1]))
    assert min(divided["swaps"], divided["recomputes"]) > 0
