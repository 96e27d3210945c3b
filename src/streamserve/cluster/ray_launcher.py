"""The launcher of workers on the machines of a Ray cluster: Ray places agents, which join this head as any
other machine does.

    RayLauncher ── creates ──▶ actors: resources, placement groups ── run ──▶ agents (ray_agent.py)
                ◀── deaths ───
    JoinLauncher ◀═════════ TCP, CURVE ═════════ agents ── start ──▶ workers

No message of a request passes through Ray. An agent that has died is created again, wherever Ray finds space;
the fleet alone judges what the loss of its worker means.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamserve.cluster.launcher import JoinConfig, JoinLauncher
from streamserve.cluster.placement import partner
from streamserve.cluster.ray_agent import RayAgent, RayAgentConfig
from streamserve.cluster.remote_worker import RemoteWorker
from streamserve.fleet.launcher import MachineState
from streamserve.fleet.process_state import ProcessState
from streamserve.fleet.tasks import TaskSupervisor
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.curve import KeyPair
from streamserve.protocol.server_config import LogLevel

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
AGAIN_SECONDS = 1.0
"""Between the end of an actor and its successor."""
STOP_SECONDS = 12.0
"""How long agents have to end their workers before their actors are killed."""


@dataclass(frozen=True)
class RayConfig:
    """How machines `join` (without an endpoint: at the address that Ray has for this machine); the cluster's
    `address`; the processors of a worker (0: an equal share of all), its GPUs and custom `resources`; the key
    of all agents, and the level of their logs."""

    join: JoinConfig
    address: str
    cpus: int
    gpus: int
    resources: Mapping[str, float]
    agents: KeyPair
    log_level: LogLevel


class RayLauncher:
    """Starts `workers` on the machines that Ray chooses. Made in a running event loop."""

    def __init__(self, config: RayConfig, workers: Mapping[str, ProcessState[Any]]) -> None:
        """Raises OSError if there is no cluster at the address, or the head cannot listen."""
        import ray

        self._ray = ray
        self._config = config
        self._connected = not ray.is_initialized()
        if self._connected:
            _connect(ray, config.address)
        self._cpus = config.cpus or cpus_of_each(_machine_cpus(ray.nodes()), len(workers))
        join = config.join
        if not join.endpoint:
            join = _listening_at(join, ray.util.get_node_ip_address())
        self._join = JoinLauncher(join, workers)
        self._actors: dict[str, Any] = {}
        self._groups: list[Any] = []
        self._closing = False
        self._tasks = TaskSupervisor(self._join.fail)
        self._workers = workers
        self._surplus: set[str] = set()
        self._kept = set(workers)
        for names in groups(workers):
            self._tasks.spawn(self._keep_group(names))
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
        await self._join.close()
        with contextlib.suppress(Exception):  # actors may be gone
            stops = [actor.stop.remote() for actor in self._actors.values()]
            await asyncio.wait_for(asyncio.gather(*stops, return_exceptions=True), STOP_SECONDS)
        await self._tasks.close()
        for actor in self._actors.values():
            self._ray.kill(actor)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        if self._connected:
            await asyncio.to_thread(self._ray.shutdown)

    async def _follow_workers(self) -> None:
        """Have as many agents as there are workers, which may be added and removed. An agent is made for a
        worker, but runs any: so one that is idle is ended."""
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            missing = len(self._workers) - len(self._kept)
            for name in [name for name in self._workers if name not in self._kept][: max(missing, 0)]:
                self._kept.add(name)
                self._tasks.spawn(self._keep_group((name,)))
            idle = [machine.name.rpartition(".")[2] for machine in self.machines() if not machine.workers]
            for name in [name for name in idle if name in self._kept][: max(-missing, 0)]:
                self._kept.discard(name)
                self._surplus.add(name)
                self._ray.kill(self._actors[name])

    async def _keep_group(self, names: Sequence[str]) -> None:
        """Keep an agent for each of these workers: of the two of a pair on one machine, where that is
        possible."""
        if len(names) == 1:
            await self._keep(names[0], {"scheduling_strategy": "SPREAD"})
            return
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": self._cpus, **self._config.resources}
        if self._config.gpus:
            bundle["GPU"] = self._config.gpus
        group = placement_group([bundle] * len(names), strategy="PACK")
        self._groups.append(group)
        await asyncio.gather(
            *(
                self._keep(name, {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, number)})
                for number, name in enumerate(names)
            )
        )

    async def _keep(self, worker: str, placement: Mapping[str, Any]) -> None:
        """Create an agent, and another one whenever it has ended."""
        while not self._closing:
            actor = self._actors[worker] = self._create(worker, placement)
            try:
                refused = await actor.run.remote(self._cpus_of_a_machine())
                reason = refused or "it has ended"
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().partition("\n")[0]
            if self._closing or worker in self._surplus:
                self._surplus.discard(worker)
                self._actors.pop(worker, None)
                return
            logger.error("Ray's actor for worker %s is lost: %s", worker, reason)
            await self._join.end_machines(f".{worker}", "Ray has lost its actor")
            self._ray.kill(actor)
            await asyncio.sleep(AGAIN_SECONDS)

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
        return (
            self._ray.remote(RayAgent)
            .options(
                num_cpus=self._cpus,
                num_gpus=config.gpus,
                resources=dict(config.resources) or None,
                max_restarts=0,
                **placement,
            )
            .remote(made)
        )

    def _cpus_of_a_machine(self) -> float:
        """Return the processors of the smallest machine: a worker's share of its memory is not too large."""
        return min(_machine_cpus(self._ray.nodes()))


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster. Raises OSError if there is none at the address."""
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdecimal() and "/" not in host:  # Ray itself waits for more than a minute
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, namespace="streamserve", logging_level=logging.WARNING)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        logger.debug("Ray", exc_info=error)
        raise OSError(
            f"there is no Ray cluster at ray_address = {address!r}: start one (`ray start --head`), or name "
            "another with --ray-address"
        ) from error


def groups(workers: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the workers by what is placed together: the halves of each pair, all others alone."""
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
    """Return the processors of each of `workers` on machines with so many: all in equal shares, if each fits
    into the smallest machine."""
    return max(1, int(min(*machines, sum(machines) / workers)))


def _machine_cpus(nodes: Iterable[Mapping[str, Any]]) -> list[float]:
    cpus = [float(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    return [count for count in cpus if count] or [1.0]


def _listening_at(join: JoinConfig, address: str) -> JoinConfig:
    host = f"[{address}]" if ":" in address else address
    return replace(join, endpoint=f"tcp://{host}:0")
