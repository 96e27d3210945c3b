"""The worker logs its throughput once a minute, only after work, and for that minute."""

import msgspec

from streamserve.protocol.reports import Report
from streamserve.workers.serving import LOG_SECONDS, ThroughputLog

NOTHING = Report(
    running=0, waiting=0, blocks_total=1, blocks_live=0, steps=0, prompt_tokens=0, generation_tokens=0,
    prefix_queries=0, prefix_hits=0, preemptions=0, copies_on_write=0, step_seconds=0.0,
    step_floor_seconds=0.0,
)  # fmt: skip


def after(report: Report, steps: int, floor: float | None = 10.0) -> Report:
    """Return a report `steps` steps later: after 20 seconds, with 3 generated tokens in each step and 700
    prompt tokens."""
    return msgspec.structs.replace(
        report,
        steps=report.steps + steps,
        step_seconds=report.step_seconds + 20.0,
        generation_tokens=report.generation_tokens + 3 * steps,
        prompt_tokens=report.prompt_tokens + 700,
        step_floor_seconds=None if floor is None else (report.step_floor_seconds or 0.0) + floor,
    )


def test_a_minute_of_work_is_one_line_about_it() -> None:
    pace = ThroughputLog(NOTHING, 5.0)
    first = after(NOTHING, 400)
    assert pace.line(first, 5.0 + LOG_SECONDS / 2) is None
    assert pace.line(first, 5.0 + LOG_SECONDS) == (
        "400 steps in 20.0 s: 60 tokens/s, 700 prompt tokens, step floor at 50% of step time"
    )
    line = pace.line(after(first, 200, floor=15.0), 5.0 + 2 * LOG_SECONDS)
    assert line == "200 steps in 20.0 s: 30 tokens/s, 700 prompt tokens, step floor at 75% of step time"


def test_an_idle_minute_is_not_logged() -> None:
    pace = ThroughputLog(NOTHING, 0.0)
    assert pace.line(NOTHING, LOG_SECONDS) is None
    assert pace.line(after(NOTHING, 100), 1.5 * LOG_SECONDS) is None
    assert "100 steps" in (pace.line(after(NOTHING, 100), 2 * LOG_SECONDS) or "")


def test_without_a_profile_there_is_no_ratio() -> None:
    unknown = msgspec.structs.replace(NOTHING, step_floor_seconds=None)
    line = ThroughputLog(unknown, 0.0).line(after(unknown, 10, floor=None), LOG_SECONDS)
    assert line == "10 steps in 20.0 s: 2 tokens/s, 700 prompt tokens"
