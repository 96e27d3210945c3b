"""A worker on another machine, as the head sees it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from streamserve.extras.cluster.registry import RegisteredAgent
from streamserve.fleet.events import Heartbeat, WorkerLost
from streamserve.fleet.worker_process import STOP_SECONDS
from streamserve.protocol.cluster import Beat, End, ToMachine, WorkerEnded


class RemoteWorker:
    """The worker `name` (NAME/INCARNATION) on the machine of `agent`. `command` sends a command to an agent.
    A lost worker counts as dead after `grace` seconds."""

    def __init__(
        self,
        name: str,
        agent: RegisteredAgent,
        command: Callable[[RegisteredAgent, ToMachine], Awaitable[None]],
        grace: float,
    ) -> None:
        self.name = name
        self.agent = agent
        self._command = command
        self._grace = grace
        self._pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._end: asyncio.Future[WorkerEnded | str] = asyncio.get_running_loop().create_future()
        self._dead = asyncio.Event()
        self._beat: Heartbeat | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        return self._pid.result()

    @property
    def over(self) -> bool:
        """Whether the worker has ended, or was lost."""
        return self._end.done()

    @property
    def is_dead(self) -> bool:
        """Whether the worker certainly writes no more."""
        return self._dead.is_set()

    async def until_started(self) -> None:
        """Wait until the worker's process runs. Raises OSError if it ends before that."""
        waiting: set[asyncio.Future[Any]] = {self._pid, self._end}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not self._pid.done():
            end = self._end.result()
            raise OSError(end if isinstance(end, str) else end.reason)

    def started(self, pid: int) -> None:
        """Record that the worker's process runs."""
        if not self._pid.done():
            self._pid.set_result(pid)

    def heard(self, beat: Beat, now: float) -> None:
        """Record a sign of life."""
        self._beat = Heartbeat(now - beat.age, beat.phase, now - beat.still, beat.predicted)

    def ended(self, ended: WorkerEnded) -> None:
        """Record that the worker's process has ended."""
        self._dead.set()
        if not self._end.done():
            self._end.set_result(ended)

    def lose(self, reason: str) -> None:
        """Record that the worker's machine was lost."""
        if not self._end.done():
            self._end.set_result(reason)
            asyncio.get_running_loop().call_later(self._grace, self._dead.set)

    def beat(self) -> Heartbeat | None:
        return None if self.over else self._beat

    async def watch(self, worker: str, incarnation: int) -> WorkerLost:
        end = await asyncio.shield(self._end)
        if isinstance(end, str):
            reason = self._placed(end)
            return WorkerLost(worker, incarnation, reason, frozenset(), dead=False, ending="unclear")
        suspects = None if end.suspects is None else frozenset(end.suspects)
        return WorkerLost(
            worker, incarnation, self._placed(end.reason), suspects, end.phase, end.report, ending=end.ending
        )

    async def dead(self) -> None:
        await self._dead.wait()

    def kill(self) -> None:
        if not self.over:
            self._spawn(End(self.name, kill=True))

    async def stop(self, grace: float = 0.0) -> None:
        if self.over:
            return
        await self._command(self.agent, End(self.name, kill=False, grace=grace))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._end), grace + 2 * STOP_SECONDS)

    def _placed(self, reason: str) -> str:
        return f"{reason} (machine {self.agent.name})"

    def _spawn(self, command: ToMachine) -> None:
        task = asyncio.get_running_loop().create_task(self._send(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, command: ToMachine) -> None:
        await self._command(self.agent, command)
