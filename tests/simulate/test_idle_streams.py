"""Idle prompt streams cost other requests nothing, except for memory that is otherwise free."""

from collections import Counter
from collections.abc import Callable

from tests.conftest import Scale
from tests.simulate.idle_streams import trial


def test_query_tokens_go_to_a_sequence_that_gets_memory() -> None:
    """Query tokens go to a sequence that gets memory. Three streams hold all blocks. The most edit-stable
    one, which is served first, has the lowest rank and gets no block, so the step is used by the
    highest-ranked one."""
    assert trial(2807)["preempted"] > 0


def test_everybody_else_is_served(scale: Scale, record: Callable[..., None]) -> None:
    total: Counter[str] = Counter()
    trials, most = scale.pick(12, 300), 0
    for seed in range(scale.seed, scale.seed + trials):
        count = trial(seed)
        most = max(most, count["percent_of_bound"])
        total.update(count)
    del total["percent_of_bound"]
    record(trials=trials, **total, most_percent_of_bound=most)
    for name in ("preempted", "swapped", "held"):
        assert total[name] > 0, name
