"""All durations of a reply are differences of one clock."""

from collections.abc import Iterator
from itertools import count

import pytest

from streamserve.extras.ollama import durations
from streamserve.extras.ollama.durations import RequestStopwatch
from streamserve.text.output import Usage


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that advances by a second each time it is read."""
    clock = count(1)
    monkeypatch.setattr(durations, "perf_counter_ns", lambda: next(clock) * 10**9)
    return


async def loaded() -> str:
    return "a model"


async def test_each_part_of_a_request_is_measured(seconds: None) -> None:
    watch = RequestStopwatch(arrived=10**9 // 2)
    assert await watch.loading(loaded()) == "a model"  # read at 1 s and 2 s
    watch.submit()  # read at 3 s
    for _ in range(3):
        watch.token()  # read at 4 s; later readings do not count
    fields = watch.generating(Usage(5, 3, queued_seconds=0.25))
    assert fields["load_duration"] == 10**9
    assert fields["prompt_eval_duration"] == 750_000_000
    assert (fields["prompt_eval_count"], fields["eval_count"]) == (5, 3)
    assert fields["eval_duration"] > 0
    assert fields["total_duration"] > fields["load_duration"] + fields["prompt_eval_duration"]
    assert all(isinstance(value, int) for value in fields.values())


async def test_a_request_that_only_loads(seconds: None) -> None:
    watch = RequestStopwatch(arrived=0)
    await watch.loading(loaded())
    assert watch.without_text() == {"total_duration": 3 * 10**9, "load_duration": 10**9}
