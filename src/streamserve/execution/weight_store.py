"""Where a model's weights are when it is loaded: made for this process alone, or in memory that the workers
of a host share (weight_arena.py)."""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import msgspec
from torch import Tensor

from streamserve.execution.linear import LinearMap
from streamserve.execution.native.library import ThreadPool
from streamserve.execution.native.linear import NativeLinear, StoredLinear
from streamserve.execution.weight_arena import ArenaWriter, Region, StoredTensor, WeightArena

logger = logging.getLogger(__name__)

M = TypeVar("M")


class WeightStore(Protocol):
    """Returns weights by name, which it makes unless it has them."""

    @property
    def complete(self) -> bool:
        """Whether it has all, and makes none."""
        ...

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of a name."""
        ...

    def linear(self, name: str, make: Callable[[], LinearMap]) -> LinearMap:
        """Return the linear map of a name."""
        ...


class PrivateWeights:
    """Makes all weights, for this process alone."""

    complete = False

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Make the tensor."""
        return make()

    def linear(self, name: str, make: Callable[[], LinearMap]) -> LinearMap:
        """Make the linear map."""
        return make()


PRIVATE = PrivateWeights()


class WeightIndex(msgspec.Struct, frozen=True):
    """What an arena holds: the weights of the model `key`, by name."""

    key: str
    tensors: dict[str, StoredTensor]
    linears: dict[str, StoredLinear]


class WrittenWeights:
    """Makes all weights in an arena."""

    complete = False

    def __init__(self, writer: ArenaWriter, key: str, pool: ThreadPool) -> None:
        self._writer, self._pool = writer, pool
        self._index = WeightIndex(key, {}, {})

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Make the tensor, and move it."""
        stored = self._index.tensors[name] = self._writer.tensor(make())
        return self._writer.read(stored)

    def linear(self, name: str, make: Callable[[], LinearMap]) -> LinearMap:
        """Make the linear map, whose weight is packed into the arena, and move the rest of it."""
        with self._pool.allocating(self._writer.memory):
            linear = cast(NativeLinear, make())
        stored = self._index.linears[name] = linear.stored(self._writer.tensor)
        return NativeLinear.of_stored(self._pool, stored, self._writer.read)

    def seal(self) -> None:
        """Complete the arena."""
        self._writer.seal(msgspec.msgpack.encode(self._index))


class SharedWeights:
    """Has all weights, in a sealed arena."""

    complete = True

    def __init__(self, region: Region, index: WeightIndex, pool: ThreadPool) -> None:
        self._region, self._index, self._pool = region, index, pool

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor."""
        return self._region.tensor(self._index.tensors[name])

    def linear(self, name: str, make: Callable[[], LinearMap]) -> LinearMap:
        """Return the linear map."""
        return NativeLinear.of_stored(self._pool, self._index.linears[name], self._region.tensor)


def with_shared_weights(
    arena: WeightArena, key: str, limit: int, pool: ThreadPool, load: Callable[[WeightStore], M]
) -> tuple[M, bool]:
    """Return what `load` makes of the weights of the model `key`, about `limit` bytes, in the arena, and
    whether they are there: if it cannot hold them, or holds others, they are private, which only takes more
    memory."""
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
