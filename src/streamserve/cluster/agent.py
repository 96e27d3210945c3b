"""The agent of a machine: it joins a head, and starts the workers that the head asks for as its children.

    head ◀══ TCP, CURVE ══▶ DEALER ── Membership ── Agent ── ROUTER ◀── ipc ──▶ worker processes
                                                      └── until when they may run ──▶ their standard input

Workers run only while the agent holds its lease, and are kept for a while for the next head (hosted.py). They
are the same program as on the head's own machine.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from streamserve.cluster.head_socket import FAILED, connect
from streamserve.cluster.hosted import Files, Hosted, LeasedWorker, State, files_of, fits, nearest
from streamserve.cluster.membership import Begun, Command, Lost, Membership
from streamserve.fleet.control_socket import ControlSocket
from streamserve.fleet.events import WorkerLost
from streamserve.fleet.process_state import ProcessState
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.fleet.worker_process import start_worker
from streamserve.protocol.cluster import (
    Beat,
    End,
    Ended,
    Forward,
    FromAgent,
    FromMachine,
    Launch,
    Machine,
    Started,
    decode_from_head,
    decode_to_machine,
    encode,
)
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.crashes import crash_folder
from streamserve.protocol.curve import Endpoint, KeyPair
from streamserve.protocol.messages import Adopt, Leave, Left
from streamserve.protocol.messages import encode as encode_message
from streamserve.protocol.processors import usable_processors

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
BEAT_SECONDS = 0.25
LOGGED = 50
"""Failed handshakes of which one is logged."""
LEFT = encode_message(Left())
KEPT_LEASE_SECONDS = 5.0
"""A kept worker ends when it has not heard this agent for so long."""
STEP_SECONDS = 60.0
"""How long an adopted worker may take to leave one head, and to serve the next: a step of the model."""


@dataclass(frozen=True)
class AgentConfig:
    """The head's address, its public key, this agent's key pair, its machine, and the model's path here, if
    it is not the head's. A worker has so many `threads`, and shares the memory of its machine as one of
    `host_workers`; by default (0) both are divided among its slots. Without a head, workers are kept for
    `keep` seconds."""

    head: Endpoint
    head_key: bytes
    own: KeyPair
    machine: Machine
    model: str | None = None
    threads: int = 0
    host_workers: int = 0
    keep: float = 0.0


LaunchLeased = Callable[[WorkerConfig], Awaitable[LeasedWorker]]
"""Starts a worker. Raises OSError if that is not possible now."""


class Agent:
    """Joins the head and runs workers for it, until `stop`. Made in a running event loop."""

    def __init__(self, config: AgentConfig, launch: LaunchLeased = start_worker) -> None:
        self.membership = Membership(config.machine, leave=config.keep > 0)
        self.joined_heads = 0
        self._config = config
        self._launch = launch
        self._states: dict[str, ProcessState[Any]] = {}
        self._hosted: dict[str, Hosted] = {}
        """The workers' processes, by their names on the control socket."""
        self._starting: set[int] = set()
        """The slots of those that are being started."""
        self._leaving = False
        self._numbers = itertools.count(1)
        self._control = ControlSocket(self._states)
        self._context = zmq.asyncio.Context()
        self._socket = connect(self._context, config.head, config.head_key, config.own)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = TaskSupervisor(self._fail)

    async def run(self) -> None:
        """Serve until `stop`. Raises JoinError if the head refuses this machine for good."""
        loops = (self._receive, self._relay, self._tick, self._beat, self._watch_connection)
        for loop in loops:
            self._tasks.spawn(loop())
        try:
            await self._over
        finally:
            await self._end_workers()
            await self._tasks.close()
            self._control.close()
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._context.term()

    def stop(self) -> None:
        """End the workers, then this agent."""
        if not self._over.done():
            self._over.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    async def _receive(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                message = decode_from_head(data)
            except msgspec.DecodeError:
                logger.exception("the head sent a message that cannot be decoded: ignored")
                continue
            await self._apply(self.membership.heard(message, time.monotonic()))

    async def _relay(self) -> None:
        """Pass on the workers' messages."""
        while True:
            peer, _, data = await self._control.receive()
            hosted = self._hosted.get(peer)
            if hosted and data == LEFT:
                hosted.state = State.LEFT
                hosted.left.set()
            elif hosted and hosted.state is State.SERVES:
                hosted.served.set()
                await self._say(Forward(hosted.name, data))

    @property
    def _slots(self) -> set[int]:
        """The slots that are taken."""
        return self._starting | {hosted.slot for hosted in self._hosted.values()}

    @property
    def _kept(self) -> list[Hosted]:
        """The workers without a head, in the order in which they were started."""
        return [hosted for hosted in self._hosted.values() if hosted.kept_until]

    def _serving(self, worker: str) -> Hosted | None:
        """Return the worker NAME/INCARNATION of the head, if it runs."""
        serving = (hosted for hosted in self._hosted.values() if hosted.state is State.SERVES)
        return next((hosted for hosted in serving if hosted.name == worker), None)

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            if not self._leaving:  # a head is told what is kept
                await self._apply(self.membership.tick(now))
            for hosted in self._hosted.values():
                if hosted.state is State.LEFT or (hosted.state is State.LEAVES and not hosted.writes):
                    hosted.process.extend(now + KEPT_LEASE_SECONDS)
                elif hosted.state is State.SERVES and self.membership.joined:
                    hosted.process.extend(self.membership.expires)
            for hosted in self._kept:
                if now > hosted.kept_until:
                    logger.warning("worker %s: no head has adopted it: ending it", hosted.name)
                    hosted.kept_until = 0.0
                    hosted.process.kill()
            await asyncio.sleep(TICK_SECONDS)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for hosted in list(self._hosted.values()):
                beat, now = hosted.process.beat(), time.monotonic()
                if beat and hosted.state is State.SERVES:
                    age, still = now - beat.at, now - beat.moved_at
                    await self._say(Beat(hosted.name, age, beat.phase, still, beat.predicted))

    async def _watch_connection(self) -> None:
        failures = 0
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await self._apply(self.membership.reconnected(time.monotonic()))
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                failures += 1
                if failures % LOGGED == 1:
                    logger.warning(
                        "%s closed the connection in its handshake: it is starting or stopping, or it has "
                        "another key than --join says",
                        self._config.head.address,
                    )
            else:
                logger.error(
                    "%s refuses this machine's key %s, or has another key than --join says: list this one in "
                    "its --join-clients, or give --key a copy of its --join-key file",
                    self._config.head.address,
                    self._config.own.public.hex(),
                )

    async def _apply(self, effects: Iterable[FromAgent | Begun | Command | Lost]) -> None:
        for effect in list(effects):
            match effect:
                case Begun(epoch):
                    self.joined_heads += 1
                    logger.warning("joined the head at %s (epoch %d)", self._config.head.address, epoch)
                case Lost() if self._config.keep:
                    logger.error("the session with the head is over: %s: keeping the workers", effect.reason)
                    self._leaving = True
                    self._tasks.spawn(self._keep_workers(effect))
                case Lost(reason):
                    logger.error("the session with the head is over: %s: ending the workers", reason)
                    await self._end_workers()
                case Command(data):
                    await self._execute(data)
                case _:
                    with contextlib.suppress(zmq.Again):  # not connected: the session repeats it
                        await self._socket.send(encode(effect), zmq.NOBLOCK)

    async def _say(self, message: FromMachine) -> None:
        await self._apply(self.membership.send(encode(message)))

    async def _execute(self, data: bytes) -> None:
        match decode_to_machine(data):
            case Launch(config):
                self._tasks.spawn(self._run(config))
            case Forward(worker, message):
                if hosted := self._serving(worker):
                    await self._control.send(hosted.peer, message)
            case End(worker, kill, grace):
                hosted = self._serving(worker)
                if hosted and kill:
                    hosted.process.kill()
                elif hosted:
                    self._tasks.spawn(hosted.process.stop(grace))

    async def _run(self, config: WorkerConfig) -> None:
        """Let a kept worker, or else a new process, be a worker of the head."""
        try:
            files = await asyncio.to_thread(files_of, self._localized(config, 0, "").model)
            for hosted in nearest(self._kept, config):
                if fits(hosted, self._localized(config, hosted.slot, hosted.peer), files):
                    await self._adopt(hosted, config)
                    return
            await self._make_space(config)
            await self._start(config, files)
        except OSError as error:
            await self._say(Ended(config.worker, str(error), []))

    async def _start(self, config: WorkerConfig, files: Files) -> None:
        """Start a process. Raises OSError if that is not possible now."""
        session, peer = self.membership.session, f"worker-{next(self._numbers)}"
        slot = next(slot for slot in itertools.count() if slot not in self._slots)
        config = self._localized(config, slot, f"{peer}/1")
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
        process.extend(self.membership.expires)
        if session is not self.membership.session:  # the head that wanted it is lost
            hosted.state = State.LEFT
            process.kill()
            return
        await self._say(Started(config.worker, process.pid))

    async def _adopt(self, hosted: Hosted, config: WorkerConfig) -> None:
        """Let a kept worker serve the head. Raises OSError if it does not leave the one before."""
        logger.warning("worker %s: adopted from the head before, as %s", hosted.name, config.worker)
        session, hosted.kept_until = self.membership.session, 0.0
        self._offer()
        left = await self._until(hosted.left, hosted, STEP_SECONDS)
        if session is not self.membership.session:  # the head that wanted it is lost
            self._keep(hosted)
            return
        if not left:
            hosted.process.kill()
            raise OSError("the worker that was kept for it computes no more")
        hosted.config = self._localized(config, hosted.slot, f"{hosted.peer}/1")
        hosted.state = State.SERVES
        hosted.served.clear()
        hosted.process.extend(self.membership.expires)
        await self._control.send(hosted.peer, encode_message(Adopt(hosted.config, hosted.closed)))
        await self._say(Started(config.worker, hosted.process.pid))
        if not await self._until(hosted.served, hosted, STEP_SECONDS) and hosted.state is State.SERVES:
            logger.error("worker %s does not serve the head: ending it", hosted.name)
            hosted.process.kill()

    async def _until(self, event: asyncio.Event, hosted: Hosted, seconds: float) -> bool:
        """Wait for an event of a worker, or its end; return whether the event came."""
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
            await self._say(_ended(hosted.name, ended))

    async def _keep_workers(self, lost: Lost) -> None:
        """Let all workers leave the head. Those that may write to others, and have not left when the lease
        ends, are killed."""
        leaving = [hosted for hosted in self._hosted.values() if hosted.state is State.SERVES]
        for hosted in leaving:
            hosted.state, hosted.closed = State.LEAVES, lost.until + lost.lease
            hosted.left.clear()
            if not hosted.writes:
                self._keep(hosted)
            await self._control.send(hosted.peer, encode_message(Leave()))
        try:
            await asyncio.gather(*(self._until_left(h, lost.until) for h in leaving if h.writes))
        finally:
            self._leaving = False

    async def _until_left(self, hosted: Hosted, until: float) -> None:
        """Keep a worker as soon as it has left the head; kill it if that is too late."""
        left = await self._until(hosted.left, hosted, until - time.monotonic())
        if left and time.monotonic() <= until:
            self._keep(hosted)
        elif not hosted.ending.done():
            logger.error("worker %s has not left the head in time: killing it", hosted.name)
            hosted.process.kill()
            await asyncio.wait({hosted.ending})

    def _keep(self, hosted: Hosted) -> None:
        hosted.kept_until = time.monotonic() + self._config.keep
        self._offer()

    async def _make_space(self, config: WorkerConfig) -> None:
        """End kept workers that take the memory of one that is to start."""
        while self._kept and len(self._slots) >= self._config.machine.slots:
            hosted = nearest(self._kept, config)[0]
            logger.warning("worker %s: not what the head needs: ending it", hosted.name)
            hosted.kept_until = 0.0
            hosted.process.kill()
            await asyncio.wait({hosted.ending})
            self._hosted.pop(hosted.peer, None)

    def _offer(self) -> None:
        """Tell the next head what is kept."""
        kept = tuple(hosted.worker[:32] for hosted in self._kept)
        self.membership.machine = msgspec.structs.replace(self._config.machine, kept=kept)

    def _localized(self, config: WorkerConfig, slot: int, peer: str) -> WorkerConfig:
        """Return the configuration of the worker in a slot, with what only this machine knows."""
        machine, model = self._config.machine, config.model
        threads = self._config.threads or usable_processors().threads // machine.slots
        network = config.kv_network
        return msgspec.structs.replace(
            config,
            kv_network=network and msgspec.structs.replace(network, address=machine.address),
            endpoint=self._control.endpoint,
            peer=peer,
            model=msgspec.structs.replace(
                model, path=self._config.model or model.path, threads=model.threads or max(1, threads)
            ),
            host_workers=self._config.host_workers or machine.slots,
            host_number=slot,
            leased=True,
            clock_offset=self.membership.offset,
            host=machine.name,
            crash_folder=str(crash_folder(os.environ)),
        )

    async def _end_workers(self) -> None:
        """Kill all workers, and wait for their ends."""
        hosted = list(self._hosted.values())
        for each in hosted:
            each.state = State.LEFT
            each.process.kill()
        await asyncio.gather(*(each.process.stop() for each in hosted))


def _ended(worker: str, lost: WorkerLost) -> Ended:
    suspects = None if lost.suspects is None else sorted(lost.suspects)
    return Ended(worker, lost.reason[:2000], suspects, lost.phase, lost.report[:256])
