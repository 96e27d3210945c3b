"""The listener of a draft service survives any bytes on its socket."""

import concurrent.futures
import contextlib
import random
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from streamserve.protocol.curve import KeyPair, parse_endpoint, write_key_pair
from streamserve.protocol.drafting import DRAFT_VERSION, Hello, encode
from streamserve.protocol.drafting_config import DraftingConfig
from streamserve.workers.draft_listener import (
    CLOSE_BYTES,
    MAX_MESSAGES_AT_ONCE,
    Disconnected,
    DraftListener,
    Failure,
    ReceivedMessage,
)
from streamserve.workers.draft_worker import listen
from streamserve.workers.plain_connection import HANDSHAKE_SECONDS
from streamserve.workers.plain_listener import MAX_HELD_BYTES, PlainListener
from streamserve.workers.zmtp import COMMAND, frame
from tests.conftest import Scale
from tests.fuzz.zmtp import BODIES, INVALID_OPENINGS, handshakes, shake_hands

HELLO = encode(Hello(version=DRAFT_VERSION, tokenizer="t", vocabulary="v", name="x", nonce=1))


@pytest.fixture
def listener() -> Iterator[DraftListener]:
    with zmq.Context() as context:
        made = listen(context, DraftingConfig(listen="tcp://127.0.0.1:0"))
        assert isinstance(made, PlainListener)
        yield made
        made.close()


def wait(listener: DraftListener, seconds: float) -> bool:
    """Wait until there is something to receive; return whether there is."""
    poller = zmq.Poller()
    for pollable in listener.pollable:
        poller.register(pollable, zmq.POLLIN)
    return listener.pending or bool(poller.poll(int(1000 * seconds)))


def failures(listener: DraftListener, count: int = 1, seconds: float = 10.0) -> list[str]:
    """Receive until `count` connections have failed; return the reasons."""
    texts: list[str] = []
    deadline = time.monotonic() + seconds
    while len(texts) < count:
        wait(listener, 0.05)
        assert not [message for message in listener.receive() if not message.fault]
        texts += [ended.text for ended in listener.ended() if isinstance(ended, Failure)]
        assert time.monotonic() < deadline, texts
    return texts


def port(listener: DraftListener) -> int:
    return int(listener.address.rpartition(":")[2])


def connect_and_send(listener: DraftListener, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port(listener)))
    connection.sendall(data)
    return connection


def messages(listener: DraftListener, seconds: float = 10.0) -> list[ReceivedMessage]:
    """Return the messages that arrive first, within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (heard := list(listener.receive())):
        list(listener.ended())
        assert time.monotonic() < deadline, "nothing arrives"
        wait(listener, 0.05)
    return heard


def shake_hands_while(listener: DraftListener, connection: socket.socket, minor: int = 1) -> None:
    """Perform the handshake of a client without keys, while the listener handles its side."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        shaken = pool.submit(shake_hands, connection, minor)
        while not shaken.done():
            assert not list(listener.receive())
            wait(listener, 0.01)
        shaken.result()


def send_while(listener: DraftListener, connection: socket.socket, data: bytes, repeat: bool = False) -> int:
    """Send all of `data`, or repeat it until the connection is closed, while the listener reads; return the
    number of bytes sent."""
    connection.setblocking(False)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while repeat or sent < len(data):
            with contextlib.suppress(BlockingIOError):
                sent += connection.send(data[sent % len(data) :])
            assert not list(listener.receive())
            assert sent < 64 << 20, "the connection was not closed"
    return sent


def receive_until_honest(listener: DraftListener, seconds: float = 10.0) -> list[ReceivedMessage]:
    """Return all messages until an honest client's message arrives, which must be within `seconds`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as honest:
        honest.setsockopt(zmq.LINGER, 0)
        honest.connect(listener.address)
        honest.send(HELLO)
        heard: list[ReceivedMessage] = []
        deadline = time.monotonic() + seconds
        while not any(message.data == HELLO for message in heard):
            heard += listener.receive()
            list(listener.ended())
            assert time.monotonic() < deadline, "messages of an honest client are not received any more"
        return heard


def test_a_zmtp_1_greeting_is_refused_and_the_listener_continues(listener: DraftListener) -> None:
    with connect_and_send(listener, bytes.fromhex("0100020041")):
        assert failures(listener) == ["a connection violated the protocol: not ZMTP 3"]
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
            # The client shows the same identity each time; another client's identity is free again once that
            # client has ended.
            shake_hands_while(listener, connection, minor)
            connection.sendall(body)
            wait(listener, 0.02)
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
    """Half-open connections are closed without leaks: the maximum number that this process may open at a
    time; other connections still work."""
    waiting = [connect_and_send(listener, b"\xff" + bytes(rest)) for rest in range(8) for _ in range(25)]
    assert receive_until_honest(listener)
    for one in waiting:
        one.close()
    assert receive_until_honest(listener)


def test_events_of_many_connections_are_processed_in_parts(listener: DraftListener) -> None:
    """Events of many ended connections must not delay the receiver's messages."""
    unknown = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NOPE".ljust(20, b"\0") + bytes(32)
    for _ in range(2 * MAX_MESSAGES_AT_ONCE):
        connect_and_send(listener, unknown).close()
    deadline = time.monotonic() + 20
    seen = 0
    while seen < MAX_MESSAGES_AT_ONCE:
        assert not list(listener.receive())
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
        listener = listen(context, config)
        open_ones = [connect_and_send(listener, whole) for whole in handshakes().values()]
        with zmq.Context() as other, other.socket(zmq.DEALER) as honest:
            honest.setsockopt(zmq.LINGER, 0)
            honest.setsockopt(zmq.CURVE_SERVERKEY, public)
            honest.setsockopt(zmq.CURVE_PUBLICKEY, own_public)
            honest.setsockopt(zmq.CURVE_SECRETKEY, own_secret)
            honest.connect(listener.address)
            honest.send(HELLO)
            assert wait(listener, 10.0)
            (message,) = messages(listener)
        assert (message.data, message.key, message.name) == (HELLO, own_public.hex(), "good")
        for one in open_ones:
            one.close()
        listener.close()


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import select
from streamserve.protocol.curve import parse_endpoint
from streamserve.workers.plain_listener import PlainListener
gate = PlainListener(parse_endpoint("tcp://127.0.0.1:0"))
print(gate.address, flush=True)
while True:
    select.select(gate.pollable, [], [], 0.05)
    for message in gate.receive():
        gate.send(message.peer, b"heard")
    list(gate.ended())
"""


def test_without_free_file_descriptors_connected_clients_are_served_and_others_connect_later(
    scale: Scale,
) -> None:
    """Without free file descriptors, connected clients are served and others connect later. There are more
    half-open connections than the process may have files."""
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
        assert inside.poll(10_000), "the client was already connected"
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
        (message,) = messages(listener)
        second.connect(listener.address)
        second.send(b"b")
        receive_until_honest(listener)
        listener.send(message.peer, b"for the first")
        assert first.poll(5000)
        assert first.recv() == b"for the first"
        assert not second.poll(50)


def test_a_message_of_endless_parts_is_refused_at_its_first_part(listener: DraftListener) -> None:
    """libzmq would hold all parts until the last one."""
    with socket.create_connection(("127.0.0.1", port(listener))) as connection:
        shake_hands_while(listener, connection)
        sent = send_while(listener, connection, b"\x01\x00" * 4096, repeat=True)
        assert failures(listener) == ["a connection violated the protocol: a message has more than one part"]
    assert sent < 16 << 20, "the connection was closed and not read further"
    assert receive_until_honest(listener)


def test_unfinished_messages_of_all_connections_together_are_bounded(listener: DraftListener) -> None:
    """Unfinished messages of all connections together are bounded. Each is within the limit of a message, and
    none is ever finished."""
    unfinished = b"\x02" + CLOSE_BYTES.to_bytes(8, "big") + bytes(CLOSE_BYTES - 1)
    count = MAX_HELD_BYTES // CLOSE_BYTES + 2
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port(listener))))
            shake_hands_while(listener, connection)
            send_while(listener, connection, unfinished)
        # The last bytes may still be in the kernel's buffers.
        texts = failures(listener, count=2)
        assert set(texts) == {"a connection held part of an unfinished message for too long"}
        assert receive_until_honest(listener)


def test_a_client_that_does_not_read_makes_answers_drop(listener: DraftListener) -> None:
    with socket.create_connection(("127.0.0.1", port(listener))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        shake_hands_while(listener, connection)
        connection.sendall(b"\x00\x01a")
        (message,) = messages(listener)
        tracemalloc.start()
        for _ in range(200):
            listener.send(message.peer, bytes(1 << 20))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 << 20
        assert receive_until_honest(listener)


def test_a_flood_of_commands_ends_its_connection_and_delays_no_client(listener: DraftListener) -> None:
    """A flood of commands ends its connection and delays no client. Commands are not messages, so no rate
    limit counts them."""
    for command in (frame(b"\x04PING\0\0", COMMAND), b"\x04\x00"):
        with contextlib.ExitStack() as stack:
            flooding = []
            for _ in range(20):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port(listener))))
                shake_hands_while(listener, connection)
                connection.sendall(command * 8192)
                flooding.append(connection)
            receive_until_honest(listener)
            assert all(ended_by_peer(connection) for connection in flooding)


def test_what_arrived_in_time_is_read_before_deadlines_are_applied(listener: DraftListener) -> None:
    """Data that arrived in time is read before deadlines are applied, as the thread may have been held up for
    longer than a handshake may take."""
    with connect_and_send(listener, b"") as connection:
        assert wait(listener, 5.0)
        assert not list(listener.receive())
        connection.sendall(handshakes()["ZMTP 3.1"])
        time.sleep(HANDSHAKE_SECONDS + 1.0)
        assert [message.data for message in messages(listener)] == [b"abc"]


def test_clients_of_whole_messages_go_on_among_many_unfinished_ones(listener: DraftListener) -> None:
    """Clients with whole messages continue among many unfinished ones: each of many connections holds little
    and never finishes, so the oldest are closed."""
    part = b"\x02" + (200_000).to_bytes(8, "big") + bytes(160_000)
    with contextlib.ExitStack() as stack, zmq.Context() as context, context.socket(zmq.DEALER) as honest:
        for _ in range(MAX_HELD_BYTES // 160_000 + 10):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port(listener))))
            shake_hands_while(listener, connection)
            send_while(listener, connection, part)
        assert failures(listener, 5)
        honest.setsockopt(zmq.LINGER, 0)
        honest.connect(listener.address)
        whole = bytes(2 << 20)
        honest.send(whole)
        assert [message.data for message in messages(listener)] == [whole]


def test_a_new_client_takes_the_place_of_a_silent_one() -> None:
    listener = PlainListener(parse_endpoint("tcp://127.0.0.1:0"), max_connections=3)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        first, silent, third = (
            stack.enter_context(socket.create_connection(("127.0.0.1", port(listener)))) for _ in range(3)
        )
        for connection in (first, silent, third):
            shake_hands_while(listener, connection)
        for connection in (first, third):
            connection.sendall(b"\x00\x01a")
            assert len(messages(listener)) == 1
        late = stack.enter_context(socket.create_connection(("127.0.0.1", port(listener))))
        assert failures(listener) == ["a silent connection was closed for a new one"]
        assert ended_by_peer(silent)
        late.sendall(handshakes()["ZMTP 3.1"])
        assert [message.data for message in messages(listener)] == [b"abc"]
        first.sendall(b"\x00\x01b")
        assert [message.data for message in messages(listener)] == [b"b"]
        stack.enter_context(socket.create_connection(("127.0.0.1", port(listener))))
        assert failures(listener), "all have sent messages, so the longest silent one is closed"
        assert ended_by_peer(third)


def ended_by_peer(connection: socket.socket) -> bool:
    """Return whether the peer has closed a connection, waiting for at most 5 seconds."""
    connection.settimeout(5.0)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_an_address_in_use_is_one_clear_line(listener: DraftListener) -> None:
    with pytest.raises(OSError, match=r"cannot listen at tcp://.*: Address already in use") as refused:
        PlainListener(parse_endpoint(listener.address))
    assert str(refused.value) == f"cannot listen at {listener.address}: Address already in use"
