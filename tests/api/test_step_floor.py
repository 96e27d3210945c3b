"""Metrics report the step floor, the lower bound of the step time on a profiled machine."""

import pytest

from streamserve.protocol.reports import Report
from tests.api.serving import ScriptedGenerator, scripted

STATISTICS = {
    "running": 0, "waiting": 0, "blocks_total": 1, "blocks_live": 0, "steps": 6, "prompt_tokens": 7,
    "generation_tokens": 8, "prefix_queries": 0, "prefix_hits": 0, "preemptions": 0, "copies_on_write": 0,
}  # fmt: skip


@pytest.mark.parametrize(("spent", "floor", "share"), [(0.5, 0.4, 0.8), (0.0, 0.0, 0.0)])
def test_the_floor_and_its_share(
    generator: ScriptedGenerator, spent: float, floor: float, share: float
) -> None:
    report = Report(**STATISTICS, step_seconds=spent, step_floor_seconds=floor)
    with scripted(generator.replaced(latest_report=report)) as server:
        assert server.metric("step_seconds_total") == spent
        assert server.metric("step_floor_seconds_total") == floor
        assert server.metric("step_floor_share") == share


def test_without_a_profile_there_is_no_floor(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(latest_report=Report(**STATISTICS, step_seconds=0.5))) as server:
        text = server.http.get("/metrics").text
        assert "streamserve:step_seconds_total" in text
        assert "step_floor" not in text
