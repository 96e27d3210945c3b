"""Stores of a model's weights while it is loaded: private to this process, or in memory that the workers of a
host share (weight_arena.py)."""

import logging
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec
from torch import Tensor

from streamserve.execution.backends.native.library import ThreadPool
from streamserve.execution.backends.native.linear import NativeLinear, StoredLinear
from streamserve.execution.backends.native.weight_arena import ArenaTensor, ArenaWriter, Region, WeightArena
from streamserve.execution.model.linear import LinearMap

logger = logging.getLogger(__name__)

M = TypeVar("M")


class PrivateWeights:
    """A store that makes all weights in this process's memory."""

    complete = False
    """Whether all weights are already stored, so that `make` is never called."""

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        return make()

    def linear(self, name: str, make: Callable[[], LinearMap]) -> LinearMap:
        return make()


PRIVATE = PrivateWeights()


class WeightIndex(msgspec.Struct, frozen=True):
    """The index of an arena: the weights of the model `key`, by name."""

    key: str
    tensors: dict[str, ArenaTensor]
    linears: dict[str, StoredLinear]


class WrittenWeights:
    """A store that makes all weights and writes them to an arena."""

    complete = False

    def __init__(self, writer: ArenaWriter, key: str, pool: ThreadPool) -> None:
        self._writer, self._pool = writer, pool
        self._index = WeightIndex(key, {}, {})

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Make the tensor, write it to the arena, and return it there."""
        stored = self._index.tensors[name] = self._writer.tensor(make())
        return self._writer.read(stored)

    def linear(self, name: str, make: Callable[[], LinearMap]) -> LinearMap:
        """Make the linear map, and return it in the arena: its weight is packed there directly, its other
        tensors are copied."""
        with self._pool.allocating(self._writer.memory):
            linear = cast(NativeLinear, make())
        stored = self._index.linears[name] = linear.stored(self._writer.tensor)
        return NativeLinear.of_stored(self._pool, stored, self._writer.read)

    def seal(self) -> None:
        """Write the index, and seal the arena."""
        self._writer.seal(msgspec.msgpack.encode(self._index))


class SharedWeights:
    """A store that reads all weights from a sealed arena."""

    complete = True

    def __init__(self, region: Region, index: WeightIndex, pool: ThreadPool) -> None:
        self._region, self._index, self._pool = region, index, pool

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        return self._region.tensor(self._index.tensors[name])

    def linear(self, name: str, make: Callable[[], LinearMap]) -> LinearMap:
        return NativeLinear.of_stored(self._pool, self._index.linears[name], self._region.tensor)


WeightStore = PrivateWeights | WrittenWeights | SharedWeights
"""A store of weights by name. It calls `make` for weights that are not stored."""


def with_shared_weights(
    arena: WeightArena, key: str, limit: int, pool: ThreadPool, load: Callable[[WeightStore], M]
) -> tuple[M, bool]:
    """Return the result of `load` with the weights of the model `key` in the arena, and whether they are
    there. The weights take about `limit` bytes. If the arena cannot hold them, or has another model's, they
    are private, which only takes more memory."""
    try:
        with arena.locked():
            if not arena.sealed:
                with arena.write(limit) as writer:
                    weights = WrittenWeights(writer, key, pool)
                    model = load(weights)
                    weights.seal()
                    return model, True
        index = msgspec.msgpack.decode(arena.index(), type=WeightIndex)
        if index.key == key:
            return load(SharedWeights(arena.map(), index, pool)), True
        logger.warning("the weights in shared memory belong to another model: this worker has its own copy")
    except OSError as error:
        logger.warning("the weights cannot be shared: this worker has its own copy (%s)", error)
    return load(PRIVATE), False
