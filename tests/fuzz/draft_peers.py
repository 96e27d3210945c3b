"""A draft service with keys, and peers that follow its protocol or break it."""

import random
import socket
import time
from collections import Counter
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.target.client import TargetIdentity
from streamserve.execution.drafters.fingerprints import fingerprints
from streamserve.protocol.curve import KeyPair, parse_endpoints, write_key_pair
from streamserve.protocol.drafting import (
    DRAFT_VERSION,
    Delta,
    DraftRequests,
    Hello,
    Ping,
    Welcome,
    decode_to_target,
    encode,
)
from streamserve.protocol.sampling import SamplingParams
from streamserve.workers.remote_drafter import RemoteDrafter
from tests.checkpoints import make_checkpoint
from tests.draft_service.network import Drafting

GREEDY = SamplingParams(temperature=0.0)


def key_pair() -> KeyPair:
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    return KeyPair(public, secret)


class KeyedService:
    """A service with keys, and the keys of its clients."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = make_checkpoint(folder / "draft")
        self.service_key, self.good, self.other, self.unknown_client = (key_pair() for _ in range(4))
        write_key_pair(folder / "service.key", self.service_key)
        lines = [f"{self.good.public.hex()} good", f"{self.other.public.hex()} other"]
        (folder / "clients").write_text("\n".join(lines))
        self.flags = (
            "--listen", "tcp://127.0.0.1:0", "--threads", "1", "--num-blocks", "300",
            "--key", str(folder / "service.key"), "--clients", str(folder / "clients"),
        )  # fmt: skip
        self.tokenizer, self.vocabulary = fingerprints(self.checkpoint, 320)


class Peer:
    """A client that sends arbitrary messages."""

    def __init__(self, service: Drafting, keyed_service: KeyedService, keys: KeyPair | None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keyed_service.service_key.public)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(service.address)
        self.keyed_service = keyed_service

    def send(self, message: object, wait: float = 5.0) -> object:
        self.socket.send(message if isinstance(message, bytes) else encode(message))
        return decode_to_target(self.socket.recv()) if self.socket.poll(int(wait * 1000)) else None

    def hello(self, wait: float = 5.0, **fields: object) -> object:
        keys = {
            "version": DRAFT_VERSION, "tokenizer": self.keyed_service.tokenizer,
            "vocabulary": self.keyed_service.vocabulary, "name": "x", "nonce": 1,
        }  # fmt: skip
        return self.send(Hello(**{**keys, **fields}), wait)

    def welcome(self, name: str = "x") -> Welcome:
        """Say Hello until the service opens a session. After earlier tests, the service may refuse a target
        for a moment. Raises AssertionError after 20 seconds."""
        deadline = time.monotonic() + 20
        while not isinstance(answer := self.hello(name=name), Welcome):
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)
        return answer

    def received_kinds(self, sessions: list[Welcome]) -> Counter[str]:
        """Count the received messages by type, and add new `sessions`."""
        kinds: Counter[str] = Counter()
        while self.socket.poll(0):
            message = decode_to_target(self.socket.recv())
            kinds[type(message).__name__] += 1
            if isinstance(message, Welcome):
                sessions.append(message)
        del sessions[:-4]
        return kinds

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def honest_drafter(service: Drafting, keyed_service: KeyedService, keys: KeyPair) -> RemoteDrafter:
    address = service.address.replace("tcp://", f"tcp://{keyed_service.service_key.public.hex()}@")
    identity = TargetIdentity(keyed_service.tokenizer, keyed_service.vocabulary, "honest", 320)
    return RemoteDrafter(identity, parse_endpoints(address), keys, 1)


def tree_for(drafter: RemoteDrafter, sequence: int, prompt: list[int]) -> TokenTree:
    """Return the draft tree for a prompt, which is requested until it arrives."""
    request = DraftRequest(sequence, 0, prompt, len(prompt), 0, 0, GREEDY, 4, 1, 4, 0, [])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        drafter.begin([request])
        tree = drafter.collect(time.monotonic() + 1.0).get(sequence)
        if tree:
            drafter.release([sequence])
            return tree
        time.sleep(0.01)
    raise AssertionError("no tree arrived")


def nonsense(rng: random.Random, welcome: Welcome) -> bytes:
    """Return random bytes, random msgpack, truncated and corrupted messages, and well-formed messages with
    values out of bounds."""
    delta = Delta(
        rng.choice([1, 2, -5, 1 << 40]), rng.randrange(3), rng.randrange(1, 9), rng.choice([0, 1, 99]),
        rng.choice([0, 0, 3, 1 << 50]), [rng.randrange(-5, 400) for _ in range(rng.randrange(6))],
        rng.randrange(4), rng.choice([0, 0, -1]), rng.choice([0, 4, 99]), rng.choice([1, 3, 1 << 30]),
        rng.choice([4, 1 << 30]), rng.choice([(), (2, 0), (1,) * 4]), rng.choice([None, GREEDY]),
        rng.choice([b"", b"x"]),
    )  # fmt: skip
    whole = encode(
        rng.choice(
            [
                DraftRequests(tag=welcome.tag, channel=welcome.channel, deltas=[delta] * rng.randrange(3)),
                DraftRequests(tag=rng.getrandbits(40), channel=b"", deltas=[delta], need=-1.0),
                Ping(welcome.tag, welcome.channel, float("nan")),
            ]
        )
    )
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return msgspec.msgpack.encode(
                {"type": rng.choice(["DraftRequests", "Hello", "Nothing"]), "tag": [[]] * 50}
            )
        case 2:
            return whole[: rng.randrange(len(whole))]
        case _:
            return whole


def raw_bytes(service: Drafting, rng: random.Random) -> None:
    """Return bytes that are not ZeroMQ."""
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(rng.randbytes(500))
