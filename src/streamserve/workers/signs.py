"""The signs that a step of a loaded model goes on, for the worker's journal."""

from typing import Protocol, runtime_checkable

from streamserve.contracts.plan import AsyncExecutor
from streamserve.execution.loading.loaded import Loaded
from streamserve.workers.journal import Signs


@runtime_checkable
class Compiling(Protocol):
    """Computes with kernels that are compiled when they are first needed."""

    @property
    def firsts(self) -> int:
        """The number of runs that compiled kernels or captured a graph, or are about to."""


def signs_of(loaded: Loaded, measured: bool) -> Signs:
    """Return the signs of a model's steps: the layers whose KV was written, and the number of compilations.

    `measured`: whether there is a profile of the model's steps on this machine.
    """
    written = [cache.written for cache in loaded.caches]
    compiling = [part for part in (loaded.executor, loaded.drafter) if isinstance(part, Compiling)]
    return Signs(
        progress=lambda: sum(int(layers[0]) for layers in written),
        compiled=lambda: sum(part.firsts for part in compiling),
        longest_part=longest_part(loaded),
        measured=measured,
    )


def longest_part(loaded: Loaded) -> float:
    """Return the largest share of a step's time that passes without progress: a layer or the output head.

    A device shows progress only when a step is done.
    """
    if isinstance(loaded.executor, AsyncExecutor):
        return 1.0
    info = loaded.model_info
    head = info.vocab_size * info.hidden_size / info.parameters if info.parameters else 1.0
    return min(1.0, max(1 / loaded.model.spec.num_layers, head))
