"""A plain run starts with the tests that a change can affect, and leaves out tests that passed and cannot be
affected."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dependencies import ROOT
from tests.selection import NEAR_SECONDS, Plan, State, load, make_plan, save

CONTENTS = {"tests/test_a.py": "1", "tests/test_b.py": "2", "tests/test_c.py": "3"}
SECONDS = {"tests/test_a.py": 1.0, "tests/test_b.py": 30.0, "tests/test_c.py": 2.0}


def plan(select: bool = True, distances: dict[str, int] | None = None, **state: object) -> Plan:
    return make_plan(State(seconds=SECONDS, **state), CONTENTS, distances or {}, 1, select)  # type: ignore[arg-type]


def test_in_a_fresh_clone_all_run_the_longest_first() -> None:
    near = {"tests/test_a.py": 0}
    assert plan(distances=near).order == ["tests/test_b.py", "tests/test_c.py", "tests/test_a.py"]
    assert plan().left_out == []


def test_failed_files_come_first_then_those_near_to_the_change() -> None:
    passed = dict.fromkeys(CONTENTS, "old")
    made = plan(passed=passed, failed=["tests/test_a.py"], distances={"tests/test_c.py": 1})
    assert made.order == ["tests/test_a.py", "tests/test_c.py", "tests/test_b.py"]
    assert made.near == ["tests/test_c.py"]
    assert "first 1 that failed" in made.summary


def test_files_that_passed_are_left_out_or_come_last() -> None:
    passed = {"tests/test_b.py": "2", "tests/test_a.py": "old"}
    assert plan(passed=passed).left_out == ["tests/test_b.py"]
    assert "1 have passed and are left out (all: make test ARGS=--all)" in plan(passed=passed).summary
    assert plan(False, passed=passed).left_out == []
    assert plan(False, passed=passed).order[-1] == "tests/test_b.py"


def test_near_files_take_limited_time() -> None:
    seconds = dict.fromkeys(CONTENTS, NEAR_SECONDS * 0.6)
    distances = dict.fromkeys(CONTENTS, 1)
    assert len(make_plan(State(passed={"x": "1"}, seconds=seconds), CONTENTS, distances, 1, True).near) == 1
    assert len(make_plan(State(passed={"x": "1"}), CONTENTS, distances, 1, True).near) == 3


def test_passes_of_another_environment_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "tests.json"
    state = State(environment="one", passed=CONTENTS, failed=["tests/test_a.py"], seconds=SECONDS)
    save(path, state)
    assert load(path, "one") == state
    assert load(path, "two") == State(environment="two", seconds=SECONDS)
    path.write_text("half")
    assert load(path, "one") == State(environment="one")


class Repository:
    """A small repository with this selection of tests, which run in a separate process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "tests" / "dependencies", folder / "tests" / "dependencies", ignore=_tests)
        for file in ("selection.py", "sources.py"):
            shutil.copy(ROOT / "tests" / file, folder / "tests")
        self.write("pyproject.toml", "[tool.pytest.ini_options]\ntestpaths = ['tests']\naddopts = '-q'\n")
        self.write("tests/__init__.py", "")
        self.write(
            "tests/conftest.py",
            "pytest_plugins = ('tests.selection',)\n"
            "def pytest_addoption(parser): parser.addoption('--full', action='store_true')\n",
        )
        self.write("src/streamserve/__init__.py", "")
        for name in ("a", "b"):
            self.write(f"src/streamserve/{name}.py", "VALUE = 1\n")
            self.write(
                f"tests/test_{name}.py",
                f"from streamserve.{name} import VALUE\n"
                "def test_value(): assert VALUE\n"
                "def test_more(): assert VALUE + 1\n",
            )

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def run(self, *arguments: str, **environment: str) -> tuple[list[str], str]:
        """Run pytest; return the files whose tests ran, in order, and the output."""
        variables = {
            name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name
        }
        variables |= {"PYTHONPATH": f"{self.folder}:{self.folder / 'src'}", **environment}
        # Python would reuse the compiled file for a file with the same second and size.
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
        variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer than these tests
        command = [sys.executable, "-m", "pytest", "-vv", "-p", "xdist", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )
        ran = re.findall(r"tests/test_(\w)\.py::\w+ (?:PASSED|FAILED)", done.stdout)
        ran += re.findall(r"(?:PASSED|FAILED) tests/test_(\w)\.py::\w+ *$", done.stdout, re.MULTILINE)
        self.status = done.returncode
        return list(dict.fromkeys(ran)), done.stdout + done.stderr


def _tests(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("test_") or name == "__pycache__"]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_change_runs_what_it_affects(repository: Repository) -> None:
    ran, output = repository.run()
    assert sorted(ran) == ["a", "b"], output
    assert "2 test files: none has passed here before" in output
    assert "4 passed" in output
    ran, output = repository.run()
    assert (ran, repository.status) == ([], 0), output
    assert "2 have passed and are left out" in output
    repository.write("src/streamserve/b.py", "VALUE = 2\n")
    ran, output = repository.run()
    assert ran == ["b"], output
    assert "1 files changed, which can affect 1 of 2 test files" in output
    assert "1 files nearest to the change: no test failed" in output
    assert sorted(repository.run("--all")[0]) == ["a", "b"]
    assert sorted(repository.run(CI="true")[0]) == ["a", "b"]
    assert repository.run("tests/test_a.py")[0] == ["a"], "named files run"


def test_failed_files_run_until_they_pass(repository: Repository) -> None:
    repository.run()
    repository.write("src/streamserve/a.py", "VALUE = 0\n")
    ran, output = repository.run("--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert ran == ["a"], output
    assert "1 failed" in output
    repository.write("src/streamserve/b.py", "VALUE = 2\n")
    assert repository.run()[0] == ["a", "b"], "the failed one first"
    repository.write("src/streamserve/a.py", "VALUE = 1\n")
    assert repository.run("-k", "value", "tests/test_a.py")[0] == ["a"]
    assert repository.run()[0] == ["a"], "a run of only some tests is not recorded as passed"
    assert repository.run()[0] == []


def test_a_file_that_is_edited_while_its_tests_run_has_not_passed(repository: Repository) -> None:
    edited = str(repository.folder / "src" / "streamserve" / "a.py")
    repository.write(
        "tests/test_b.py",
        "import pathlib\nfrom streamserve.b import VALUE\n"
        f"def test_edit(): pathlib.Path({edited!r}).write_text('VALUE = VALUE_ = 1')\n",
    )
    assert sorted(repository.run()[0]) == ["a", "b"]
    repository.write("src/streamserve/a.py", "VALUE = 1\n")
    ran, output = repository.run()
    assert "a" in ran, output


def test_both_processes_run_everything_in_a_fresh_clone(repository: Repository) -> None:
    ran, output = repository.run("--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert sorted(ran) == ["a", "b"], output
    assert "4 passed" in output
    assert repository.run()[0] == [], "it was recorded"
