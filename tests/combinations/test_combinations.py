"""Everything with everything: rows of the covering array and random three-way combinations in virtual time.

In each row every text is the model's, nothing is leaked, and every value took effect: its counter is above 0.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from random import Random

import pytest

from tests.combinations.axes import axes, refusal, shown, simulated
from tests.combinations.covering import Covering, Row, cover, draw_three
from tests.conftest import Scale
from tests.simulate.settings_fuzz import trial

REQUESTS = 30
FIXED = {
    "requests": REQUESTS, "deaths": 0, "cancelling": 0.0, "accuracy": 0.9, "late": 0.1, "max_requests": 1024,
    "max_waiting_tokens": 1 << 20, "max_num_batched_tokens": 64, "max_chunk": 12, "max_num_seqs": 8,
    "draft_nodes": 32, "wire_seconds": 0.003, "prefill_share": None, "slo_admission": False,
    "enable_prefix_caching": True, "preempt_every": 0, "continue_tokens": 64,
}  # fmt: skip
"""Settings that all rows share, so that rows differ only in their values and each value has an occasion to
act."""


SHOWN = (
    "accepted", "preempted", "swapped", "handed_over", "edits", "withdrawn", "adapted", "served_trees",
    "read_ahead", "shared_trees",
)  # fmt: skip


STOOD_STILL: dict[str, tuple[int, Row]] = {
    # In this row a sequence took the free blocks that hold its KV in each step, and was evicted for a
    # transfer reservation.
    "a cached sequence did not yield": (1972053608, {
        "order": "mcps", "draft": "service", "memory": "swap", "targets": "slo", "prompt": "append",
        "placement": "pairs", "router": "flowguard-as-published", "adapters": "none",
        "policy": "specustream-as-published",
    }),
    # In this row a sequence held blocks of the decode worker that other sequences, which kept admission
    # closed, waited for.
    "a holder was not swapped in while admission was closed": (2390652233, {
        "order": "mcps", "draft": "none", "memory": "swap", "targets": "admission", "prompt": "update",
        "placement": "uneven pools", "router": "cache-aware", "adapters": "two", "policy": "default",
    }),
}  # fmt: skip
"""Rows with the seeds with which they once did not end, by the fault."""


@cache
def covering() -> Covering:
    return cover(axes("simulated"), refusal)


WORKLOADS, APART = 3, 1_000_003


def run_row(row: Row, seed: int) -> Counter[str]:
    """Run one row; return its counts. Raises AssertionError if a value of the row took no effect. The default
    policy may decide against drafting, so a row is run with several workloads until every value has taken
    effect."""
    total: Counter[str] = Counter()
    unused = [value for value in shown(row) if row["draft"] != "none" or "policy" not in value]
    for workload in range(WORKLOADS):
        total += Counter(vars(trial(seed + workload * APART, FIXED | simulated(row))))
        unused = [value for value in unused if not any(total[name] for name in shown(row)[value])]
        if not unused:
            break
    assert not unused, f"not used: {', '.join(unused)}: {row}, seed {seed}"
    return total


@pytest.mark.parametrize(("seed", "row"), STOOD_STILL.values(), ids=STOOD_STILL)
def test_rows_that_stood_still_end(seed: int, row: Row) -> None:
    assert trial(seed, FIXED | simulated(row)).swapped > 0


def test_every_pair_of_values_gives_the_models_text(scale: Scale, record: Callable[..., None]) -> None:
    rows = covering().rows if scale.full else covering().rows[::16]
    total: Counter[str] = Counter()
    for number, row in enumerate(rows):
        total += run_row(row, scale.seed + number)
    for name in SHOWN:
        assert total[name] > 0, name
    record(rows=len(rows), requests=len(rows) * REQUESTS, holes=len(covering().holes), **total)


def test_random_combinations_of_three_values_give_the_models_text(
    scale: Scale, record: Callable[..., None]
) -> None:
    rng = Random(f"three-{scale.seed}")
    rows, refused = [], 0
    while len(rows) < scale.pick(4, 240):
        row = draw_three(axes("simulated"), rng)
        if refusal(row):
            refused += 1
        else:
            rows.append(row)
    total: Counter[str] = Counter()
    for number, row in enumerate(rows):
        total += run_row(row, scale.seed + number)
    assert total.total() > 0
    for name in SHOWN if scale.full else ():
        assert total[name] > 0, name
    record(rows=len(rows), refused_rows=refused, **total)
