"""Writing a benchmark's result file renders the pages that show it."""

import json
from pathlib import Path

import pytest

from benchmarks import figures, options, report


def test_a_result_is_written_before_the_pages_that_show_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rendered = []
    monkeypatch.setattr(options, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "render_pages", lambda: rendered.append(json.loads(path.read_text())))
    path = tmp_path / "some.json"
    assert report.write("some", {"seeds": 3}, [1, 2], report.SIMULATED) == path
    assert [document["figures"] for document in rendered] == [[1, 2]]


def test_pages_that_cannot_be_rendered_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures.sys, "executable", "false")
    figures.render_pages()
    assert "make figures" in capsys.readouterr().err
