"""Tests of the kernels run on every path that this processor has, and in small runs also on a lesser
processor's paths.

A test that takes `pool` runs twice: with the kernels of this processor, and with those of the lesser one that
the run's seed chooses (tests/processor.py), if that has the path that the test is about. The lesser kernels
are compiled with little optimization, which takes half the time and changes no bit.
"""

import ctypes
import functools
from collections.abc import Callable

import pytest
import torch

from streamserve.execution.backends.native.build import BuildFailed, build, flags_up_to
from streamserve.execution.backends.native.library import Path, ThreadPool, kernels, load_library
from streamserve.protocol.config import KernelPath
from streamserve.system.instructions import KERNEL_PATH_VARIABLE
from tests.execution.backends.native.paths import name_of, repeated
from tests.processor import chosen_path, leave_out
from tests.small_runs import cases_left_out, group_cases

MakePool = Callable[..., ThreadPool]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = chosen_path(metafunc.config)
    if "pool" in metafunc.fixturenames and chosen:
        metafunc.parametrize("pool", ["auto", chosen], indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove repetitions that the lesser processor cannot run. Of the other repetitions, retain only those
    needed to repeat every value of every parameter."""
    able = [item for item in items if not _lacks_paths(item)]
    groups = group_cases(item for item in able if repeated(item))
    removed = {id(case) for cases in groups.values() for case in cases_left_out(cases, 1)}
    items[:] = [item for item in able if id(item) not in removed]


def _lacks_paths(item: pytest.Item) -> bool:
    bound = repeated(item)
    if bound is None:
        return False
    path, last = item.callspec.params.get("path"), Path[bound.upper()]  # type: ignore[attr-defined]
    compares = "alike" in getattr(item, "fixturenames", ())
    return (isinstance(path, Path) and path > last) or (compares and last < Path.AVX512)


@functools.cache
def lesser_kernels(bound: KernelPath) -> ctypes.CDLL | None:
    """Return the kernels of a lesser processor; None if they cannot be compiled."""
    try:
        return load_library(build(flags=(*flags_up_to(bound), "-O1")))
    except BuildFailed:
        return None


@functools.cache
def thread_pool(bound: KernelPath, threads: int, path: Path | None) -> ThreadPool:
    """Return a thread pool of the kernels with paths up to `bound`, shared by the session."""
    library = kernels() if bound == "auto" else lesser_kernels(bound)
    if library is None:
        pytest.skip("there is no compiler")
    return ThreadPool(library, threads, path)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> MakePool:
    """Return a function that makes a thread pool by number of threads and path."""
    bound = getattr(request, "param", "auto")
    missing = leave_out if bound == "auto" else pytest.skip

    def make(threads: int = 1, path: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> ThreadPool:
        made = thread_pool(bound, threads, path)
        if path is not None and not made.supports(path, dtype):
            missing(name_of(path, dtype))
        return made

    return make


@pytest.fixture(autouse=True)
def _bounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a repeated test, the models that it loads use the same kernels as its pool."""
    if bound := repeated(request.node):
        monkeypatch.setenv(KERNEL_PATH_VARIABLE, bound)
        monkeypatch.setattr("streamserve.execution.loading.load.kernels", lambda: lesser_kernels(bound))
