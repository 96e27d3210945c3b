"""Rounds are added only to rounds that were measured with the same settings."""

import json
from pathlib import Path

import pytest

from benchmarks import options
from benchmarks.papers import routers_live

SETTINGS = {"rate": 10.0, "time": "live"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "RESULTS", tmp_path)
    content = {"settings": {**SETTINGS, "rounds": {"skewed": 1}}, "figures": {"rounds": {"skewed": [{}]}}}
    (tmp_path / "routers_live.json").write_text(json.dumps(content))


def test_rounds_with_the_same_settings_are_read(file: None) -> None:
    assert routers_live.recorded("routers_live", SETTINGS)["figures"]["rounds"] == {"skewed": [{}]}


def test_rounds_with_other_settings_are_refused(file: None) -> None:
    with pytest.raises(SystemExit, match="was measured with"):
        routers_live.recorded("routers_live", {**SETTINGS, "rate": 16.0})
