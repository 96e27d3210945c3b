"""`make verify` in parts: every test file is in one, and a part that has passed at a commit is not run
again."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import verify
from tests.campaigns.ledger import REPOSITORY, product_commit
from tests.verify import Part, groups, helpers, parts


def test_every_test_file_is_in_exactly_one_part() -> None:
    held = {
        name: {file for path in paths for file in _files(REPOSITORY / path)}
        for name, paths in groups().items()
    }
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        owners = [name for name, files in held.items() if file in files]
        if file.is_relative_to(REPOSITORY / verify.PAGES):
            assert not owners
            continue
        assert len(owners) == 1, (file.relative_to(REPOSITORY), owners)


def test_a_new_test_file_is_in_a_part_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_new.py").touch()
    monkeypatch.setattr(verify, "REPOSITORY", tmp_path)
    assert groups()["rest"] == ("tests/test_new.py",)


def _files(path: Path) -> list[Path]:
    assert path.exists(), path
    return [path] if path.is_file() else list(path.rglob("test_*.py"))


class Recorder:
    """Runs parts as they are scripted: the exit status, or an interruption."""

    def __init__(self, **statuses: int | None) -> None:
        self.statuses = statuses
        self.ran: list[str] = []

    def __call__(self, part: Part) -> dict[str, Any]:
        (name,) = part.command
        self.ran.append(name)
        status = self.statuses[name]
        if status is None:
            raise KeyboardInterrupt
        return {"commit": "c", "exit_status": status, "seconds": 1.0, "passed": 3}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "product_commit", lambda paths: "c")


PARTS = {name: Part((name,)) for name in ("a", "b", "c")}


@pytest.mark.usefixtures("clean")
def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    first = Recorder(a=0, b=1, c=None)
    assert not verify.verify(PARTS, False, path, first, lambda line: None)
    assert first.ran == ["a", "b", "c"]
    second = Recorder(b=0, c=0)
    assert verify.verify(PARTS, False, path, second, lambda line: None)
    assert second.ran == ["b", "c"], "a has passed"
    report = json.loads(path.read_text())
    assert set(report["parts"]) == {"a", "b", "c"}
    assert report["passed"] == 9


@pytest.mark.usefixtures("clean")
def test_fresh_runs_all_again(tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    assert verify.verify(PARTS, False, path, Recorder(a=0, b=0, c=0), lambda line: None)
    again = Recorder(a=0, b=0, c=0)
    assert verify.verify(PARTS, True, path, again, lambda line: None)
    assert again.ran == ["a", "b", "c"]


def test_parts_run_again_after_changes() -> None:
    result = {"commit": "c", "exit_status": 0}
    assert verify.passed(result, "c")
    assert not verify.passed(result, "d")
    assert not verify.passed({"commit": "c-dirty", "exit_status": 0}, "c-dirty")
    assert not verify.passed({"commit": "c", "exit_status": 1}, "c")
    assert not verify.passed(None, "c")


def test_a_part_depends_on_the_product_the_helpers_and_its_own_tests() -> None:
    exact = parts([])["exact"].sources
    assert {"src", "tests/exact", "tests/conftest.py"} <= set(exact)
    assert not any("test_" in name for name in helpers())
    assert "tests/engine" not in exact
    assert len(product_commit(exact).partition("-")[0]) == 40


@pytest.mark.usefixtures("clean")
def test_the_table_names_failed_parts(tmp_path: Path) -> None:
    lines: list[str] = []
    verify.verify(PARTS, False, tmp_path / "verify.json", Recorder(a=0, b=1, c=0), lines.append)
    table = lines[-1].splitlines()
    assert [line.split()[:2] for line in table[1:4]] == [["a", "passed"], ["b", "FAILED"], ["c", "passed"]]
