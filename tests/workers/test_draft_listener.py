"""The listener of a draft service survives any bytes on its socket."""

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

from streamserve.protocol.curve import KeyPair, write_key_pair
from streamserve.protocol.drafting import DRAFT_VERSION, Hello, encode
from streamserve.protocol.drafting_config import DraftingConfig
from streamserve.workers.draft_listener import (
    MAX_MESSAGES_AT_ONCE,
    Disconnected,
    DraftListener,
    Failure,
    Received,
)
from tests.conftest import Scale
from tests.fuzz.zmtp import BODIES, INVALID_OPENINGS, handshakes, shake_hands

HELLO = encode(Hello(version=DRAFT_VERSION, tokenizer="t", vocabulary="v", name="x", nonce=1))


@pytest.fixture
def listener() -> Iterator[DraftListener]:
    with zmq.Context() as context:
        made = DraftListener(context, DraftingConfig(listen="tcp://127.0.0.1:0"))
        yield made
        made.close()


def port(listener: DraftListener) -> int:
    return int(listener.address.rpartition(":")[2])


def connect_and_send(listener: DraftListener, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port(listener)))
    connection.sendall(data)
    return connection


def receive_until_honest(listener: DraftListener, seconds: float = 10.0) -> list[Received]:
    """Return all messages until an honest client's arrives, which must be within `seconds`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as honest:
        honest.setsockopt(zmq.LINGER, 0)
        honest.connect(listener.address)
        honest.send(HELLO)
        heard: list[Received] = []
        deadline = time.monotonic() + seconds
        while not any(message.data == HELLO for message in heard):
            heard += listener.receive()
            list(listener.ended())
            assert time.monotonic() < deadline, "an honest client is not heard any more"
        return heard


def test_a_zmtp_1_greeting_is_refused_and_the_listener_continues(listener: DraftListener) -> None:
    with connect_and_send(listener, bytes.fromhex("0100020041")):
        assert listener.socket.poll(5000)
        (old,) = listener.receive()
        assert old.data is None
        assert receive_until_honest(listener)


@pytest.mark.parametrize("version", ["ZMTP 1.0", "ZMTP 2.0", "ZMTP 3.0", "ZMTP 3.1"])
def test_a_truncated_handshake_is_survived(listener: DraftListener, version: str) -> None:
    whole = handshakes()[version]
    for end in range(1, len(whole) + 1, max(1, len(whole) // 40)):
        with connect_and_send(listener, whole[:end]):
            pass
    with connect_and_send(listener, whole):
        assert receive_until_honest(listener)


def test_fragments_and_random_bytes_are_survived(listener: DraftListener) -> None:
    rng = random.Random(1)
    whole = list(handshakes().values())
    open_ones = [connect_and_send(listener, scrap) for scrap in INVALID_OPENINGS]
    for _ in range(200):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        open_ones.append(connect_and_send(listener, bytes(data) + rng.randbytes(rng.randrange(60))))
    assert receive_until_honest(listener)
    for one in open_ones:
        one.close()
    assert receive_until_honest(listener)


@pytest.mark.parametrize("minor", [0, 1])
def test_any_bytes_after_a_handshake_are_survived(listener: DraftListener, minor: int) -> None:
    rng = random.Random(minor)
    disturbed = [
        body[: rng.randrange(len(body) + 1)] + rng.randbytes(30) for body in BODIES for _ in range(5)
    ]
    with contextlib.ExitStack() as stack:
        for body in [*BODIES, *disturbed]:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port(listener))))
            # What identity it shows is the same each time: another's is free again once that has ended.
            shake_hands(connection, minor)
            connection.sendall(body)
            listener.socket.poll(20)
            heard = list(listener.receive())
            if body == BODIES[0]:
                assert [message.data for message in heard] == [b"abc"]
            assert all(len(message.peer) < 256 for message in heard)
            for message in heard:
                listener.send(message.peer, b"answer")
            list(listener.ended())
            connection.close()
        assert receive_until_honest(listener)


def test_half_open_connections_are_closed_without_leaks(listener: DraftListener) -> None:
    """As many as this process may have open at once; other connections still work."""
    waiting = [connect_and_send(listener, b"\xff" + bytes(rest)) for rest in range(8) for _ in range(25)]
    assert receive_until_honest(listener)
    for one in waiting:
        one.close()
    assert receive_until_honest(listener)
    assert len(listener.peers) <= 2


def test_events_of_many_connections_are_processed_in_parts(listener: DraftListener) -> None:
    """Events of many ended connections must not delay the receiver's messages."""
    unknown = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NOPE".ljust(20, b"\0") + bytes(32)
    for _ in range(2 * MAX_MESSAGES_AT_ONCE):
        connect_and_send(listener, unknown).close()
    deadline = time.monotonic() + 20
    seen = 0
    while seen < MAX_MESSAGES_AT_ONCE:
        ended = list(listener.ended())
        assert len(ended) <= MAX_MESSAGES_AT_ONCE
        assert all(isinstance(one, Failure | Disconnected) for one in ended)
        seen += len(ended)
        assert time.monotonic() < deadline, seen
    assert receive_until_honest(listener)


def test_with_keys_old_protocols_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    own_public, own_secret = (z85.decode(half) for half in zmq.curve_keypair())
    write_key_pair(tmp_path / "key", KeyPair(public, secret))
    (tmp_path / "clients").write_text(f"{own_public.hex()} good\n")
    config = DraftingConfig(
        listen="tcp://127.0.0.1:0", key=str(tmp_path / "key"), clients=str(tmp_path / "clients")
    )
    with zmq.Context() as context:
        listener = DraftListener(context, config)
        open_ones = [connect_and_send(listener, whole) for whole in handshakes().values()]
        with zmq.Context() as other, other.socket(zmq.DEALER) as honest:
            honest.setsockopt(zmq.LINGER, 0)
            honest.setsockopt(zmq.CURVE_SERVERKEY, public)
            honest.setsockopt(zmq.CURVE_PUBLICKEY, own_public)
            honest.setsockopt(zmq.CURVE_SECRETKEY, own_secret)
            honest.connect(listener.address)
            honest.send(HELLO)
            assert listener.socket.poll(10_000)
            (message,) = listener.receive()
        assert (message.data, message.key, message.name) == (HELLO, own_public.hex(), "good")
        for one in open_ones:
            one.close()
        listener.close()


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import zmq
from streamserve.protocol.drafting_config import DraftingConfig
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


def test_without_free_file_descriptors_connected_clients_are_served_and_others_connect_later(
    scale: Scale,
) -> None:
    """More half-open connections than the process may have files: nothing fails, and service resumes."""
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
            assert late.poll(60_000), "as handshakes time out"
        for connection in half_open:
            connection.close()
        assert late.poll(10_000)
        assert process.poll() is None


def test_a_copied_routing_id_does_not_affect_its_owner(listener: DraftListener) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
        for one in (first, second):
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.ROUTING_ID, b"me")
        first.connect(listener.address)
        first.send(b"a")
        assert listener.socket.poll(5000)
        (message,) = listener.receive()
        second.connect(listener.address)
        second.send(b"b")
        receive_until_honest(listener)
        listener.send(message.peer, b"for the first")
        assert first.poll(5000)
        assert first.recv() == b"for the first"
        assert not second.poll(50)
