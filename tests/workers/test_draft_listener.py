"""The listener of a draft service takes any bytes on its socket and goes on listening."""

import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from streamserve.protocol.config import DraftingConfig
from streamserve.protocol.curve import KeyPair, write_key_pair
from streamserve.protocol.drafting import DRAFT_VERSION, Hello, encode
from streamserve.workers.draft_listener import MOST_AT_ONCE, Disconnected, DraftListener, Failure, Received
from tests.conftest import Scale
from tests.fuzz.zmtp import BODIES, SCRAPS, handshakes, shake_hands

HELLO = encode(Hello(version=DRAFT_VERSION, tokenizer="t", vocabulary="v", name="x", nonce=1))


@pytest.fixture
def gate() -> Iterator[DraftListener]:
    with zmq.Context() as context:
        made = DraftListener(context, DraftingConfig(listen="tcp://127.0.0.1:0"))
        yield made
        made.close()


def port(gate: DraftListener) -> int:
    return int(gate.address.rpartition(":")[2])


def say(gate: DraftListener, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port(gate)))
    connection.sendall(data)
    return connection


def hears(gate: DraftListener, seconds: float = 10.0) -> list[Received]:
    """Everything that comes until an honest client is heard, which must be soon."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as honest:
        honest.setsockopt(zmq.LINGER, 0)
        honest.connect(gate.address)
        honest.send(HELLO)
        heard: list[Received] = []
        deadline = time.monotonic() + seconds
        while not any(message.data == HELLO for message in heard):
            heard += gate.receive()
            list(gate.ended())
            assert time.monotonic() < deadline, "an honest client is not heard any more"
        return heard


def test_a_zmtp_1_greeting_is_refused_and_the_gate_goes_on(gate: DraftListener) -> None:
    with say(gate, bytes.fromhex("0100020041")):
        assert gate.socket.poll(5000)
        (old,) = gate.receive()
        assert old.data is None
        assert hears(gate)


@pytest.mark.parametrize("version", ["ZMTP 1.0", "ZMTP 2.0", "ZMTP 3.0", "ZMTP 3.1"])
def test_a_handshake_cut_anywhere_is_taken(gate: DraftListener, version: str) -> None:
    whole = handshakes()[version]
    for end in range(1, len(whole) + 1, max(1, len(whole) // 40)):
        with say(gate, whole[:end]):
            pass
    with say(gate, whole):
        assert hears(gate)


def test_scraps_and_random_bytes_are_taken(gate: DraftListener) -> None:
    rng = random.Random(1)
    whole = list(handshakes().values())
    open_ones = [say(gate, scrap) for scrap in SCRAPS]
    for _ in range(200):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        open_ones.append(say(gate, bytes(data) + rng.randbytes(rng.randrange(60))))
    assert hears(gate)
    for one in open_ones:
        one.close()
    assert hears(gate)


@pytest.mark.parametrize("minor", [0, 1])
def test_whatever_follows_a_handshake_is_taken(gate: DraftListener, minor: int) -> None:
    rng = random.Random(minor)
    disturbed = [
        body[: rng.randrange(len(body) + 1)] + rng.randbytes(30) for body in BODIES for _ in range(5)
    ]
    with contextlib.ExitStack() as stack:
        for body in [*BODIES, *disturbed]:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port(gate))))
            # What identity it shows is the same each time: another's is free again once that has ended.
            shake_hands(connection, minor)
            connection.sendall(body)
            gate.socket.poll(20)
            heard = list(gate.receive())
            if body == BODIES[0]:
                assert [message.data for message in heard] == [b"abc"]
            assert all(len(message.peer) < 256 for message in heard)
            for message in heard:
                gate.send(message.peer, b"answer")
            list(gate.ended())
            connection.close()
        assert hears(gate)


def test_half_open_connections_end_and_leave_nothing(gate: DraftListener) -> None:
    """As many as this process may hold open at once; those that go on are not in their way."""
    waiting = [say(gate, b"\xff" + bytes(rest)) for rest in range(8) for _ in range(25)]
    assert hears(gate)
    for one in waiting:
        one.close()
    assert hears(gate)
    assert len(gate.peers) <= 2


def test_a_flood_of_connections_is_heard_of_in_pieces(gate: DraftListener) -> None:
    """Events of connections that end all the time must not keep the receiver from messages."""
    unknown = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NOPE".ljust(20, b"\0") + bytes(32)
    for _ in range(2 * MOST_AT_ONCE):
        say(gate, unknown).close()
    deadline = time.monotonic() + 20
    seen = 0
    while seen < MOST_AT_ONCE:
        ended = list(gate.ended())
        assert len(ended) <= MOST_AT_ONCE
        assert all(isinstance(one, Failure | Disconnected) for one in ended)
        seen += len(ended)
        assert time.monotonic() < deadline, seen
    assert hears(gate)


def test_with_keys_old_protocols_and_strangers_are_kept_out(tmp_path: Path) -> None:
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    own_public, own_secret = (z85.decode(half) for half in zmq.curve_keypair())
    write_key_pair(tmp_path / "key", KeyPair(public, secret))
    (tmp_path / "clients").write_text(f"{own_public.hex()} good\n")
    config = DraftingConfig(
        listen="tcp://127.0.0.1:0", key=str(tmp_path / "key"), clients=str(tmp_path / "clients")
    )
    with zmq.Context() as context:
        gate = DraftListener(context, config)
        open_ones = [say(gate, whole) for whole in handshakes().values()]
        with zmq.Context() as other, other.socket(zmq.DEALER) as honest:
            honest.setsockopt(zmq.LINGER, 0)
            honest.setsockopt(zmq.CURVE_SERVERKEY, public)
            honest.setsockopt(zmq.CURVE_PUBLICKEY, own_public)
            honest.setsockopt(zmq.CURVE_SECRETKEY, own_secret)
            honest.connect(gate.address)
            honest.send(HELLO)
            assert gate.socket.poll(10_000)
            (message,) = gate.receive()
        assert (message.data, message.key, message.name) == (HELLO, own_public.hex(), "good")
        for one in open_ones:
            one.close()
        gate.close()


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import zmq
from streamserve.protocol.config import DraftingConfig
from streamserve.workers.draft_listener import DraftListener
with zmq.Context() as context:
    gate = DraftListener(context, DraftingConfig(listen="tcp://127.0.0.1:0"))
    print(gate.address, flush=True)
    while True:
        gate.socket.poll(50)
        for message in gate.receive():
            gate.send(message.peer, b"heard")
        list(gate.ended())
"""


def test_with_all_files_open_those_inside_are_served_and_others_come_in_later(scale: Scale) -> None:
    """More half-open connections than the process may have files: nothing ends, and it is over with them."""
    process = subprocess.Popen([sys.executable, "-c", FEW_FILES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        stack.callback(process.stdout.close)

        def client() -> zmq.Socket[bytes]:
            made = stack.enter_context(context.socket(zmq.DEALER))
            made.setsockopt(zmq.LINGER, 0)
            made.connect(address)
            made.send(b"x")
            return made

        inside = client()
        assert inside.poll(10_000)
        half_open = []
        for _ in range(scale.pick(250, 1000)):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", int(address.rpartition(":")[2])))
            half_open.append(connection)
        inside.recv()
        inside.send(b"x")
        assert inside.poll(10_000), "it was in already"
        late = client()
        if scale.full:
            assert late.poll(60_000), "as handshakes are given up"
        for connection in half_open:
            connection.close()
        assert late.poll(10_000)
        assert process.poll() is None


def test_a_stolen_routing_id_takes_nothing_from_its_owner(gate: DraftListener) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
        for one in (first, second):
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.ROUTING_ID, b"me")
        first.connect(gate.address)
        first.send(b"a")
        assert gate.socket.poll(5000)
        (message,) = gate.receive()
        second.connect(gate.address)
        second.send(b"b")
        hears(gate)
        gate.send(message.peer, b"for the first")
        assert first.poll(5000)
        assert first.recv() == b"for the first"
        assert not second.poll(50)
