"""The agent of a machine: it joins a head, and starts workers for the head as child processes.

    head ◀══ TCP, CURVE ══▶ DEALER ── Membership ── Agent ── WorkerHost ◀──▶ worker processes

Workers run only while the agent holds its lease. Afterwards they are kept for a while for the next head
(worker_host.py). They run the same program as workers on the head's machine.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from streamserve.extras.cluster.head_socket import FAILED, connect
from streamserve.extras.cluster.membership import Begun, Command, Membership, SessionLost
from streamserve.extras.cluster.worker_host import LaunchLeased, WorkerHost
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.fleet.worker_process import prepared_fork_server, start_worker
from streamserve.protocol.cluster import (
    End,
    ForwardedMessage,
    FromAgent,
    FromMachine,
    LaunchWorker,
    Machine,
    decode_from_head,
    decode_to_machine,
    encode,
)
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.curve import Endpoint, KeyPair
from streamserve.system.crashes import crash_folder
from streamserve.system.processors import usable_processors

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
"""Interval at which leases are checked."""
BEAT_SECONDS = 0.25
"""Interval at which the head is told the workers' signs of life."""
LOGGED = 50
"""Number of failed handshakes of which only the first is logged."""


@dataclass(frozen=True)
class AgentConfig:
    """The configuration of an agent.

    - `head`, `head_key`: the head's address and public key; `own`: this agent's key pair.
    - `machine`: this machine, as it is offered to the head.
    - `model`: the model's path on this machine; None: the path on the head's machine.
    - `threads`: threads of a worker; 0: the processors are divided among the slots.
    - `host_workers`: number of workers that share the machine's memory; 0: the number of slots.
    - `keep`: seconds for which workers are kept without a head.
    """

    head: Endpoint
    head_key: bytes
    own: KeyPair
    machine: Machine
    model: str | None = None
    threads: int = 0
    host_workers: int = 0
    keep: float = 0.0


class Agent:
    """Joins the head and runs workers for it, until `stop`. Must be created in a running event loop."""

    def __init__(self, config: AgentConfig, launch: LaunchLeased = start_worker) -> None:
        self.membership = Membership(config.machine, leave=config.keep > 0)
        self.joined_heads = 0
        self._config = config
        self._context = zmq.asyncio.Context()
        self._socket = connect(self._context, config.head, config.head_key, config.own)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = TaskSupervisor(self._fail)
        self._host = WorkerHost(
            config.machine, self.membership, launch, self._localized, config.keep, self._say, self._tasks
        )

    async def run(self) -> None:
        """Serve until `stop`. Raises JoinError if the head refuses this machine for good."""
        with prepared_fork_server():
            await self._run()

    async def _run(self) -> None:
        loops = (self._receive, self._host.relay, self._tick, self._beat, self._watch_connection)
        for loop in loops:
            self._tasks.spawn(loop())
        try:
            await self._over
        finally:
            await self._host.end_all()
            await self._tasks.close()
            self._host.close()
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._context.term()

    def stop(self) -> None:
        """End the workers, then the agent."""
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

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            if not self._host.leaving:
                await self._apply(self.membership.tick(now))
            self._host.tick(now)
            await asyncio.sleep(TICK_SECONDS)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._host.beat()

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
                        "%s closed the connection in its handshake: it is starting or stopping, or its "
                        "key is not the key in --join",
                        self._config.head.address,
                    )
            else:
                logger.error(
                    "%s refuses this machine's key %s, or its key is not the key in --join: list this "
                    "machine's key in its --join-clients, or give --key a copy of its --join-key file",
                    self._config.head.address,
                    self._config.own.public.hex(),
                )

    async def _apply(self, effects: Iterable[FromAgent | Begun | Command | SessionLost]) -> None:
        for effect in list(effects):
            match effect:
                case Begun(epoch):
                    self.joined_heads += 1
                    logger.warning("joined the head at %s (epoch %d)", self._config.head.address, epoch)
                case SessionLost() if self._config.keep:
                    logger.error(
                        "the session with the head has ended: %s: keeping the workers", effect.reason
                    )
                    self._host.leave(effect)
                case SessionLost(reason):
                    logger.error("the session with the head has ended: %s: ending the workers", reason)
                    await self._host.end_all()
                case Command(data):
                    await self._execute(data)
                case _:
                    with contextlib.suppress(zmq.Again):  # not connected: the session sends it again
                        await self._socket.send(encode(effect), zmq.NOBLOCK)

    async def _say(self, message: FromMachine) -> None:
        await self._apply(self.membership.send(encode(message)))

    async def _execute(self, data: bytes) -> None:
        match decode_to_machine(data):
            case LaunchWorker(config):
                self._host.launch(config)
            case ForwardedMessage(worker, message):
                await self._host.forward(worker, message)
            case End() as end:
                self._host.end(end)

    def _localized(self, config: WorkerConfig, slot: int, peer: str) -> WorkerConfig:
        """Return the configuration of the worker in a slot, with the values that only this machine knows."""
        machine, model = self._config.machine, config.model
        threads = self._config.threads or usable_processors().threads // machine.slots
        network = config.kv_network
        return msgspec.structs.replace(
            config,
            kv_network=network and msgspec.structs.replace(network, address=machine.address),
            endpoint=self._host.endpoint,
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
