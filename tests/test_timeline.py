"""`--timeline` writes a file with the steps of all processes of a pair; traces that cannot be sent are
refused."""

import json
from collections import Counter
from pathlib import Path

import pytest

from streamserve.settings import resolve as settings
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from tests.checkpoints import make_checkpoint
from tests.pairs import answers, make_requests, serving


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("timeline"))


async def test_a_timeline_shows_all_processes_of_a_pair(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    requests = [request for request in make_requests(8, 1) if (request[1].max_tokens or 0) > 2]
    async with serving(checkpoint, pairs=1, timeline=str(path)) as llm:
        await answers(llm, requests)
    events = json.loads(path.read_text())
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("ph") == "M"}
    assert set(processes.values()) == {"front", "prefill-0", "decode-0"}
    steps = Counter(processes[event["pid"]] for event in events if event.get("ph") == "X")
    assert steps["prefill-0"]
    assert steps["decode-0"]
    begin_counts = Counter((event["name"], event["id"]) for event in events if event.get("ph") == "b")
    for number in range(len(requests)):
        assert begin_counts["request", f"r{number}"] == 1
    marks = {(processes[e["pid"]], e["name"]) for e in events if e.get("ph") == "n"}
    assert {("prefill-0", "last layer landed"), ("decode-0", "reserved"), ("decode-0", "finishing")} <= marks
    timestamps = [event["ts"] for event in events if "ts" in event]
    assert max(timestamps) - min(timestamps) < 60e6, "all times are of one clock"


def test_traces_that_cannot_be_sent_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "telemetry_installed", lambda: False)
    with pytest.raises(SettingsError, match=r"streamserve\[otel\]"):
        resolve(str(checkpoint), {"otlp_traces_endpoint": "http://localhost:4318/v1/traces"})


def test_the_predictive_router_needs_a_profile(checkpoint: Path) -> None:
    with pytest.raises(SettingsError, match="needs measured step times"):
        resolve(str(checkpoint), {"router": "predictive", "profile": False, "pairs": 2})
