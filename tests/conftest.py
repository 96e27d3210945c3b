"""Options of the tests: small counts by default, full counts with --full, and files of recorded figures."""

import atexit
import gc
import itertools
import json
import os
import platform
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from streamserve import __version__
from streamserve.system.instructions import pytorch_bounds
from tests import ending
from tests.processor import header, left_out, summary
from tests.small_runs import cases_left_out, group_cases

pytest_plugins = ("tests.selection",)
STARTED = pytest.StashKey[float]()
OUTCOMES = ("passed", "failed", "error", "skipped")

MARKERS = (
    "each_value: without --full, run the fewest cases in which every value of every parameter occurs",
    "each_pair: without --full, run the fewest cases in which every pair of values of two parameters occurs",
)
ONE_AUTHORITY = Path(__file__).with_name("authority.pem")
"""A certificate that has signed nothing. By default each HTTP client loads the certificates of all public
authorities, which takes a tenth of a second."""
FULL_TIMEOUT = 3600.0
"""Maximum seconds of a test with --full. pyproject.toml has the limit for small counts."""

# The time of an example depends on other load on the machine.
ANY_TIME: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
# Small runs try the same examples every time, so that results are repeatable; full runs look for new
# examples.
hypothesis.settings.register_profile("small", max_examples=8, derandomize=True, **ANY_TIME)
hypothesis.settings.register_profile("seeded", max_examples=8, **ANY_TIME)
hypothesis.settings.register_profile("full", max_examples=200, **ANY_TIME)


@dataclass(frozen=True)
class Scale:
    """The scale of a run. `full`: run the counts that a release needs. `seed`: the given seed; the default is
    fixed in small runs and random in full runs."""

    full: bool
    seed: int

    def pick(self, small: int, full: int) -> int:
        return full if self.full else small


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all tests with their full counts")
    parser.addoption("--seed", type=int, help="draw random cases from this seed, which a full run prints")
    parser.addoption("--results", metavar="FILE", help="write the recorded figures to this JSON file")


def restore_signal_handlers() -> None:
    """Restore the handlers of SIGINT and SIGHUP. Background jobs and nohup ignore these signals, and programs
    that tests start and interrupt would inherit that."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    restore_signal_handlers()
    config.stash[STARTED] = time.time()
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if not hasattr(config.option, "seeded"):  # processes of pytest-xdist get these options
        config.option.seeded = config.option.seed is not None
    if config.option.seed is None:
        config.option.seed = getattr(config, "workerinput", {}).get("seed", secrets.randbits(32))
    os.environ["STREAMSERVE_PROFILE"] = "false"  # no profile is measured or stored unless a test enables it
    os.environ["STREAMSERVE_CHECK"] = "true"  # every engine checks its counts after each step
    os.environ |= pytorch_bounds()
    os.environ["SSL_CERT_FILE"] = str(ONE_AUTHORITY)
    full, seeded = config.getoption("--full"), config.option.seeded
    hypothesis.settings.load_profile("full" if full else "seeded" if seeded else "small")
    if full and config.option.timeout is None:
        config.option.timeout = FULL_TIMEOUT


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported and collected objects from garbage collections, each of which would traverse all of
    them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()  # Pytest runs this hook several times at the end.
    atexit.register(gc.unfreeze)  # libraries look for leaks when Python exits


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the cases that a small run leaves out."""
    if config.getoption("--full"):
        return
    removed: list[pytest.Item] = []
    for marker, strength in (("each_value", 1), ("each_pair", 2)):
        marked = (item for item in items if item.get_closest_marker(marker))
        for cases in group_cases(marked).values():
            removed += cases_left_out(cases, strength)
    left_out = {id(item) for item in removed}
    config.hook.pytest_deselected(items=removed)
    items[:] = [item for item in items if id(item) not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the processes of pytest-xdist the same seed."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> list[str]:
    seeded = config.getoption("--full") or config.option.seeded
    return [*([f"seed: {config.option.seed}"] if seeded else []), *header(config)]


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    full = request.config.getoption("--full")
    return Scale(full, request.config.option.seed if full or request.config.option.seeded else 0)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record a test's figures for the results file."""

    def add_figures(**figures: Any) -> None:
        request.node.user_properties.append(("figures", json.dumps(figures)))

    return add_figures


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail if a worker or server outlives the tests. The fork server waits for the next worker, and ends with
    this process."""
    yield
    for end in ending.CALLS:
        end()
    commands = [_command(child) for child in psutil.Process().children(recursive=True)]
    remaining = [command for command in commands if "streamserve" in command and "fork_server" not in command]
    assert not remaining


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in summary(terminalreporter.stats):
        terminalreporter.write_line(line)
    path = config.getoption("--results")
    if path and not hasattr(config, "workerinput"):  # The processes of pytest-xdist run this code too.
        counts = {name: len(terminalreporter.stats.get(name, ())) for name in OUTCOMES}
        report = {
            "version": __version__,
            "commit": _git("rev-parse", "HEAD"),
            "clean": not _git("status", "--porcelain", "--untracked-files=no"),
            "machine": {"processor": _processor(), "cores": psutil.cpu_count()},
            "python": platform.python_version(),
            "full": config.getoption("--full"),
            "seed": config.option.seed if config.getoption("--full") else 0,
            "seconds": round(time.time() - config.stash[STARTED], 1),
            **counts,
            "left_out": {what: files.total() for what, files in left_out(terminalreporter.stats).items()},
            "figures": _figures(terminalreporter.stats),
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _figures(stats: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each test, from the properties of its report (also with pytest-xdist)."""
    figures: dict[str, dict[str, Any]] = {}
    for report in itertools.chain.from_iterable(stats.values()):
        for name, value in getattr(report, "user_properties", ()):
            if name == "figures":
                figures.setdefault(report.nodeid, {}).update(json.loads(value))
    return dict(sorted(figures.items()))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
