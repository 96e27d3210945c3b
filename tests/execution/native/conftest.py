"""The kernels, by every path that this processor has."""

from collections.abc import Callable

import pytest
import torch

from streamserve.execution.native.library import Path, ThreadPool, kernels


@pytest.fixture(scope="session")
def pool() -> Callable[..., ThreadPool]:
    """A thread pool by number of threads and path, kept for the session."""
    library = kernels()
    if library is None:
        pytest.skip("there is no compiler")
    pools: dict[tuple[int, Path | None], ThreadPool] = {}

    def make(threads: int = 1, path: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> ThreadPool:
        key = threads, path
        if key not in pools:
            pools[key] = ThreadPool(library, threads, path)
        if path is not None and not pools[key].supports(path, dtype):
            pytest.skip(f"this processor has no {path.name} for {dtype}")
        return pools[key]

    return make
