"""KV transport in virtual time: blocks are copied when they arrive, which exposes blocks reused too early."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamserve.engine.transport import Landed, TransferError
from streamserve.protocol.tickets import CacheAddress
from streamserve.simulate.executor import CostExecutor

Later = Callable[[float, Callable[[], None]], None]
"""Call a function after that many seconds, unless the worker that scheduled it has died by then."""


LAYERS = 16
"""Layers that a simulated model is assumed to have."""


@dataclass
class _Push:
    """Blocks for the pool at an address. `ready` is when they are all computed; None if the step that fills
    them has not begun."""

    job: int
    to: CacheAddress
    copies: list[tuple[int, int]]
    ready: float | None


class SimulatedTransport:
    """Writes blocks of `own` into the pool that `pool` returns for an address, None if its worker is gone.
    Pushes use the wire one after another, for `block_seconds` a block. The last layer of blocks that a step
    fills leaves when the step ends; `step_left` returns how many seconds after `clock` that is."""

    def __init__(
        self,
        own: CostExecutor,
        pool: Callable[[str], CostExecutor | None],
        later: Later,
        block_seconds: float,
        clock: Callable[[], float] = lambda: 0.0,
        step_left: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._own = own
        self._pool = pool
        self._later = later
        self._block_seconds = block_seconds
        self._clock = clock
        self._step_left = step_left
        self._jobs = 0
        self._queue: list[_Push] = []
        self._landed: list[Landed] = []

    def check(self, to: CacheAddress) -> None:
        if self._pool(to.path) is None:
            raise TransferError(f"the worker {to.path} is gone")

    def push(self, to: CacheAddress, copies: Sequence[tuple[int, int]], coming: bool = False) -> int:
        self._jobs += 1
        push = _Push(self._jobs, to, list(copies), None if coming else self._clock())
        self._queue.append(push)
        if coming:
            self._later(0.0, lambda: self._begun(push))
        if len(self._queue) == 1:
            self._later(0.0, self._send) if coming else self._send()
        return self._jobs

    def landed(self) -> list[Landed]:
        landed, self._landed = self._landed, []
        return landed

    def _begun(self, push: _Push) -> None:
        """Note that the step that fills the push's blocks has begun."""
        if push.ready is None:
            push.ready = self._clock() + self._step_left()

    def _send(self) -> None:
        """Send the first push of the queue."""
        push = self._queue[0]
        self._begun(push)
        seconds = self._block_seconds * len(push.copies)
        left = max(0.0, (push.ready or 0.0) - self._clock())
        self._later(max(seconds, left + seconds / LAYERS), self._land)

    def _land(self) -> None:
        push = self._queue.pop(0)
        pool = self._pool(push.to.path)
        if pool is None:
            self._landed.append(Landed(push.job, 0, f"the worker {push.to.path} is gone"))
        else:
            pool.receive(self._own, push.copies)
            seconds = self._block_seconds * len(push.copies)
            self._landed.append(Landed(push.job, len(push.copies), seconds=seconds))
        if self._queue:
            self._send()
