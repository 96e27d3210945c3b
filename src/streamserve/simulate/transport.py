"""KV transport in virtual time: blocks are copied when they land, so one that was reused too early shows."""

from collections.abc import Callable, Sequence

from streamserve.engine.transfer import Landed, TransferError
from streamserve.protocol.tickets import CacheAddress
from streamserve.simulate.executor import CostExecutor

Later = Callable[[float, Callable[[], None]], None]
"""Do something after so many seconds, unless the worker that wanted it has died by then."""


LAYERS = 16
"""Layers that a pretended model is thought to have."""


class SimulatedTransport:
    """Writes blocks of `own` into the pool that `pool` finds at an address, None if its worker is gone. One
    push after another takes the wire for `block_seconds` a block. Of blocks that a step fills, whose end is
    in `step_left` seconds, the last layer leaves then."""

    def __init__(
        self,
        own: CostExecutor,
        pool: Callable[[str], CostExecutor | None],
        later: Later,
        block_seconds: float,
        step_left: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._own = own
        self._pool = pool
        self._later = later
        self._block_seconds = block_seconds
        self._step_left = step_left
        self._jobs = 0
        self._coming: set[int] = set()
        self._queue: list[tuple[int, CacheAddress, list[tuple[int, int]]]] = []
        self._landed: list[Landed] = []

    def check(self, to: CacheAddress) -> None:
        if self._pool(to.path) is None:
            raise TransferError(f"the worker {to.path} is gone")

    def push(self, to: CacheAddress, copies: Sequence[tuple[int, int]], coming: bool = False) -> int:
        self._jobs += 1
        self._queue.append((self._jobs, to, list(copies)))
        if coming:
            self._coming.add(self._jobs)
        if len(self._queue) == 1:
            self._later(0.0, self._send) if coming else self._send()
        return self._jobs

    def landed(self) -> list[Landed]:
        landed, self._landed = self._landed, []
        return landed

    def _send(self) -> None:
        """Put the first of the queue on the wire."""
        job, _, copies = self._queue[0]
        seconds = self._block_seconds * len(copies)
        if job in self._coming:
            self._coming.remove(job)
            seconds = max(seconds, self._step_left() + seconds / LAYERS)
        self._later(seconds, self._land)

    def _land(self) -> None:
        job, to, copies = self._queue.pop(0)
        pool = self._pool(to.path)
        if pool is None:
            self._landed.append(Landed(job, 0, f"the worker {to.path} is gone"))
        else:
            pool.receive(self._own, copies)
            self._landed.append(Landed(job, len(copies), seconds=self._block_seconds * len(copies)))
        if self._queue:
            self._send()
