"""The head's share of a processor with many workers on machines that join over TCP with keys, and many
streams.

The head here is the fleet with its listener, and clients that read their streams, without HTTP (host_cost.py
measures that). The workers are fakes, which send every request a token in each step as real workers do. They
run in separate processes on the same machine.

    python -m benchmarks.overhead.cluster_load --workers 64 --streams 2000 --rates 0 1000 2000 4000
"""

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path

import psutil
import zmq.asyncio

from benchmarks.options import parse, pick
from benchmarks.overhead.fleet_scale import READY, REPORT
from benchmarks.papers.star_hosts import key_pair
from benchmarks.report import SIMULATED, table, write
from streamserve.extras.cluster.agent import Agent, AgentConfig
from streamserve.extras.cluster.launcher import JoinConfig, JoinLauncher
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Heartbeat, Open, WorkerLost
from streamserve.fleet.runtime import FleetRuntime
from streamserve.fleet.worker_state import unified
from streamserve.protocol.cluster import Machine
from streamserve.protocol.config import ModelConfig, WorkerConfig
from streamserve.protocol.curve import parse_endpoint, read_key_pair, write_key_pair
from streamserve.protocol.messages import (
    Admitted,
    Cancel,
    Event,
    Events,
    Stop,
    Submit,
    Token,
    decode_to_worker,
    encode,
)
from streamserve.protocol.sampling import SamplingParams

MACHINES = 4
LEASE = 10.0
"""Seconds of a lease. It is long, because the fake workers share the head's processors."""
REPORT_SECONDS = 0.5
PROMPT = 64
ENDLESS = 1 << 20


class FakeWorker:
    """Sends each of its requests a token every `step` seconds, or no tokens if `step` is 0."""

    def __init__(self, config: WorkerConfig, step: float) -> None:
        self.pid = os.getpid()
        self._ended = asyncio.Event()
        self._open: dict[str, list[int]] = {}
        """The attempt and the number of the next token, by request."""
        self._step = step
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, (config.peer or config.worker).encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(config.endpoint)
        loops = [self._receive(), self._report()] + ([self._steps()] if step else [])
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def _receive(self) -> None:
        await self._socket.send(encode(READY))
        while True:
            match decode_to_worker(await self._socket.recv()):
                case Submit() as message:
                    self._open[message.request] = [message.attempt, 0]
                    admitted = Admitted(message.request, message.attempt, 0, 0)
                    await self._socket.send(encode(Events([admitted])))
                case Cancel(request):
                    self._open.pop(request, None)
                case Stop():
                    self._ended.set()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self._socket.send(encode(REPORT))

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        # Workers are not in step with each other.
        due = loop.time() + self._step * secrets.randbelow(1000) / 1000
        while True:
            due += self._step
            await asyncio.sleep(max(0.0, due - loop.time()))
            tokens: list[Event] = []
            for request, state in self._open.items():
                tokens.append(Token(request, state[0], 0, state[1], 7, finish=None))
                state[1] += 1
            if tokens:
                await self._socket.send(encode(Events(tokens)))

    def extend(self, until: float) -> None:
        """Do nothing: a fake worker has no deadline to extend."""

    def beat(self) -> Heartbeat | None:
        now = time.monotonic()
        return None if self._ended.is_set() else Heartbeat(now)

    async def watch(self, worker: str, incarnation: int) -> WorkerLost:
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()
        self._socket.close()
        return WorkerLost(worker, incarnation, "it was stopped", frozenset())

    async def dead(self) -> None:
        await self._ended.wait()

    def kill(self) -> None:
        self._ended.set()

    async def stop(self, grace: float = 0.0) -> None:
        self._ended.set()


async def serve_machine(head: str, key: str, name: str, slots: int, step: float) -> None:
    """Join the head with fake workers."""
    own = read_key_pair(key)

    async def launch(config: WorkerConfig) -> FakeWorker:
        return FakeWorker(config, step)

    machine = Machine(name, name, "127.0.0.1", slots)
    await Agent(AgentConfig(parse_endpoint(head), own.public, own, machine), launch).run()


def start_machine(stack: ExitStack, *arguments: str) -> None:
    """Start the process of a machine, which is ended when `stack` closes."""
    command = [sys.executable, "-m", "benchmarks.overhead.cluster_load", "--machine", *arguments]
    process = subprocess.Popen(command)
    stack.callback(process.wait)
    stack.callback(process.kill)


def settings(worker: str, incarnation: int, endpoint: str) -> WorkerConfig:
    """Return the configuration of a fake worker."""
    return WorkerConfig(
        worker=f"{worker}/{incarnation}", role="unified", endpoint=endpoint, model=ModelConfig(path="")
    )


class Clients:
    """Clients that read endless streams, and count the tokens that have arrived."""

    def __init__(self, runtime: FleetRuntime) -> None:
        self.begun = self.tokens = 0
        self._runtime = runtime

    async def read(self, number: int) -> None:
        """Open a stream, and read it until cancelled."""
        params = SamplingParams(seed=1, max_tokens=ENDLESS)
        request = Open(f"s{number}", list(range(PROMPT)), params)
        async with aclosing(self._runtime.submit(request)) as updates:
            async for events in updates:
                self.begun += any(isinstance(event, Admitted) for event in events)
                self.tokens += sum(isinstance(event, Token) for event in events)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def measure(workers: int, streams: int, rate: float, seconds: float) -> dict[str, float]:
    """Return the head's share of a processor while all streams together get `rate` tokens a second."""
    pair = key_pair()
    make = partial(JoinLauncher, JoinConfig("tcp://127.0.0.1:0", pair, {pair.public.hex(): "all"}, LEASE, 1))
    config = FleetConfig(
        topology=unified(workers), max_requests=streams + 1, max_waiting_tokens=1 << 40, stuck_after=60.0
    )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        key = Path(folder) / "key"
        write_key_pair(key, pair)
        async with asyncio.timeout(300), FleetRuntime(config, settings, launcher=make) as runtime:
            launcher = runtime.driver.launcher
            step = streams / rate if rate else 0.0
            for number in range(pick(MACHINES, 1)):
                given = (
                    launcher.endpoint,
                    str(key),
                    f"m{number}",
                    str(workers // pick(MACHINES, 1)),
                    str(step),
                )
                start_machine(stack, *given)
            await until(lambda: all(worker.ready for worker in runtime.fleet.workers.values()))
            clients = Clients(runtime)
            reading = [asyncio.create_task(clients.read(number)) for number in range(streams)]
            await until(lambda: clients.begun == streams)
            await asyncio.sleep(pick(2.0, 0.1))
            result = await window(clients, seconds)
            result["deaths"] = runtime.fleet.supervisor.deaths
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    return result


async def window(clients: Clients, seconds: float) -> dict[str, float]:
    """Return tokens a second, and this process's share of a processor, threads included."""
    process = psutil.Process()
    before, tokens, began = process.cpu_times(), clients.tokens, time.monotonic()
    await asyncio.sleep(seconds)
    passed, after = time.monotonic() - began, process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return {"tokens_per_second": (clients.tokens - tokens) / passed, "cpu_share": used / passed}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[0, 1000, 2000, 4000],
        help="tokens/s of all streams together",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement")
    parser.add_argument("--machine", nargs=5, help=argparse.SUPPRESS)
    args = parse(parser, workers=2, streams=4, rates=[100.0], seconds=0.2)
    if args.machine:
        head, key, name, slots, step = args.machine
        asyncio.run(serve_machine(head, key, name, int(slots), float(step)))
        return
    figures = [
        {"rate": rate, **asyncio.run(measure(args.workers, args.streams, rate, args.seconds))}
        for rate in args.rates
    ]
    rows = [
        [f"{one['rate']:,.0f}", f"{one['tokens_per_second']:,.0f}", f"{one['cpu_share']:.1%}"]
        for one in figures
    ]
    table("The head's processor", ["tokens/s asked for", "tokens/s", "share of a processor"], rows)
    shown = {"workers": args.workers, "streams": args.streams, "machines": MACHINES, "seconds": args.seconds}
    print(write("cluster_load", shown, figures, SIMULATED))


if __name__ == "__main__":
    main()
