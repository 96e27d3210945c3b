"""The launcher of workers on other machines: agents join the head over TCP, and start the workers there.

FleetDriver ◀── Launcher ──▶ JoinLauncher ◀── effects ── Registry ◀── ClusterListener ◀══ agents ══ workers

Each worker is started by an agent with a free slot. It is lost when its agent says that its process has
ended, or when the agent's lease ends. In the second case it counts as dead after another lease's time: by
then, the machine has ended it without the head.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streamserve.extras.cluster.listener import ClusterListener, ClusterMessage
from streamserve.extras.cluster.placement import AgentCandidate, choose, without_kept
from streamserve.extras.cluster.registry import (
    AgentLeft,
    Body,
    Effect,
    Joined,
    RegisteredAgent,
    Registry,
    Reply,
)
from streamserve.extras.cluster.remote_worker import RemoteWorker
from streamserve.fleet.launcher import MachineState
from streamserve.fleet.process_state import ProcessState
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.protocol.cluster import (
    MAX_SMALL_BYTES,
    Beat,
    ForwardedMessage,
    FromMachine,
    LaunchWorker,
    Started,
    ToMachine,
    WorkerEnded,
    decode_from_agent,
    decode_from_machine,
    encode,
)
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.curve import KeyPair

logger = logging.getLogger(__name__)

JOIN_SECONDS = 15.0
"""Seconds for which a restart waits for an agent with a free slot. A worker that was never ready waits
without a limit, until it is removed."""
TICKS = 10
"""Number of checks in the time of a lease."""


@dataclass(frozen=True)
class JoinConfig:
    """How agents join: they connect to `endpoint`; `pair` is the head's key; `allowed` maps the hexadecimal
    digits of the agents' keys to names. `lease` is in seconds. `epoch` is the head's epoch. `offer` tells
    users how another machine can join."""

    endpoint: str
    pair: KeyPair
    allowed: Mapping[str, str]
    lease: float
    epoch: int
    offer: str = "`streamserve worker --join` adds one"


class JoinLauncher:
    """Starts `workers` on the machines of agents that join. Must be created in a running event loop."""

    def __init__(self, config: JoinConfig, workers: Mapping[str, ProcessState[Any]]) -> None:
        """Raises OSError if the address cannot be used."""
        self.registry = Registry(config.epoch, config.lease, secrets.token_bytes)
        self.listener = ClusterListener(config.endpoint, config.pair, config.allowed, config.lease)
        self.remote: dict[str, RemoteWorker] = {}
        """The started workers by NAME/INCARNATION, until they are certainly dead."""
        self._config = config
        self._waiting: Counter[str] = Counter()
        self._workers = workers
        self._messages: asyncio.Queue[tuple[str, int, bytes] | Exception] = asyncio.Queue()
        self._joined = asyncio.Condition()
        self._tasks = TaskSupervisor(self.fail)
        self._tasks.run_loop(self._receive, "cluster receive")
        self._tasks.run_loop(self._tick, "cluster tick")
        self._tasks.run_loop(self.listener.log_failures, "cluster monitor")
        logger.info("machines can join at %s", self.listener.address)

    @property
    def endpoint(self) -> str:
        """The address at which agents join. Workers connect to their agents."""
        return self.listener.address

    async def start(self, config: WorkerConfig) -> RemoteWorker:
        """Start a worker on a machine with a free slot. A worker that was never ready waits for a slot
        without a limit. Raises OSError if no slot becomes free in time, or if the process cannot be
        started."""
        agent = await self._agent_for(config.worker)
        agent.kept = without_kept(agent.kept, config.worker.rpartition("/")[0])
        worker = RemoteWorker(config.worker, agent, self._command, self._config.lease)
        self.remote[config.worker] = worker
        await self._command(agent, LaunchWorker(config))
        logger.info("worker %s: on machine %s", config.worker, agent.name)
        try:
            await worker.until_started()
        except OSError:
            self.remote.pop(config.worker, None)
            raise
        return worker

    async def send(self, worker: str, data: bytes) -> None:
        """Send a message to a worker's present process, if there is one."""
        state = self._workers.get(worker)
        remote = self.remote.get(f"{worker}/{state.incarnation}") if state else None
        if remote and not remote.over:
            await self._command(remote.agent, ForwardedMessage(remote.name, data))

    async def receive(self) -> tuple[str, int, bytes]:
        """Return the next message of a worker's present process. Raises the error that ended this launcher's
        tasks."""
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    def machines(self) -> Sequence[MachineState]:
        """Return the machines that have joined. If several agents have the same name, the further ones get a
        number."""
        named: Counter[str] = Counter()
        states = []
        for agent, place in self._places():
            named[agent.name] += 1
            name = agent.name if named[agent.name] == 1 else f"{agent.name}#{named[agent.name]}"
            workers = tuple(sorted(place.workers))
            states.append(MachineState(name, place.slots, workers, agent.joined_at, agent.seen_at))
        return states

    def waiting(self) -> Sequence[str]:
        return sorted(+self._waiting)

    async def close(self) -> None:
        """End the agents' sessions, and release all resources."""
        for agent in list(self.registry.agents.values()):
            await self._apply(self.registry.end(agent, "the head is shutting down"))
        await self._tasks.close()
        self.listener.close()

    def fail(self, error: Exception) -> None:
        """Let `receive` raise an error, which ends this launcher."""
        self._messages.put_nowait(error)

    async def end_machines(self, ending: str, reason: str) -> None:
        """End the sessions of the machines whose names end with `ending`."""
        for agent in [a for a in self.registry.agents.values() if a.name.endswith(ending)]:
            await self._apply(self.registry.end(agent, reason))

    def _places(self) -> list[tuple[RegisteredAgent, AgentCandidate]]:
        running: dict[bytes, set[str]] = {token: set() for token in self.registry.agents}
        for worker in self.remote.values():
            if not worker.over and worker.agent.token in running:
                running[worker.agent.token].add(worker.name.rpartition("/")[0])
        return [
            (
                agent,
                AgentCandidate(
                    agent.machine.identity, agent.machine.slots, running[token], agent.kept,
                    made_for=agent.name.rpartition(".")[2],
                ),
            )
            for token, agent in self.registry.agents.items()
        ]  # fmt: skip

    def _free(self, worker: str) -> RegisteredAgent | None:
        places = self._places()
        chosen = choose(worker, [place for _, place in places], +self._waiting)
        return None if chosen is None else places[chosen][0]

    async def _agent_for(self, started: str) -> RegisteredAgent:
        """Wait for an agent with a free slot for NAME/INCARNATION. Raises OSError if there is none in time,
        or if the worker is removed meanwhile."""
        worker, _, incarnation = started.rpartition("/")
        state = self._workers[worker]
        timeout = None if state.load_seconds is None else JOIN_SECONDS

        def wanted() -> bool:
            return self._workers.get(worker) is state and str(state.incarnation) == incarnation

        if self._free(worker) is None:
            logger.warning("worker %s waits for a machine: %s", worker, self._config.offer)
        self._waiting[worker] += 1
        try:
            async with asyncio.timeout(timeout), self._joined:
                await self._joined.wait_for(lambda: not wanted() or self._free(worker) is not None)
                agent = self._free(worker)
                if agent is None or not wanted():
                    raise OSError("it has been removed")
                return agent
        except TimeoutError:
            raise OSError(f"no machine with a free slot has joined: {self._config.offer}") from None
        finally:
            self._waiting[worker] -= 1

    async def _command(self, agent: RegisteredAgent, command: ToMachine) -> None:
        await self._apply(self.registry.send(agent, encode(command)))

    async def _receive(self) -> None:
        while True:
            received = await self.listener.receive()
            now = time.monotonic()
            await self._apply(self._heard(received, now))

    def _heard(self, received: ClusterMessage, now: float) -> Iterable[Effect]:
        """Charge for a message, decode it, and process it."""
        registry, peer = self.registry, received.peer
        size = len(received.data) if received.data else 0
        charged = list(registry.charge(peer, received.key, size, now))
        if charged:
            return charged
        if received.data is None:
            return registry.unreadable(peer, "unreadable", "a message must have exactly one part")
        if size > MAX_SMALL_BYTES and not registry.is_registered(peer):
            return registry.unreadable(peer, "size", f"at most {MAX_SMALL_BYTES} bytes before it has joined")
        try:
            message = decode_from_agent(bytes(received.data))
        except msgspec.DecodeError as error:
            return registry.unreadable(peer, "unreadable", f"{type(error).__name__}: {error}"[:200])
        return list(registry.heard(peer, received.key, message, now))

    async def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in list(effects):
            match effect:
                case Reply(peer, message):
                    await self.listener.send(peer, encode(message))
                case Joined(agent):
                    logger.info("machine %s has joined, with %d slots", agent.name, agent.machine.slots)
                    await self._changed()
                case Body(agent, data):
                    await self._process(agent, data)
                case AgentLeft(agent, reason):
                    logger.error("machine %s has left: %s", agent.name, reason)
                    for worker in [w for w in self.remote.values() if w.agent is agent]:
                        worker.lose(reason)

    async def _process(self, agent: RegisteredAgent, data: bytes) -> None:
        """Process a message of an agent. If it cannot be decoded, the agent's session is ended."""
        try:
            message = decode_from_machine(data)
        except msgspec.DecodeError as error:
            await self._apply(self.registry.unreadable(agent.peer, "unreadable", str(error)[:200]))
            return
        worker = self.remote.get(message.worker)
        if worker is None or worker.agent is not agent:
            logger.debug("ignored a message of %r, which does not run on %s", message.worker, agent.name)
            return
        await self._hear(worker, message)

    async def _hear(self, worker: RemoteWorker, message: FromMachine) -> None:
        match message:
            case ForwardedMessage(_, data):
                name, _, incarnation = worker.name.rpartition("/")
                state = self._workers.get(name)
                if state is not None and incarnation == str(state.incarnation):
                    self._messages.put_nowait((name, state.incarnation, data))
            case Started(_, pid):
                worker.started(pid)
            case Beat():
                worker.heard(message, time.monotonic())
            case WorkerEnded():
                worker.ended(message)
                await self._changed()

    async def _changed(self) -> None:
        """Wake the tasks that wait for a slot; forget workers that are certainly dead."""
        for name in [name for name, worker in self.remote.items() if worker.is_dead]:
            del self.remote[name]
        async with self._joined:
            self._joined.notify_all()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease / TICKS)
            await self._apply(self.registry.tick(time.monotonic()))
            await self._changed()
