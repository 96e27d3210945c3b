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

from streamserve.cluster.hosted import Files, Hosted, LeasedWorker, files_of, fits, nearest
from streamserve.cluster.membership import Begun, Command, Lost, Membership
from streamserve.fleet.control_socket import ControlSocket
from streamserve.fleet.events import WorkerLost
from streamserve.fleet.process_state import ProcessState
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.fleet.worker_process import start_worker
from streamserve.protocol.cluster import (
    MAX_CLUSTER_BYTES,
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
from streamserve.protocol.messages import Adopt, Leave
from streamserve.protocol.messages import encode as encode_message
from streamserve.protocol.processors import usable_processors

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
BEAT_SECONDS = 0.25
QUEUED = 4096
LOGGED = 50
"""Failed handshakes of which one is logged."""
HEARTBEAT_MILLISECONDS = 500
KEPT = "kept-"
"""Prefix of the names of kept workers on the control socket; no worker of a head has such a name."""
KEPT_LEASE_SECONDS = 5.0
"""A kept worker ends when it has not heard this agent for so long."""
ADOPT_SECONDS = 10.0
"""Within so many seconds an adopted worker must serve."""
SILENCE_MILLISECONDS = 1500
"""Silence of the head after which the connection is made again."""


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
        self._running: dict[str, Hosted] = {}
        """The workers of the present head, by NAME/INCARNATION."""
        self._leaving: dict[str, Hosted] = {}
        self._kept: dict[str, Hosted] = {}
        """Those that are leaving their head, and have left it, by their names on the control socket."""
        self._slots: set[int] = set()
        self._numbers = itertools.count(1)
        self._control = ControlSocket(self._states)
        self._context = zmq.asyncio.Context()
        self._socket = _connect(self._context, config)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED)
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
            worker, incarnation, data = await self._control.receive()
            if worker in self._leaving:
                self._leaving[worker].has_left.set()  # the only message that it sends by this name
            elif hosted := self._running.get(f"{worker}/{incarnation}"):
                hosted.served.set()
                await self._say(Forward(hosted.name, data))

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            if not self._leaving:  # a head is told what is kept
                await self._apply(self.membership.tick(now))
            if self.membership.joined:
                for hosted in self._running.values():
                    hosted.process.extend(self.membership.expires)
            for hosted in list(self._kept.values()):
                hosted.process.extend(now + KEPT_LEASE_SECONDS)
                if now > hosted.kept_until:
                    logger.warning("worker %s: no head has adopted it: ending it", hosted.name)
                    self._forget_kept(hosted)
                    self._tasks.spawn(hosted.process.stop())
            await asyncio.sleep(TICK_SECONDS)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for name, hosted in list(self._running.items()):
                beat, now = hosted.process.beat(), time.monotonic()
                if beat:
                    age, still = now - beat.at, now - beat.moved_at
                    await self._say(Beat(name, age, beat.phase, still, beat.predicted))

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
                    await self._keep_workers(effect)
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
                name, _, incarnation = worker.rpartition("/")
                if worker in self._running and str(self._states[name].incarnation) == incarnation:
                    await self._control.send(name, message)
            case End(worker, kill, grace):
                hosted = self._running.get(worker)
                if hosted and kill:
                    hosted.process.kill()
                elif hosted:
                    self._tasks.spawn(hosted.process.stop(grace))

    async def _run(self, config: WorkerConfig) -> None:
        """Let a kept worker, or else a new process, be a worker of the head."""
        name, _, incarnation = config.worker.rpartition("/")
        self._states[name] = ProcessState(int(incarnation))
        files = await asyncio.to_thread(files_of, self._localized(config, 0).model)
        for hosted in nearest(list(self._kept.values()), config):
            if fits(hosted, self._localized(config, hosted.slot), files):
                await self._adopt(hosted, config)
                return
        try:
            await self._make_space(config)
            await self._start(config, files)
        except OSError as error:
            await self._say(Ended(config.worker, str(error), []))

    async def _start(self, config: WorkerConfig, files: Files) -> None:
        """Start a process. Raises OSError if that is not possible now."""
        session = self.membership.session
        slot = next(slot for slot in itertools.count() if slot not in self._slots)
        self._slots.add(slot)
        try:
            config = self._localized(config, slot)
            process = await self._launch(config)
        except BaseException:
            self._slots.discard(slot)
            raise
        name, _, incarnation = config.worker.rpartition("/")
        ending = asyncio.get_running_loop().create_task(process.watch(name, int(incarnation)))
        hosted = Hosted(process, config, slot, files, ending)
        self._tasks.spawn(self._watch(hosted))
        if session is not self.membership.session or session is None:  # lost meanwhile
            process.kill()
            return
        self._running[config.worker] = hosted
        process.extend(self.membership.expires)
        await self._say(Started(config.worker, process.pid))

    async def _adopt(self, hosted: Hosted, config: WorkerConfig) -> None:
        """Let a kept worker serve the head."""
        peer = hosted.peer
        self._forget_kept(hosted, adopted=True)
        logger.warning("worker %s: adopted from the head before, as %s", hosted.name, config.worker)
        hosted.config = self._localized(config, hosted.slot)
        hosted.served.clear()
        self._running[config.worker] = hosted
        hosted.process.extend(self.membership.expires)
        await self._control.send(peer, encode_message(Adopt(hosted.config, hosted.closed)))
        del self._states[peer]
        await self._say(Started(config.worker, hosted.process.pid))
        try:
            await asyncio.wait_for(hosted.served.wait(), ADOPT_SECONDS)
        except TimeoutError:
            if self._running.get(config.worker) is hosted:
                logger.error("worker %s does not serve the head: ending it", config.worker)
                hosted.process.kill()

    async def _watch(self, hosted: Hosted) -> None:
        """Wait for the end of a process, and report it to the head that it serves."""
        ended = await hosted.ending
        self._slots.discard(hosted.slot)
        self._forget_kept(hosted)
        logger.warning("worker %s has ended: %s", hosted.name, ended.reason)
        if self._running.get(hosted.name) is hosted:
            del self._running[hosted.name]
            await self._say(_ended(hosted.name, ended))

    async def _keep_workers(self, lost: Lost) -> None:
        """Let all workers leave the head; those that have not done so when the lease ends are killed."""
        running, self._running = self._running, {}
        for name, hosted in running.items():
            hosted.peer = f"{KEPT}{next(self._numbers)}"
            hosted.has_left.clear()
            self._leaving[hosted.peer] = hosted
            self._states[hosted.peer] = ProcessState(1)
            await self._control.send(name.rpartition("/")[0], encode_message(Leave(f"{hosted.peer}/1")))
        try:
            await asyncio.gather(*(self._until_left(hosted, lost) for hosted in running.values()))
        finally:
            self._leaving.clear()

    async def _until_left(self, hosted: Hosted, lost: Lost) -> None:
        """Keep a worker as soon as it has left the head; kill it if that is too late."""
        leaving = asyncio.ensure_future(hosted.has_left.wait())
        seconds = max(0.0, lost.until - time.monotonic())
        await asyncio.wait({leaving, hosted.ending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if hosted.ending.done():
            del self._states[hosted.peer]
        elif not hosted.has_left.is_set() or time.monotonic() > lost.until:
            logger.error("worker %s has not left the head in time: killing it", hosted.name)
            del self._states[hosted.peer]
            hosted.process.kill()
            await asyncio.wait({hosted.ending})
        else:
            hosted.closed = lost.until + lost.lease
            hosted.kept_until = time.monotonic() + self._config.keep
            self._kept[hosted.peer] = hosted
            self._offer()

    async def _make_space(self, config: WorkerConfig) -> None:
        """End kept workers that take the memory of one that is to start."""
        while self._kept and len(self._slots) >= self._config.machine.slots:
            hosted = nearest(list(self._kept.values()), config)[0]
            logger.warning("worker %s: not what the head needs: ending it", hosted.name)
            self._forget_kept(hosted)
            await hosted.process.stop()
            self._slots.discard(hosted.slot)

    def _forget_kept(self, hosted: Hosted, adopted: bool = False) -> None:
        if self._kept.pop(hosted.peer, None):
            if not adopted:
                del self._states[hosted.peer]
            self._offer()

    def _offer(self) -> None:
        """Tell the next head what is kept."""
        kept = tuple(hosted.worker[:32] for hosted in self._kept.values())
        self.membership.machine = msgspec.structs.replace(self._config.machine, kept=kept)

    def _localized(self, config: WorkerConfig, slot: int) -> WorkerConfig:
        """Return the configuration of the worker in a slot, with what only this machine knows."""
        machine, model = self._config.machine, config.model
        threads = self._config.threads or usable_processors().threads // machine.slots
        network = config.kv_network
        return msgspec.structs.replace(
            config,
            kv_network=network and msgspec.structs.replace(network, address=machine.address),
            endpoint=self._control.endpoint,
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
        hosted = [*self._running.values(), *self._leaving.values(), *self._kept.values()]
        for each in hosted:
            each.process.kill()
        await asyncio.gather(*(each.process.stop() for each in hosted))
        self._running = {}


_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def _connect(context: zmq.asyncio.Context, config: AgentConfig) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    for option, value in {
        zmq.LINGER: 200,
        zmq.IMMEDIATE: 1,
        zmq.MAXMSGSIZE: MAX_CLUSTER_BYTES,
        zmq.SNDHWM: QUEUED,
        zmq.RCVHWM: QUEUED,
        zmq.CONNECT_TIMEOUT: 1000,
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 500,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
        zmq.HEARTBEAT_TIMEOUT: SILENCE_MILLISECONDS,
        zmq.IPV6: int(":" in config.head.host),
    }.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.CURVE_SERVERKEY, config.head_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, config.own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, config.own.secret)
    socket.connect(config.head.address)
    return socket


def _ended(worker: str, lost: WorkerLost) -> Ended:
    suspects = None if lost.suspects is None else sorted(lost.suspects)
    return Ended(worker, lost.reason[:2000], suspects, lost.phase, lost.report[:256])
