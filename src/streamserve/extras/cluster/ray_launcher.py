"""The launcher of workers on the machines of a Ray cluster: Ray places agents, which join this head as agents
of other machines do.

    RayLauncher ── creates ──▶ actors: resources, placement groups ── run ──▶ agents (ray_agent.py)
                ◀── deaths ───
    JoinLauncher ◀═════════ TCP, CURVE ═════════ agents ── start ──▶ workers

No message of a request passes through Ray. An agent that has died is created again, wherever Ray finds space.
Only the fleet decides what the loss of a worker means.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from streamserve.extras.cluster.launcher import JoinConfig, JoinLauncher
from streamserve.extras.cluster.placement import partner
from streamserve.extras.cluster.ray_agent import RayAgent, RayAgentConfig
from streamserve.extras.cluster.remote_worker import RemoteWorker
from streamserve.fleet.launcher import MachineState
from streamserve.fleet.process_state import ProcessState
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.protocol.config import LogLevel, WorkerConfig
from streamserve.protocol.curve import KeyPair

logger = logging.getLogger(__name__)

R = TypeVar("R")

THREADS = 4
"""Threads for calls of Ray."""
CONNECT_SECONDS = 5.0
AGAIN_SECONDS = 1.0
"""Seconds between the end of an actor and the start of its successor."""
REFUSED_SECONDS = 15.0
"""Seconds before the next actor after the head refused a machine, which may have another version."""
STOP_SECONDS = 12.0
"""Seconds for agents to end their workers before their actors are killed."""


@dataclass(frozen=True)
class RayConfig:
    """The configuration of the launcher.

    - `join`: how machines join; without an endpoint, they join at the address that Ray has for this machine.
    - `address`: the cluster's address.
    - `cpus`: processors of a worker; 0: an equal share of all. `gpus`, `resources`: its GPUs and custom
      resources.
    - `agents`: the key pair of all agents; `log_level`: their log level.
    """

    join: JoinConfig
    address: str
    cpus: int
    gpus: int
    resources: Mapping[str, float]
    agents: KeyPair
    log_level: LogLevel


@dataclass(eq=False)
class KeptAgent:
    """An agent that was created for the worker `made_for`, but may run any worker. `actor` is its present
    actor. If it is `surplus`, it is ended and gets no successor."""

    made_for: str
    actor: Any = None
    surplus: bool = False


class RayLauncher:
    """Starts `workers` on machines that Ray chooses. Must be created in a running event loop. Calls of Ray
    may wait for Ray's head: they run in threads, so that the loop continues."""

    def __init__(self, config: RayConfig, workers: Mapping[str, ProcessState[Any]]) -> None:
        """Connect to the cluster, and listen for agents. Raises OSError if there is no cluster at the
        address, or if the head cannot listen."""
        import ray

        self._ray = ray
        self._config = config
        if not ray.is_initialized():
            _connect(ray, config.address)
            _connected.add(self)
        elif _connected:
            _connected.add(self)
        self._agent_class = ray.remote(RayAgent)
        self._cpus = config.cpus or cpus_of_each(_machine_cpus(ray.nodes()), len(workers))
        join = config.join
        if not join.endpoint:
            join = _listening_at(join, ray.util.get_node_ip_address())
        self._join = JoinLauncher(join, workers)
        self._kept: dict[str, KeptAgent] = {}
        self._groups: list[Any] = []
        self._closing = False
        self._threads = ThreadPoolExecutor(THREADS, "ray")
        self._tasks = TaskSupervisor(self._join.fail)
        self._workers = workers
        self._keep_for(workers)
        self._tasks.run_loop(self._follow_workers, "Ray's actors")

    @property
    def endpoint(self) -> str:
        return self._join.endpoint

    async def start(self, config: WorkerConfig) -> RemoteWorker:
        return await self._join.start(config)

    async def send(self, worker: str, data: bytes) -> None:
        await self._join.send(worker, data)

    async def receive(self) -> tuple[str, int, bytes]:
        return await self._join.receive()

    def machines(self) -> Sequence[MachineState]:
        return self._join.machines()

    def waiting(self) -> Sequence[str]:
        return self._join.waiting()

    async def close(self) -> None:
        """End the agents, their actors and placement groups."""
        self._closing = True
        joined = {made_for(machine) for machine in self.machines()}
        await self._join.close()
        with contextlib.suppress(Exception):  # actors may have ended already
            actors = [agent.actor for agent in self._kept.values() if agent.made_for in joined]
            stops = [actor.stop.remote() for actor in actors if actor]
            await asyncio.wait_for(asyncio.gather(*stops, return_exceptions=True), STOP_SECONDS)
        await self._tasks.close()
        await asyncio.gather(*(self._kill(agent) for agent in self._kept.values()))
        for group in self._groups:
            await self._call(self._ray.util.remove_placement_group, group)
        if self in _connected:
            _connected.remove(self)
            if not _connected:
                await self._call(self._ray.shutdown)
        self._threads.shutdown(wait=False)

    async def _call(self, function: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments))

    async def _follow_workers(self) -> None:
        """Keep one agent for each worker. Workers may be added and removed."""
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            missing = len(self._workers) - len(self._kept)
            new = [name for name in self._workers if name not in self._kept]
            self._keep_for(new[: max(missing, 0)])
            for name in unneeded(self._kept, self._workers, self.machines())[: max(-missing, 0)]:
                agent = self._kept.pop(name)
                agent.surplus = True
                await self._join.end_machines(f".{name}", "it is not needed any more")
                await self._kill(agent)

    def _keep_for(self, workers: Iterable[str]) -> None:
        """Keep an agent for each of these workers."""
        for names in groups(workers):
            agents = [KeptAgent(name) for name in names]
            self._kept |= {agent.made_for: agent for agent in agents}
            self._tasks.spawn(self._keep_together(agents))

    async def _keep_together(self, agents: Sequence[KeptAgent]) -> None:
        """Keep each of these agents running. Two agents, for the halves of a pair, run on one machine if
        possible."""
        if len(agents) == 1:
            await self._keep(agents[0], {"scheduling_strategy": "SPREAD"})
            return
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": self._cpus, **self._config.resources}
        if self._config.gpus:
            bundle["GPU"] = self._config.gpus
        group = await self._call(placement_group, [bundle] * len(agents), "PACK")
        self._groups.append(group)
        await asyncio.gather(
            *(
                self._keep(agent, {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, number)})
                for number, agent in enumerate(agents)
            )
        )
        if not self._closing:  # all are surplus; otherwise the resources of the group would stay reserved
            self._groups.remove(group)
            await self._call(self._ray.util.remove_placement_group, group)

    async def _keep(self, agent: KeptAgent, placement: Mapping[str, Any]) -> None:
        """Create an agent, and a successor whenever it has ended, until it is surplus."""
        worker = agent.made_for
        while not (self._closing or agent.surplus):
            wait = AGAIN_SECONDS
            try:
                agent.actor = await self._call(self._create, worker, placement)
                if agent.surplus:
                    break
                reason = await agent.actor.run.remote()
                wait = REFUSED_SECONDS if reason else wait
                reason = reason or "it has ended"
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().partition("\n")[0]
            if self._closing or agent.surplus:
                break
            logger.error("Ray's actor for worker %s is lost: %s", worker, reason)
            await self._join.end_machines(f".{worker}", "Ray has lost its actor")
            await self._kill(agent)
            await asyncio.sleep(wait)
        if agent.surplus:
            await self._kill(agent)

    async def _kill(self, agent: KeptAgent) -> None:
        """Kill an agent's actor, if there is one."""
        actor, agent.actor = agent.actor, None
        if actor:
            with contextlib.suppress(self._ray.exceptions.RayError):
                await self._call(self._ray.kill, actor)

    def _create(self, worker: str, placement: Mapping[str, Any]) -> Any:
        config = self._config
        made = RayAgentConfig(
            self._join.endpoint,
            config.join.pair.public,
            config.agents.public,
            config.agents.secret,
            worker,
            self._cpus,
            config.gpus,
            config.log_level,
        )
        options = {
            "num_cpus": self._cpus,
            "num_gpus": config.gpus,
            "resources": dict(config.resources) or None,
            "max_restarts": 0,
        }
        return self._agent_class.options(**options, **placement).remote(made)


_connected: set[RayLauncher] = set()
"""The launchers of this process that share a connection to Ray, which one of them made. The last launcher to
close ends the connection, and with it all actors of this process."""


def made_for(machine: MachineState) -> str:
    """Return the worker for which the agent on a machine was created, from its name: HOST.WORKER, or
    HOST.WORKER#NUMBER if there are several."""
    return machine.name.rpartition(".")[2].partition("#")[0]


def unneeded(kept: Iterable[str], workers: Collection[str], machines: Iterable[MachineState]) -> list[str]:
    """Return the agents that run no worker, by the workers for which they were created. First come agents
    that have not joined, since each asks Ray for a machine, and agents for workers that no longer exist."""
    present = list(machines)
    joined = {made_for(machine) for machine in present}
    busy = {made_for(machine) for machine in present if machine.workers}
    return sorted((name for name in kept if name not in busy), key=lambda n: (n in joined, n in workers))


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster. Raises OSError if there is none at the address."""
    host, colon, port = address.rpartition(":")
    try:
        # Without this check, Ray waits for more than a minute.
        if colon and port.isdecimal() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        with _same_signal_handler():
            ray.init(address=address, namespace="streamserve", logging_level=logging.WARNING)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        logger.debug("Ray", exc_info=error)
        raise OSError(
            f"there is no Ray cluster at ray_address = {address!r}: start one (`ray start --head`), or name "
            "another with --ray-address"
        ) from error


@contextlib.contextmanager
def _same_signal_handler() -> Iterator[None]:
    """Keep the present handler of SIGTERM: the handler of ray.init ends the process without waiting for open
    requests."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def groups(workers: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the workers in groups that are placed together: the two halves of a pair; other workers
    alone."""
    names = list(workers)
    together: list[tuple[str, ...]] = []
    for name in names:
        other = partner(name)
        if other not in names:
            together.append((name,))
        elif names.index(name) < names.index(other):
            together.append((name, other))
    return together


def cpus_of_each(machines: Sequence[float], workers: int) -> int:
    """Return the number of processors of each of `workers`, on `machines` with these numbers of processors:
    equal shares of all, but no more than the smallest machine has."""
    return max(1, int(min(*machines, sum(machines) / workers)))


def _machine_cpus(nodes: Iterable[Mapping[str, Any]]) -> list[float]:
    cpus = [float(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    return [count for count in cpus if count] or [1.0]


def _listening_at(join: JoinConfig, address: str) -> JoinConfig:
    host = f"[{address}]" if ":" in address else address
    return replace(join, endpoint=f"tcp://{host}:0")
