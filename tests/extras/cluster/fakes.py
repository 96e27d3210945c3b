"""A head and agents in this process, over real TCP with keys, whose workers are fakes."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from streamserve.extras.cluster.agent import Agent, AgentConfig
from streamserve.extras.cluster.launcher import JoinConfig, JoinLauncher
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Heartbeat
from streamserve.fleet.runtime import FleetRuntime
from streamserve.fleet.worker_state import unified
from streamserve.protocol.cluster import Machine
from streamserve.protocol.config import ModelConfig, Role, WorkerConfig
from streamserve.protocol.curve import KeyPair, parse_endpoint
from streamserve.protocol.messages import (
    Adopt,
    Events,
    Leave,
    Left,
    Stop,
    Submit,
    Token,
    decode_to_worker,
    encode,
)
from tests.extras.cluster.network import Link
from tests.fleet.fake_worker import FakeWorker
from tests.fleet.fakes import READY

TOKEN_SECONDS = 0.005


def new_pair() -> KeyPair:
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    return KeyPair(public, secret)


class SlowWorker(FakeWorker):
    """Answers requests token by token, and ends with its lease, like a real worker."""

    until: float | None = None

    def extend(self, until: float) -> None:
        self.until = until

    def beat(self) -> Heartbeat | None:
        return None if self.ended.is_set() else Heartbeat(asyncio.get_running_loop().time())

    async def dead(self) -> None:
        return

    async def stop(self, grace: float = 0.0) -> None:
        self.ended.set()

    leaves_after = 0.0
    """Seconds that it takes to leave a head, as when it computes a step."""
    adopts_after = 0.0
    """Seconds until the worker serves the head that has adopted it."""
    adopted: WorkerConfig | None = None
    closed = 0.0

    async def _serve(self) -> None:
        await self._socket.send(encode(READY))
        answering: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = decode_to_worker(await self._socket.recv())
                if isinstance(message, Leave):
                    await asyncio.sleep(self.leaves_after)
                    for task in answering:
                        task.cancel()
                    await self._socket.send(encode(Left()))
                if isinstance(message, Adopt):
                    self.adopted, self.closed = message.config, message.closed
                    await asyncio.sleep(self.adopts_after)
                    await self._socket.send(encode(msgspec.structs.replace(READY, adopted=True)))
                if isinstance(message, Stop):
                    self.ended.set()
                if isinstance(message, Submit):
                    answering.add(asyncio.create_task(self._answer(message)))
        finally:
            for task in answering:
                task.cancel()

    async def _answer(self, message: Submit) -> None:
        """Send tokens; token number n is n."""
        limit = message.params.max_tokens
        for n in range(len(message.outputs[0]), limit):
            await asyncio.sleep(TOKEN_SECONDS)
            finish = "length" if n == limit - 1 else None
            token = Token(message.request, message.attempt, 0, n, n, finish=finish)
            await self._socket.send(encode(Events([token])))


@dataclass
class Joined:
    """A running agent, its link to the head, and the workers that it has started. The next `failing` starts
    fail."""

    agent: Agent
    link: Link
    running: asyncio.Task[None]
    workers: list[SlowWorker] = field(default_factory=list)
    failing: int = 0


@dataclass
class Cluster:
    """A head and the agents that have joined it."""

    runtime: FleetRuntime
    pair: KeyPair
    agents: list[Joined] = field(default_factory=list)

    @property
    def launcher(self) -> JoinLauncher:
        launcher = self.runtime.driver.launcher
        assert isinstance(launcher, JoinLauncher)
        return launcher

    async def join(self, name: str, own: KeyPair | None = None, slots: int = 1, keep: float = 0.0) -> Joined:
        link = Link(parse_endpoint(self.launcher.endpoint).port)
        await link.start()
        workers: list[SlowWorker] = []

        async def launch(config: WorkerConfig) -> SlowWorker:
            if joined.failing:
                joined.failing -= 1
                raise OSError("no memory")
            workers.append(SlowWorker(config))
            return workers[-1]

        head = parse_endpoint(f"tcp://127.0.0.1:{link.port}")
        machine = Machine(name, f"boot/{name}/{os.geteuid()}", "127.0.0.1", slots)
        config = AgentConfig(head, self.pair.public, own or self.pair, machine, keep=keep)
        agent = Agent(config, launch)
        joined = Joined(agent, link, asyncio.create_task(agent.run()), workers)
        self.agents.append(joined)
        return joined


@contextlib.asynccontextmanager
async def cluster(
    workers: int = 1,
    lease: float = 1.0,
    endpoint: str = "tcp://127.0.0.1:0",
    epoch: int = 1,
    pair: KeyPair | None = None,
    bound: int | None = None,
    path: str = "",
    role: Role = "unified",
) -> AsyncGenerator[Cluster, None]:
    pair = pair or new_pair()

    def settings(worker: str, incarnation: int, endpoint: str) -> WorkerConfig:
        return WorkerConfig(
            worker=f"{worker}/{incarnation}", role=role, endpoint=endpoint, model=ModelConfig(path=path)
        )

    make = partial(JoinLauncher, JoinConfig(endpoint, pair, {pair.public.hex(): "all"}, lease, epoch))
    config = FleetConfig(topology=unified(workers), max_workers=bound)
    async with asyncio.timeout(90), FleetRuntime(config, settings, launcher=make) as runtime:
        made = Cluster(runtime, pair)
        try:
            yield made
        finally:
            for joined in made.agents:
                joined.link.restore()
                joined.agent.stop()
            await asyncio.gather(*(joined.running for joined in made.agents), return_exceptions=True)
            for joined in made.agents:
                await joined.link.close()


def key_file(folder: Path) -> Path:
    from streamserve.protocol.curve import write_key_pair

    write_key_pair(folder / "cluster.key", new_pair())
    return folder / "cluster.key"
