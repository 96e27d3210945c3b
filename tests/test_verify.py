"""`make verify` in parts: every test file is in one part, a part counts while nothing that it depends on
changes, and a complete run is recorded only if it ran at a single commit."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import verify
from tests.campaigns.families import FAMILIES
from tests.campaigns.ledger import REPOSITORY, machine
from tests.dependencies import Tree, read
from tests.dependencies.tree import RESULTS, is_in
from tests.verify import LIMIT_MINUTES, Part, Verification, groups, parts, restrictions


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


def test_no_part_depends_on_what_a_verification_writes() -> None:
    """No part depends on files that a verification writes; otherwise a result written by one part would
    invalidate other parts."""
    tree = read()
    for name, part in parts([]).items():
        written = [file for file in tree.closure(part.roots) if is_in(file, RESULTS)]
        assert not written, name


def test_a_part_depends_on_the_files_that_it_can_reach() -> None:
    tree, every = read(), parts([])
    exact = tree.closure(every["exact"].roots)
    assert {"src/streamserve/engine/engine.py", "tests/exact/test_lora.py", "tests/conftest.py"} <= set(exact)
    assert "tests/results/verify.json" not in exact
    assert "src/streamserve/api/app.py" not in tree.closure(every["engine"].roots)
    assert {"README.md", "src/streamserve/api/app.py"} <= set(tree.closure(every["readme"].roots))
    for name in FAMILIES:
        assert "tests/campaigns/outcome.py" in tree.closure(every[f"campaign-{name}"].roots)


@dataclass
class Repository:
    """A repository with three parts of one file each in a folder, whose runs are scripted."""

    folder: Path
    statuses: dict[str, int | None] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    restrictions: list[str] = field(default_factory=list)
    result: dict[str, int] = field(default_factory=lambda: {"passed": 3})
    while_running: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        for name in "abc":
            self.write(name, "")

    def write(self, name: str, text: str) -> None:
        (self.folder / "tests").mkdir(exist_ok=True)
        (self.folder / "tests" / f"{name}.py").write_text(text)

    def verify(self, selected: str = "abc", fresh: bool = False) -> bool:
        """Run the parts; return whether all of them count."""
        self.ran.clear()
        self.lines.clear()
        return Verification(
            {name: Part((name,), roots=(f"tests/{name}.py",)) for name in "abc"},
            self.folder / "working.json",
            self.complete,
            self._run,
            self._tree,
            lambda: self.changed,
            self.lines.append,
            self.restrictions,
        ).verify(selected, fresh)

    @property
    def complete(self) -> Path:
        return self.folder / "verify.json"

    def _tree(self) -> Tree:
        return read(self.folder, None)

    def _run(self, part: Part) -> dict[str, Any]:
        (name,) = part.command
        self.ran.append(name)
        status = self.statuses.get(name, 0)
        if status is None:
            raise KeyboardInterrupt
        self.while_running()
        return {"exit_status": status, "seconds": 60.0, **self.result}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_an_interrupted_run_resumes(repository: Repository) -> None:
    repository.statuses = {"b": 1, "c": None}
    assert not repository.verify()
    assert repository.ran == ["a", "b", "c"]
    assert not repository.complete.exists(), "nothing is recorded"
    repository.statuses = {}
    assert repository.verify()
    assert repository.ran == ["b", "c"], "a has passed"
    report = json.loads(repository.complete.read_text())
    assert set(report["parts"]) == {"a", "b", "c"}
    assert report["passed"] == 9
    assert report["seconds"] == 180
    assert report["machine"] == machine()
    assert len(report["commit"]) == 40


def test_fresh_runs_all_again(repository: Repository) -> None:
    assert repository.verify()
    assert repository.verify(fresh=True)
    assert repository.ran == ["a", "b", "c"]


def test_a_part_runs_again_when_its_files_change_whatever_was_committed(repository: Repository) -> None:
    assert repository.verify()
    repository.write("b", "# another\n")
    assert repository.verify()
    assert repository.ran == ["b"]
    repository.write("b", "")
    assert repository.verify("b")
    assert repository.ran == ["b"], "only the last result of a part is stored"


def test_a_part_whose_files_change_while_it_runs_does_not_count(repository: Repository) -> None:
    repository.while_running = lambda: repository.write("a", f"# {len(repository.ran)}\n")
    assert not repository.verify("a")
    repository.while_running = lambda: None
    assert repository.verify("a")


def test_a_part_counts_on_its_machine_only(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repository.verify()
    monkeypatch.setattr(verify, "machine", lambda: "another, 2 cores")
    assert repository.verify()
    assert repository.ran == ["a", "b", "c"]


@pytest.mark.parametrize("result", [{"passed": 0, "skipped": 3}, {"trials": 0}, {}])
def test_a_part_that_ran_nothing_does_not_count(repository: Repository, result: dict[str, int]) -> None:
    repository.result = result
    assert not repository.verify()
    assert not repository.complete.exists()
    assert "FAILED" in repository.lines[-1]
    repository.result = {"trials": 1, "refused": 1}
    assert repository.verify()


def test_a_restricted_run_counts_for_itself_alone(repository: Repository) -> None:
    repository.restrictions = ["-k", "swap"]
    assert repository.verify()
    assert repository.lines[-1] == "all parts passed, not recorded: run with -k swap"
    assert repository.verify()
    assert repository.ran == []
    repository.restrictions = []
    assert repository.verify("a")
    assert repository.ran == ["a"]
    assert not repository.complete.exists()


def test_arguments_and_variables_restrict_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("STREAMSERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    assert restrictions([]) == []
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    monkeypatch.setenv("STREAMSERVE_KERNEL_PATH", "avx2")
    assert restrictions(["--seed=3"]) == ["--seed=3", "PYTEST_ADDOPTS=-x", "STREAMSERVE_KERNEL_PATH=avx2"]


def test_parts_of_other_packages_do_not_count(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repository.verify()
    monkeypatch.setattr(verify, "environment", lambda: "other packages")
    assert repository.verify()
    assert repository.ran == ["a", "b", "c"]


def test_files_of_no_commit_are_not_recorded(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "git", lambda *arguments: "")
    assert repository.verify()
    assert not repository.complete.exists()


def test_a_complete_run_is_recorded_at_a_commit_only(repository: Repository) -> None:
    repository.changed = ["tests/b.py", "README.md"]
    assert repository.verify()
    assert not repository.complete.exists()
    assert "1 files differ from the commit: tests/b.py" in repository.lines[-1]
    repository.changed = ["README.md"]
    assert repository.verify()
    assert repository.ran == [], "the same files are committed now"
    assert repository.complete.exists()
    stored = repository.complete.read_text()
    assert repository.verify()
    assert repository.complete.read_text() == stored
    assert "as recorded at commit" in repository.lines[-1]


def test_pages_are_rendered_when_a_complete_run_is_recorded(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[bool] = []
    monkeypatch.setattr(verify, "RESULTS", repository.complete)
    monkeypatch.setattr(verify, "render_pages", lambda: rendered.append(repository.complete.exists()))
    repository.statuses = {"a": 1}
    repository.verify()
    assert rendered == []
    repository.statuses = {}
    repository.verify()
    assert rendered == [True]


def test_a_failure_leaves_the_last_complete_run(repository: Repository) -> None:
    assert repository.verify()
    stored = repository.complete.read_text()
    repository.write("c", "# another\n")
    repository.statuses = {"c": 1}
    assert not repository.verify()
    assert repository.complete.read_text() == stored


def test_the_table_names_failed_parts_and_adds_the_minutes(repository: Repository) -> None:
    repository.statuses = {"b": 1}
    repository.verify()
    table = repository.lines[-1].splitlines()
    expected = [["a", "passed", "1.0"], ["b", "FAILED", "1.0"], ["c", "passed", "1.0"]]
    assert [line.split()[:3] for line in table[1:4]] == expected
    assert table[-1].startswith("3.0 minutes in all;")
    assert LIMIT_MINUTES == 90
