"""Requirements of tests on the processor, and the tests that are left out where they are missing.

STREAMSERVE_KERNEL_PATH=avx2 pytest     all tests as on a processor with AVX2 and nothing later

A test of one path that this processor lacks is skipped with `leave_out`. A test of several paths uses the
available ones, and records the missing ones with `note` (tests/execution/conftest.py: `available`). The end
of a run lists both. A small run repeats the kernel tests as on one lesser processor, which its random seed
chooses (tests/execution/backends/native/conftest.py).
"""

import random
from collections import Counter
from typing import Any, NoReturn

import pytest

from streamserve.execution.backends.native.levels import (
    LEVELS,
    Level,
    best_level,
    detected_level,
    lesser_level,
    processor_flags,
    runnable,
)
from streamserve.protocol.config import KernelPath
from streamserve.system.instructions import KERNEL_PATH_VARIABLE, kernel_bound

LEFT_OUT = "left out: "
PROPERTY = "left out"


def levels() -> list[Level]:
    """Return the levels that this process can run: the processor's levels, up to the bound."""
    last = LEVELS.index(detected_level())
    return [level for level in runnable(processor_flags()) if LEVELS.index(level) <= last]


def lesser_paths() -> list[KernelPath]:
    """Return the bounds that make this processor behave as a lesser one."""
    paths = dict.fromkeys(level.path for level in runnable(processor_flags()))
    return [path for path in paths if lesser_level(path)]


def chosen_path(config: pytest.Config) -> KernelPath | None:
    """Return the lesser processor with whose kernels the kernel tests are repeated. None in a run with a
    bound, and with --full: `make campaign FAMILY=levels` covers all lesser processors."""
    if config.getoption("--full") or kernel_bound() != "auto":
        return None
    paths = lesser_paths()
    return random.Random(_seed(config)).choice(paths) if paths else None


def _seed(config: pytest.Config) -> int:
    """Return the seed that pytest-randomly prints; 0 without it."""
    seed = getattr(config.option, "randomly_seed", 0)
    return seed if isinstance(seed, int) else 0


def header(config: pytest.Config) -> list[str]:
    """Return the lines at the start of a run."""
    if kernel_bound() != "auto":
        return [f"processor: {kernel_bound()}, by {KERNEL_PATH_VARIABLE}"]
    path, chosen = best_level(processor_flags()).path, chosen_path(config)
    also = f"; kernel tests also as on one with {chosen}, by the random seed" if chosen else ""
    return [f"processor: {path}{also}"]


def leave_out(what: str) -> NoReturn:
    """Skip a test that needs a missing feature of the processor."""
    pytest.skip(LEFT_OUT + what)


def note(item: pytest.Item, what: str) -> None:
    """Record a missing feature that a running test leaves out."""
    item.user_properties.append((PROPERTY, what))


def left_out(stats: dict[str, list[Any]]) -> dict[str, Counter[str]]:
    """Return for each missing feature the number of tests that left it out in each file, from their
    reports."""
    found: dict[str, Counter[str]] = {}
    for report in (report for reports in stats.values() for report in reports):
        for what in _left_out_by(report):
            found.setdefault(what, Counter())[report.nodeid.partition("::")[0]] += 1
    return dict(sorted(found.items()))


def _left_out_by(report: Any) -> list[str]:
    reason = report.longrepr[2] if isinstance(getattr(report, "longrepr", None), tuple) else ""
    _, _, skipped = reason.partition(LEFT_OUT)
    properties = report.user_properties if getattr(report, "when", "") == "call" else ()
    return [*([skipped] if skipped else []), *(what for key, what in properties if key == PROPERTY)]


def summary(stats: dict[str, list[Any]]) -> list[str]:
    """Return the lines at the end of a run: for each missing feature the number of tests, and their files."""
    lines = []
    for what, files in left_out(stats).items():
        names = ", ".join(sorted(file.removeprefix("tests/") for file in files))
        lines.append(f"  {what}: {files.total()} in {names}")
    return ["tests that left out what this processor lacks:", *lines] if lines else []
