"""The agent of a machine: it joins a head, and starts the workers that the head asks for as its children.

    head ◀══ TCP, CURVE ══▶ DEALER ── Membership ── Agent ── ROUTER ◀── ipc ──▶ worker processes
                                                      └── until when they may run ──▶ their standard input

Workers run only while the agent holds its lease. They are the same program as on the head's own machine.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from streamserve.cluster.membership import Begun, Command, Lost, Membership
from streamserve.fleet.control_socket import ControlSocket
from streamserve.fleet.events import WorkerLost
from streamserve.fleet.launcher import Launched
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
from streamserve.protocol.processors import usable_processors

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
BEAT_SECONDS = 0.25
QUEUED = 4096
LOGGED = 50
"""Failed handshakes of which one is logged."""
HEARTBEAT_MILLISECONDS = 500
SILENCE_MILLISECONDS = 1500
"""Silence of the head after which the connection is made again."""


@dataclass(frozen=True)
class AgentConfig:
    """The head's address, its public key, this agent's key pair, its machine, and the model's path here, if
    it is not the head's. A worker has so many `threads`, and shares the memory of its machine as one of
    `host_workers`; by default (0) both are divided among its slots."""

    head: Endpoint
    head_key: bytes
    own: KeyPair
    machine: Machine
    model: str | None = None
    threads: int = 0
    host_workers: int = 0


class LeasedWorker(Launched, Protocol):
    """A started worker that runs until the end of a lease."""

    def extend(self, until: float) -> None:
        """Tell it until when it may run, on this machine's clock."""
        ...


LaunchLeased = Callable[[WorkerConfig], Awaitable[LeasedWorker]]
"""Starts a worker. Raises OSError if that is not possible now."""


class Agent:
    """Joins the head and runs workers for it, until `stop`. Made in a running event loop."""

    def __init__(self, config: AgentConfig, launch: LaunchLeased = start_worker) -> None:
        self.membership = Membership(config.machine)
        self.joined_heads = 0
        self._config = config
        self._launch = launch
        self._states: dict[str, ProcessState[Any]] = {}
        self._processes: dict[str, LeasedWorker] = {}
        self._slots: dict[str, int] = {}
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
            await self._say(Forward(f"{worker}/{incarnation}", data))

    async def _tick(self) -> None:
        while True:
            await self._apply(self.membership.tick(time.monotonic()))
            for process in self._processes.values():
                process.extend(self.membership.expires)
            await asyncio.sleep(TICK_SECONDS)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for name, process in list(self._processes.items()):
                beat, now = process.beat(), time.monotonic()
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
                if worker in self._processes and str(self._states[name].incarnation) == incarnation:
                    await self._control.send(name, message)
            case End(worker, kill, grace):
                process = self._processes.get(worker)
                if process and kill:
                    process.kill()
                elif process:
                    self._tasks.spawn(process.stop(grace))

    async def _run(self, config: WorkerConfig) -> None:
        """Start a worker, and report its end."""
        worker = config.worker
        name, _, incarnation = worker.rpartition("/")
        self._states[name] = ProcessState(int(incarnation))
        taken = set(self._slots.values())
        slot = self._slots[worker] = next(slot for slot in itertools.count() if slot not in taken)
        try:
            await self._watch_worker(name, int(incarnation), self._localized(config, slot))
        finally:
            del self._slots[worker]

    async def _watch_worker(self, name: str, incarnation: int, config: WorkerConfig) -> None:
        worker = config.worker
        try:
            process = await self._launch(config)
        except OSError as error:
            await self._say(Ended(worker, str(error), []))
            return
        self._processes[worker] = process
        process.extend(self.membership.expires)
        await self._say(Started(worker, process.pid))
        ended = await process.watch(name, incarnation)
        del self._processes[worker]
        logger.warning("worker %s has ended: %s", worker, ended.reason)
        await self._say(_ended(worker, ended))

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
        processes = list(self._processes.values())
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.stop() for process in processes))


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
