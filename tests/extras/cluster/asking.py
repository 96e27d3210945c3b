"""Requests to a cluster in this process, and a peer that connects to its head."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import zmq
import zmq.asyncio

from streamserve.fleet.events import Open
from streamserve.protocol.messages import Token
from streamserve.protocol.sampling import SamplingParams
from tests.extras.cluster.fakes import Cluster

TOKENS = 120


async def ask(made: Cluster, name: str, tokens: int = TOKENS) -> list[int]:
    answer: list[int] = []
    request = Open(name, [1, 2], SamplingParams(seed=1, max_tokens=tokens))
    async with aclosing(made.runtime.submit(request)) as steps:
        async for events in steps:
            answer += [event.token for event in events if isinstance(event, Token)]
    return answer


async def ask_many(made: Cluster, count: int = 16) -> list[asyncio.Task[list[int]]]:
    tasks = [asyncio.create_task(ask(made, f"r{number}")) for number in range(count)]
    await until(lambda: sum(len(r.outputs[0]) for r in made.runtime.fleet.requests.values()) > 4 * count)
    return tasks


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def peer(made: Cluster, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    """Return a socket with an allowed key, connected to the head."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.CURVE_SERVERKEY, made.pair.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, made.pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, made.pair.secret)
    socket.connect(made.launcher.endpoint)
    return socket
