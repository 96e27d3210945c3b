"""The workers of an agent's machine: started for a head, kept without one, adopted by the next, and ended.

    commands of the head ──▶ launch, forward, end ──▶ WorkerHost ── ROUTER ◀── ipc ──▶ worker processes
    the session is over  ──▶ leave, end_all       ──▶    │    └── until when they may run ──▶ standard input
    messages to the head ◀── tell ───────────────────────┘

A command of one session with a head is never executed in another session: NAME/INCARNATION of two heads can
be equal.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from streamserve.extras.cluster.hosted import Files, Hosted, LeasedWorker, State, files_of, fits, nearest
from streamserve.extras.cluster.membership import Membership, SessionLost
from streamserve.extras.cluster.session import PacketSession
from streamserve.fleet.control_socket import ControlSocket
from streamserve.fleet.events import WorkerLost
from streamserve.fleet.process_state import ProcessState
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.protocol.cluster import (
    Beat,
    End,
    ForwardedMessage,
    FromMachine,
    Machine,
    Started,
    WorkerEnded,
)
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.messages import Adopt, Leave, Left, encode

logger = logging.getLogger(__name__)

LEFT = encode(Left())
KEPT_LEASE_SECONDS = 5.0
"""A kept worker ends if its agent has not extended its lease for this many seconds."""
STEP_SECONDS = 60.0
"""Seconds that an adopted worker may take to leave one head, and again to serve the next: it may have to
finish a step of the model first."""

LaunchLeased = Callable[[WorkerConfig], Awaitable[LeasedWorker]]
"""Starts a worker. Raises OSError if that is not possible now."""
Localize = Callable[[WorkerConfig, int, str], WorkerConfig]
"""Adds the values that only this machine knows to the configuration of a worker, given its slot and its name
on the control socket."""


class WorkerHost:
    """The workers of `machine`. `tell` sends messages to the head of `membership`. Without a head, workers
    are kept for `keep` seconds. Must be created in a running event loop."""

    def __init__(
        self,
        machine: Machine,
        membership: Membership,
        launch: LaunchLeased,
        localize: Localize,
        keep: float,
        tell: Callable[[FromMachine], Awaitable[None]],
        tasks: TaskSupervisor,
    ) -> None:
        self.leaving = False
        """Whether workers are leaving their head. Meanwhile the agent does not join the next head: it offers
        that head the kept workers, which are not known yet."""
        self._machine, self._membership = machine, membership
        self._launch, self._localize, self._keep_seconds = launch, localize, keep
        self._tell, self._tasks = tell, tasks
        self._states: dict[str, ProcessState[Any]] = {}
        self._hosted: dict[str, Hosted] = {}
        """The workers by their names on the control socket."""
        self._starting: set[int] = set()
        """The slots of workers that are being started."""
        self._numbers = itertools.count(1)
        self._control = ControlSocket(self._states)

    @property
    def endpoint(self) -> str:
        """The address to which workers connect."""
        return self._control.endpoint

    async def relay(self) -> None:
        """Pass on the workers' messages, until cancelled. The first message of an adopted worker shows that
        it serves its head."""
        while True:
            peer, _, data = await self._control.receive()
            hosted = self._hosted.get(peer)
            if hosted and data == LEFT:
                hosted.state = State.LEFT
                hosted.left.set()
            elif hosted and hosted.of_head:
                if hosted.state is State.JOINS:
                    hosted.state = State.SERVES
                    hosted.served.set()
                    await self._tell(Started(hosted.name, hosted.process.pid))
                await self._tell(ForwardedMessage(hosted.name, data))

    def launch(self, config: WorkerConfig) -> None:
        """Make a kept worker serve the head, or start a new process."""
        self._tasks.spawn(self._run(self._membership.session, config))

    async def forward(self, worker: str, message: bytes) -> None:
        """Send a message of the head to its worker NAME/INCARNATION."""
        if hosted := self._of_head(worker):
            await self._control.send(hosted.peer, message)

    def end(self, end: End) -> None:
        hosted = self._of_head(end.worker)
        if hosted and end.kill:
            hosted.process.kill()
        elif hosted:
            self._tasks.spawn(hosted.process.stop(end.grace))

    def leave(self, lost: SessionLost) -> None:
        """Let all workers leave the head, whose session is over."""
        self.leaving = True
        self._tasks.spawn(self._keep_workers(lost))

    async def end_all(self) -> None:
        """Kill all workers, and wait for their ends."""
        hosted = list(self._hosted.values())
        for each in hosted:
            each.state = State.LEFT
            each.process.kill()
        await asyncio.gather(*(each.process.stop() for each in hosted))

    def tick(self, now: float) -> None:
        """Extend the leases of workers; end workers that were kept for too long."""
        for hosted in self._hosted.values():
            if hosted.state is State.LEFT or (hosted.state is State.LEAVES and not hosted.writes):
                hosted.process.extend(now + KEPT_LEASE_SECONDS)
            elif hosted.of_head and self._membership.joined:
                hosted.process.extend(self._membership.expires)
        for hosted in self._kept:
            if now > hosted.kept_until:
                logger.warning("worker %s: no head has adopted it: ending it", hosted.name)
                hosted.kept_until = 0.0
                self._offer()
                hosted.process.kill()

    async def beat(self) -> None:
        """Send the head the last signs of life of its workers."""
        for hosted in list(self._hosted.values()):
            beat, now = hosted.process.beat(), time.monotonic()
            if beat and hosted.of_head:
                age, still = now - beat.at, now - beat.moved_at
                await self._tell(Beat(hosted.name, age, beat.phase, still, beat.predicted))

    def close(self) -> None:
        """Close the control socket, after `end_all`."""
        self._control.close()

    @property
    def _slots(self) -> set[int]:
        return self._starting | {hosted.slot for hosted in self._hosted.values()}

    @property
    def _kept(self) -> list[Hosted]:
        """The workers without a head, in the order in which they were started."""
        return [hosted for hosted in self._hosted.values() if hosted.kept_until]

    def _of_head(self, worker: str) -> Hosted | None:
        """Return the head's worker NAME/INCARNATION, if it runs."""
        return next((h for h in self._hosted.values() if h.of_head and h.name == worker), None)

    async def _run(self, session: PacketSession | None, config: WorkerConfig) -> None:
        """Make a kept worker serve the head with this session, or start a new process. If the kept worker
        ends before it serves, another worker is used."""
        try:
            files = await asyncio.to_thread(files_of, self._localize(config, 0, "").model)
            for hosted in nearest(self._kept, config):
                fitting = hosted.kept_until and fits(
                    hosted, self._localize(config, hosted.slot, hosted.peer), files
                )
                if session is self._membership.session and fitting:
                    await self._adopt(session, hosted, config)
                    if hosted.served.is_set():
                        return
            if session is self._membership.session:
                await self._make_space(config)
            if session is self._membership.session:
                await self._start(session, config, files)
        except OSError as error:
            if session is self._membership.session:
                await self._tell(WorkerEnded(config.worker, str(error), []))

    async def _start(self, session: PacketSession | None, config: WorkerConfig, files: Files) -> None:
        """Start a process. Raises OSError if that is not possible now."""
        peer = f"worker-{next(self._numbers)}"
        slot = next(slot for slot in itertools.count() if slot not in self._slots)
        config = self._localize(config, slot, f"{peer}/1")
        self._states[peer] = ProcessState(1)
        self._starting.add(slot)
        try:
            process = await self._launch(config)
        except BaseException:
            del self._states[peer]
            raise
        finally:
            self._starting.discard(slot)
        name, _, incarnation = config.worker.rpartition("/")
        ending = asyncio.get_running_loop().create_task(process.watch(name, int(incarnation)))
        hosted = self._hosted[peer] = Hosted(process, config, slot, peer, files, ending)
        self._tasks.spawn(self._watch(hosted))
        process.extend(self._membership.expires)
        if session is not self._membership.session:  # the head that asked for it was lost
            hosted.state = State.LEFT
            process.kill()
            return
        await self._tell(Started(config.worker, process.pid))

    async def _adopt(self, session: PacketSession | None, hosted: Hosted, config: WorkerConfig) -> None:
        """Let a kept worker serve the head. If it does not, it is ended. If the head is lost meanwhile, it is
        kept for the next."""
        logger.warning("worker %s: adopted from the previous head, as %s", hosted.name, config.worker)
        hosted.kept_until = 0.0
        hosted.served.clear()
        self._offer()
        if await self._until(hosted.left, hosted, STEP_SECONDS):
            if session is not self._membership.session:
                self._keep(hosted)
                return
            hosted.config = self._localize(config, hosted.slot, f"{hosted.peer}/1")
            hosted.state = State.JOINS
            hosted.process.extend(self._membership.expires)
            await self._control.send(hosted.peer, encode(Adopt(hosted.config, hosted.closed)))
            served = await self._until(hosted.served, hosted, STEP_SECONDS)
            if served or session is not self._membership.session:
                return
        logger.error("worker %s does not serve the head: ending it", hosted.name)
        await self._end(hosted)

    async def _until(self, event: asyncio.Event, hosted: Hosted, seconds: float) -> bool:
        """Wait at most `seconds` for an event of a worker, or its end; return whether the event came."""
        waiting = asyncio.ensure_future(event.wait())
        await asyncio.wait(
            {waiting, hosted.ending}, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        return event.is_set() and not hosted.ending.done()

    async def _watch(self, hosted: Hosted) -> None:
        """Wait for the end of a process, and report it to the head that it serves."""
        ended = await hosted.ending
        self._hosted.pop(hosted.peer, None)
        self._states.pop(hosted.peer, None)
        logger.warning("worker %s has ended: %s", hosted.name, ended.reason)
        self._offer()
        if hosted.state is State.SERVES:
            await self._tell(_ended(hosted.name, ended))

    async def _keep_workers(self, lost: SessionLost) -> None:
        """Let all workers leave the head. Workers that may write to other workers' memory must leave before
        the lease ends, or are killed."""
        leaving = [hosted for hosted in self._hosted.values() if hosted.of_head]
        for hosted in leaving:
            hosted.state, hosted.closed = State.LEAVES, lost.until + lost.lease
            hosted.left.clear()
            if not hosted.writes:
                self._keep(hosted)
            await self._control.send(hosted.peer, encode(Leave()))
        try:
            await asyncio.gather(*(self._until_left(h, lost.until) for h in leaving if h.writes))
        finally:
            self.leaving = False

    async def _until_left(self, hosted: Hosted, until: float) -> None:
        """Keep a worker once it has left the head. If that is not before `until`, kill it."""
        left = await self._until(hosted.left, hosted, until - time.monotonic())
        if left and time.monotonic() <= until:
            self._keep(hosted)
        elif not hosted.ending.done():
            logger.error("worker %s has not left the head in time: killing it", hosted.name)
            hosted.process.kill()
            await asyncio.wait({hosted.ending})

    def _keep(self, hosted: Hosted) -> None:
        hosted.kept_until = time.monotonic() + self._keep_seconds
        self._offer()

    async def _make_space(self, config: WorkerConfig) -> None:
        """End kept workers until there is a free slot for a worker that is to start."""
        while self._kept and len(self._slots) >= self._machine.slots:
            hosted = nearest(self._kept, config)[0]
            logger.warning("worker %s does not match what the head needs: ending it", hosted.name)
            await self._end(hosted)

    async def _end(self, hosted: Hosted) -> None:
        """Kill a worker that serves no head, and wait for its end."""
        hosted.state, hosted.kept_until = State.LEFT, 0.0
        hosted.process.kill()
        await asyncio.wait({hosted.ending})
        self._hosted.pop(hosted.peer, None)

    def _offer(self) -> None:
        """Update the machine's offer to the next head: the kept workers."""
        kept = tuple(hosted.worker[:32] for hosted in self._kept)
        self._membership.machine = msgspec.structs.replace(self._machine, kept=kept)


def _ended(worker: str, lost: WorkerLost) -> WorkerEnded:
    suspects = None if lost.suspects is None else sorted(lost.suspects)
    return WorkerEnded(worker, lost.reason[:2000], suspects, lost.phase, lost.report[:256], lost.ending)
