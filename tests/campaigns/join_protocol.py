"""The family `join_protocol`: after arbitrary messages where machines join, with and without keys, the head
runs and answers as before."""

import asyncio
import random

import msgspec
import zmq.asyncio

from streamserve.protocol.cluster import (
    CLUSTER_VERSION,
    Alive,
    Knock,
    Machine,
    Packet,
    Register,
    Resume,
    encode,
)
from streamserve.protocol.curve import parse_endpoint
from tests.campaigns.outcome import DEATH, WRONG_TEXT, Outcome, TrialFailure
from tests.extras.cluster.asking import ask, peer, until
from tests.extras.cluster.fakes import Cluster, cluster
from tests.fuzz.zmtp import BODIES, INVALID_OPENINGS, handshakes

MESSAGES = 150
TOKENS = 10


def trial(seed: int) -> Outcome:
    """Send MESSAGES hostile messages, then ask for an answer."""
    rng = random.Random(f"join-{seed}")
    try:
        refused = asyncio.run(_attack(rng))
    except TimeoutError as error:
        raise TrialFailure(DEATH, "the head does not answer any more") from error
    return Outcome(verdict="passed", counts={"messages": MESSAGES, "refused": refused})


async def _attack(rng: random.Random) -> int:
    async with cluster() as made:
        await made.join("honest")
        await until(lambda: made.runtime.fleet.health()[0])
        context = zmq.asyncio.Context()
        socket = peer(made, context)
        try:
            for _ in range(MESSAGES):
                if rng.random() < 0.2:
                    await _without_key(rng, made)
                else:
                    await socket.send_multipart(_parts(rng))
        finally:
            socket.close()
            context.term()
        if await asyncio.wait_for(ask(made, "after", TOKENS), 20) != list(range(TOKENS)):
            raise TrialFailure(WRONG_TEXT, "another answer after hostile messages")
        if made.runtime.fleet.supervisor.deaths:
            raise TrialFailure(DEATH, "an honest machine was lost")
        return sum(made.launcher.registry.refused.values())


def _parts(rng: random.Random) -> list[bytes]:
    """Return a message from a holder of the key: valid structs, mutated bytes, or random bytes."""
    token = rng.randbytes(16)
    message = encode(
        rng.choice((
            Knock(rng.choice((CLUSTER_VERSION, 0, 2**63 - 1)), "x" * rng.randint(0, 64)),
            Register(token, Machine("m", "i", "a", kept=_kept(rng))), Resume(token),
            Packet(rng.choice((1, 2, 2**63 - 1)), rng.randbytes(rng.randint(0, 100))),
            Alive(rng.randint(0, 9), rng.randint(0, 9), rng.uniform(-1e9, 1e9), missing=rng.random() < 0.5),
        ))
    )  # fmt: skip
    kind = rng.random()
    if kind < 0.3:
        return [message]
    if kind < 0.6:
        changed = bytearray(message)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return [bytes(changed)]
    if kind < 0.8:
        return [rng.randbytes(rng.choice((0, 1, 7, 300, 5000)))]
    if kind < 0.9:
        return [msgspec.msgpack.encode({"type": "Register", "nonce": token, "machine": {"name": "x" * 999}})]
    return [message] * rng.randint(2, 5)


def _kept(rng: random.Random) -> tuple[str, ...]:
    """Return names of retained workers; some are too long or too many."""
    return ("unified-0", "", "x" * 32, "y" * 33)[: rng.randint(0, 4)] * rng.choice((1, 16, 17))


async def _without_key(rng: random.Random, made: Cluster) -> None:
    port = parse_endpoint(made.launcher.endpoint).port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(rng.choice((*INVALID_OPENINGS, *handshakes().values(), *BODIES, rng.randbytes(200))))
    await writer.drain()
    writer.transport.abort()
