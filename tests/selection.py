"""Which test files run, and in which order: first those that a change can affect.

`pytest` without paths leaves out files that passed here, while nothing that they depend on changes. All of
them run with `--all` and `--full`, where CI is set, and in a fresh clone. Files that failed come first, then
those with the fewest imports between them and a change, then the others. Within each of these groups the
longest comes first, so that no process of pytest-xdist is left with a long file at the end.

    python -m tests.selection    store the durations of the last runs here in tests/durations.json
"""

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.dependencies.tree import ROOT, Tree, digest_of, read

STATE = ROOT / "build" / "tests.json"
DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds by test file in a run with small counts, for machines without durations of their own."""
NEAR_SECONDS = 120.0
"""Total seconds of the tests that count as near to a change. Two processes run them in half of that time."""
SECONDS_PER_BYTE = 2e-4
"""Estimated seconds for each byte of a test file that never ran."""
PLAN = pytest.StashKey["Plan"]()
RECORDER = "selection-recorder"


class State(msgspec.Struct):
    """The records of earlier runs.

    `environment`: what these depended on besides files. `files`: digests of all files at the last whole run.
    `passed`: by test file, the content of its closure when it passed. `seconds`: durations of test files.
    """

    environment: str = ""
    files: dict[str, str] = {}
    passed: dict[str, str] = {}
    failed: list[str] = []
    seconds: dict[str, float] = {}


@dataclass(frozen=True)
class Plan:
    """The test files in their order, the files near to a change, and the files that are left out."""

    order: list[str]
    near: list[str]
    left_out: list[str]
    summary: str


def make_plan(
    state: State, contents: Mapping[str, str], distances: Mapping[str, int], changed: int, select: bool
) -> Plan:
    """Decide which files run.

    Args:
        state: the records of earlier runs in this environment.
        contents: the content of each test file's closure.
        distances: number of imports between a test file and the nearest changed file, if a path exists.
        changed: the number of files that changed since the last whole run.
        select: leave out files that passed with the same content.
    """
    passed = {name for name, content in contents.items() if state.passed.get(name) == content}
    failed = [name for name in contents if name in state.failed and name not in passed]
    affected = [name for name in contents if name not in passed]
    left_out = sorted(passed) if select else []
    near = _nearest(state.seconds, set(affected) - set(failed), distances) if state.passed else []

    def place(name: str) -> tuple[int, float, str]:
        group = 0 if name in failed else 1 if name in near else 2 if name not in passed else 3
        return group, -state.seconds.get(name, 0.0), name

    order = sorted(contents.keys() - set(left_out), key=place)
    if not state.passed:
        return Plan(order, [], left_out, f"{len(order)} test files: none has passed here before")
    said = [f"{changed} files changed, which can affect {len(affected)} of {len(contents)} test files"]
    said += [f"first {len(failed)} that failed"] if failed else []
    said += [f"the {len(near)} nearest to the change first"] if near else []
    said += [f"{len(left_out)} have passed and are left out (all: make test ARGS=--all)"] if left_out else []
    return Plan(order, near, left_out, "; ".join(said))


def _nearest(
    seconds: Mapping[str, float], affected: Iterable[str], distances: Mapping[str, int]
) -> list[str]:
    """Return the files nearest to the change that take NEAR_SECONDS together, at least one."""
    found, total = [], 0.0
    reachable = (name for name in affected if name in distances)
    for name in sorted(reachable, key=lambda name: (distances[name], seconds.get(name, 0.0), name)):
        total += seconds.get(name, 0.0)
        if found and total > NEAR_SECONDS:
            break
        found.append(name)
    return found


def durations(state: State, tree: Tree) -> dict[str, float]:
    """Return the seconds of each test file: measured here, on another machine, or estimated by its size."""
    known = msgspec.json.decode(DURATIONS.read_bytes(), type=dict[str, float]) if DURATIONS.exists() else {}
    estimates = {name: tree.files[name].stamp[1] * SECONDS_PER_BYTE for name in tree.tests()}
    return {name: state.seconds.get(name, known.get(name, round(estimates[name], 1))) for name in estimates}


def environment() -> str:
    """Return a hash of everything but the files that a result depends on: Python, packages, processor,
    settings."""
    folders = [Path(folder) for folder in sys.path if Path(folder).is_dir()]
    packages = sorted(found.name for folder in folders for found in folder.glob("*.dist-info"))
    names = sorted(name for name in os.environ if name.startswith("STREAMSERVE_"))
    settings = [f"{name}={os.environ[name]}" for name in names]
    processor = [line for line in _lines(Path("/proc/cpuinfo")) if line.startswith(("model name", "flags"))][
        :2
    ]
    parts = [platform.python_version(), platform.machine(), *processor, *packages, *settings]
    return digest_of(f"{part}\n" for part in parts)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def load(path: Path, environment: str) -> State:
    """Return the records of earlier runs; for another environment only the durations."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        return State(environment=environment)
    return (
        state if state.environment == environment else State(environment=environment, seconds=state.seconds)
    )


def save(path: Path, state: State) -> None:
    """Replace the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))
    part.replace(path)


class Recorder:
    """Counts the results of each test file, and says when the files near to a change are done."""

    def __init__(self, plan: Plan) -> None:
        self._remaining: dict[str, set[str]] = {}
        self._near = set(plan.near)
        self._near_count = len(plan.near)
        self._began = time.monotonic()
        self.failed: set[str] = set()
        self.seconds: dict[str, float] = {}

    def expect(self, ids: Iterable[str]) -> None:
        """Record the tests that will run."""
        for test in ids:
            self._remaining.setdefault(_file(test), set()).add(test)

    def add(self, report: pytest.TestReport) -> str:
        """Count a report; return a line of text when the last of the near files is done."""
        name = _file(report.nodeid)
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.failed:
            self.failed.add(name)
        if report.when == "teardown" or (report.failed and report.when == "???"):
            self._remaining.get(name, set()).discard(report.nodeid)
        if name in self._near and not self._remaining.get(name, {""}):
            self._near.discard(name)
            if not self._near:
                return f"{self._near_count} files nearest to the change: {self._near_outcome()}"
        return ""

    def done(self) -> set[str]:
        """Return the files whose tests have all run."""
        return {name for name, remaining in self._remaining.items() if not remaining}

    def _near_outcome(self) -> str:
        state = f"{len(self.failed)} files failed so far" if self.failed else "no test failed"
        return f"{state} ({time.monotonic() - self._began:.0f} s)"


def _file(test: str) -> str:
    return test.partition("::")[0]


def updated(
    state: State, recorder: Recorder, contents: Mapping[str, str], files: Mapping[str, str] | None
) -> State:
    """Return the state after a run. `files` are the digests of all files if everything affected ran."""
    done = recorder.done()
    passed = {name: contents[name] for name in done - recorder.failed if name in contents}
    kept = {name: content for name, content in state.passed.items() if name in contents}
    kept = {name: content for name, content in kept.items() if name not in recorder.failed}
    failed = ({*state.failed} - passed.keys()) | recorder.failed
    return State(
        environment=state.environment,
        files=dict(files) if files else state.files,
        passed=kept | passed,
        failed=sorted(failed & contents.keys()),
        seconds=state.seconds | {name: round(recorder.seconds[name], 1) for name in passed},
    )


class _Session:
    """The hooks of the process that hands out the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tree = read()
        self._state = load(STATE, environment())
        self._contents = {name: self._tree.content([name]) for name in self._tree.tests()}
        self._files = {name: source.digest for name, source in self._tree.files.items()}
        changed = {name for name, digest in self._files.items() if self._state.files.get(name) != digest}
        changed |= self._state.files.keys() - self._files.keys()
        everything = os.environ.get("CI") or config.getoption("--all")
        self._whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not _narrowed(config)
        self.plan = make_plan(
            msgspec.structs.replace(self._state, seconds=durations(self._state, self._tree)),
            self._contents,
            self._tree.distances(changed),
            len(changed),
            select=self._whole and not everything,
        )
        self._recorder = Recorder(self.plan)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        if self._whole:
            self._say(self.plan.summary)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._recorder.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._recorder.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if line := self._recorder.add(report):
            self._say(line)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if _narrowed(self._config):
            return
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.plan.left_out:
            session.exitstatus = exitstatus = pytest.ExitCode.OK  # nothing can be affected
        ended = self._whole and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        contents = self._contents | dict.fromkeys(self._changed_meanwhile(), "")
        save(STATE, updated(self._state, self._recorder, contents, self._files if ended else None))

    def _changed_meanwhile(self) -> list[str]:
        """Return the test files of which a file that they depend on was edited while tests ran."""
        now = {name: source.digest for name, source in read().files.items()}
        edited = {name for name, _ in now.items() ^ self._files.items()}
        return [name for name in self._contents if edited and edited & set(self._tree.closure([name]))]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._whole:
            terminalreporter.write_line(self.plan.summary)

    def _say(self, line: str) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\n{line}")


def _narrowed(config: pytest.Config) -> bool:
    """Return whether only some tests of a file may run."""
    option = config.option
    chosen = (option.keyword, option.markexpr, option.deselect, getattr(option, "lf", False))
    return any(chosen) or any("::" in argument for argument in config.args)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run files that passed and cannot be affected")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the plan in the main process, and pass it to the other processes."""
    if hasattr(config, "workerinput"):
        config.stash[PLAN] = Plan(*config.workerinput["plan"])
    elif not config.getoption("--full") and not config.getoption("--collect-only"):
        session = _Session(config)
        config.stash[PLAN] = session.plan
        config.pluginmanager.register(session, RECORDER)
    else:
        config.stash[PLAN] = Plan([], [], [], "")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    plan = node.config.stash[PLAN]
    node.workerinput["plan"] = (plan.order, plan.near, plan.left_out, plan.summary)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out before they are imported."""
    left_out = config.stash[PLAN].left_out
    return True if left_out and _relative(collection_path) in left_out else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files into the plan's order. Within a file, the tests keep the order of pytest-randomly."""
    places = {name: number for number, name in enumerate(config.stash[PLAN].order)}
    items.sort(key=lambda item: places.get(_relative(item.path), len(places)))


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def main() -> None:
    """Write the durations that were measured on this machine to the file that all machines share."""
    tree, state = read(), load(STATE, environment())
    seconds = dict(sorted(durations(state, tree).items()))
    DURATIONS.write_text(json.dumps(seconds, indent=1) + "\n")
    print(f"{DURATIONS.relative_to(ROOT)}: {len(seconds)} files, {sum(seconds.values()):.0f} s")


if __name__ == "__main__":
    main()
