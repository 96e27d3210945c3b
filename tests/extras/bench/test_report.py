import json
import sys
from pathlib import Path

import pytest

from streamserve.extras.bench.load import Run
from streamserve.extras.bench.report import as_text, remarks, save
from streamserve.extras.bench.statistics import Outcome, summarize

OUTCOMES = [
    Outcome(sent=0.0, latency=0.8, token_times=(0.2, 0.4, 0.7), prompt_tokens=10, output_tokens=4),
    Outcome(sent=0.5, latency=0.3, token_times=(0.3,), prompt_tokens=5, output_tokens=1),
    Outcome(sent=0.1, latency=9.0, error="429: busy"),
]

TEXT = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             2
Benchmark duration (s):                  2.00
Total input tokens:                      15
Total generated tokens:                  5
Request throughput (req/s):              1.00
Request goodput (req/s):                 0.50
Output token throughput (tok/s):         2.50
Peak output token throughput (tok/s):    5.00
Peak concurrent requests:                2.00
Total token throughput (tok/s):          10.00
---------------Time to First Token----------------
Mean TTFT (ms):                          250.00
Median TTFT (ms):                        250.00
P99 TTFT (ms):                           299.00
==================================================
"""


def test_the_text_has_the_layout_of_vllms_benchmark() -> None:
    summary = summarize(OUTCOMES, 2.0, {"ttft": 200.0})
    lines = as_text(summary, ["ttft"], max_concurrency=2).splitlines()
    assert [line.rstrip() for line in lines] == TEXT.splitlines()
    assert {len(line) for line in lines if ":" in line} == {51}
    assert {len(line) for line in lines if ":" not in line} == {50}


def test_unknown_values_are_omitted_and_remarked() -> None:
    counted = Outcome(sent=0, latency=1, token_times=(0.5,), output_tokens=1, counted=True)
    summary = summarize([counted, OUTCOMES[2]], 1.0, {}, interrupted=4)
    text = as_text(summary, [])
    assert "Total input tokens" not in text
    assert "Interrupted requests:                    4" in text
    text = " ".join(remarks(summary, [counted, OUTCOMES[2]]))
    assert "reported no usage for 1 requests" in text
    assert "1 failed with: 429: busy" in text


def test_a_result_is_saved_with_every_request_and_plots(tmp_path: Path) -> None:
    run = Run(OUTCOMES, 2.0, 0)
    summary = summarize(OUTCOMES, 2.0, {})
    written = save(tmp_path / "deep" / "run.json", {"seed": 1}, summary, run)
    assert [path.name for path in written] == ["run.json", "run.png"]
    report = json.loads(written[0].read_text())
    assert report["settings"] == {"seed": 1}
    assert report["summary"]["completed"] == 2
    assert report["requests"][0]["token_times"] == [0.2, 0.4, 0.7]
    assert report["requests"][2]["error"] == "429: busy"
    assert written[1].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_are_no_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    summary = summarize(OUTCOMES, 2.0, {})
    assert save(tmp_path / "run.json", {}, summary, Run(OUTCOMES, 2.0, 0)) == [tmp_path / "run.json"]
