"""The kernels, by every path that this processor has."""

from collections.abc import Callable

import pytest
import torch

from streamserve.execution.native.library import Path, ThreadPool, kernels


@pytest.fixture(scope="session")
def team() -> Callable[..., ThreadPool]:
    """A team by number of threads and path, kept for the session."""
    library = kernels()
    if library is None:
        pytest.skip("there is no compiler")
    made: dict[tuple[int, Path | None], ThreadPool] = {}

    def make(threads: int = 1, path: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> ThreadPool:
        key = threads, path
        if key not in made:
            made[key] = ThreadPool(library, threads, path)
        if path is not None and not made[key].works(path, dtype):
            pytest.skip(f"this processor has no {path.name} for {dtype}")
        return made[key]

    return make
