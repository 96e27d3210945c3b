"""KV transport in virtual time: blocks are copied when they arrive, which exposes blocks that are reused too
early."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamserve.contracts.transport import Landed, TransferError
from streamserve.protocol.transfers import CacheAddress
from streamserve.simulate.executor import CostExecutor

Schedule = Callable[[float, Callable[[], None]], None]
"""Calls a function after this many seconds, unless the worker that scheduled it has died by then."""

Pool = Callable[[str], CostExecutor | None]
"""Returns the KV pool of the worker at a path; None if the worker is gone."""


LAYERS = 16
"""Default number of layers of a simulated model."""


@dataclass
class _SimulatedPush:
    """Blocks for the pool at an address. `ready` is when all of them are computed; None if the step that
    fills them has not begun."""

    push_id: int
    to: CacheAddress
    copies: list[tuple[int, int]]
    ready: float | None


class SimulatedTransport:
    """Writes blocks of `executor` into the pool at an address; `pool` returns this pool, or None if its
    worker is gone.

    Pushes use the wire one after another, for `block_seconds` per block. Blocks that a step fills are sent
    layer by layer, the last of `layers` when the step ends: `step_left` seconds after `clock`. With one
    layer, they are sent as a whole.
    """

    def __init__(
        self,
        executor: CostExecutor,
        pool: Pool,
        schedule: Schedule,
        block_seconds: float,
        clock: Callable[[], float] = lambda: 0.0,
        step_left: Callable[[], float] = lambda: 0.0,
        layers: int = LAYERS,
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._schedule = schedule
        self._block_seconds = block_seconds
        self._clock = clock
        self._step_left = step_left
        self._layers = layers
        self._push_count = 0
        self._queue: list[_SimulatedPush] = []
        self._landed: list[Landed] = []

    def check(self, to: CacheAddress) -> None:
        """Raise TransferError if the worker is gone."""
        if self._pool(to.path) is None:
            raise TransferError(f"the worker {to.path} is gone")

    def push(
        self,
        to: CacheAddress,
        copies: Sequence[tuple[int, int]],
        upcoming: bool = False,
        reservation: str = "",
    ) -> int:
        self._push_count += 1
        push = _SimulatedPush(self._push_count, to, list(copies), None if upcoming else self._clock())
        self._queue.append(push)
        if upcoming:
            self._schedule(0.0, lambda: self._step_begun(push))
        if len(self._queue) == 1:
            self._schedule(0.0, self._send) if upcoming else self._send()
        return self._push_count

    def landed(self) -> list[Landed]:
        landed, self._landed = self._landed, []
        return landed

    def _step_begun(self, push: _SimulatedPush) -> None:
        """Record that the step that fills the push's blocks has begun."""
        if push.ready is None:
            push.ready = self._clock() + self._step_left()

    def _send(self) -> None:
        """Send the first push of the queue."""
        push = self._queue[0]
        self._step_begun(push)
        seconds = self._block_seconds * len(push.copies)
        step_left = max(0.0, (push.ready or 0.0) - self._clock())
        self._schedule(max(seconds, step_left + seconds / self._layers), self._land)

    def _land(self) -> None:
        push = self._queue.pop(0)
        pool = self._pool(push.to.path)
        if pool is None:
            self._landed.append(Landed(push.push_id, 0, f"the worker {push.to.path} is gone"))
        else:
            pool.receive(self._executor, push.copies)
            seconds = self._block_seconds * len(push.copies)
            self._landed.append(Landed(push.push_id, len(push.copies), seconds=seconds))
        if self._queue:
            self._send()
