"""With KV over TCP, exactly the blocks of open reservations are written, whoever sends and whenever."""

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
import zmq
from zmq.utils import z85

from streamserve.contracts.transport import Landed, TransferError
from streamserve.protocol.kv_network import KVNetwork, Write, decode_written, encode
from streamserve.protocol.transfers import CacheAddress
from streamserve.transfer.network import NetworkTransport
from streamserve.transfer.network_memory import NetworkMemory
from streamserve.transfer.pools import Pools

STALL_SECONDS = 1.0
LAYERS, OWN, THERE, WIDTH = 3, 40, 64, 48 << 10
FINGERPRINT = "model/16/1"


@pytest.fixture(autouse=True)
def _short_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a push without progress fails."""
    monkeypatch.setattr("streamserve.transfer.network.STALL_SECONDS", STALL_SECONDS)


def make_network(always: bool = True) -> KVNetwork:
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    return KVNetwork("127.0.0.1", public, secret, always)


class Pair:
    """A writer and an owner of blocks in this process."""

    def __init__(
        self, network: KVNetwork, writer: KVNetwork | None = None, rate: float | None = None
    ) -> None:
        self.own = torch.randint(0, 256, (LAYERS, OWN, WIDTH), dtype=torch.uint8)
        self.memory = NetworkMemory(network)
        self.there = self.memory.allocate(LAYERS * THERE * WIDTH).view(LAYERS, THERE, WIDTH)
        self.memory.serve(Pools([self.there]))
        self.address = self.memory.address(THERE, FINGERPRINT)
        self.transport = NetworkTransport(Pools([self.own]), FINGERPRINT, writer or network, rate)

    def push(
        self, copies: list[tuple[int, int]], reservation: str = "a", to: CacheAddress | None = None
    ) -> int:
        to = to or self.address
        self.transport.check(to)
        return self.transport.push(to, copies, reservation=reservation)

    def wait(self, seconds: float = 20.0) -> Landed:
        deadline = time.monotonic() + seconds
        while not (landed := self.transport.landed()):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return landed[0]

    def close(self) -> None:
        self.transport.close()
        self.memory.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*args: object, **options: object) -> Pair:
        made.append(Pair(*(args or (make_network(),)), **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make: Callable[..., Pair]) -> Pair:
    return make()


def test_blocks_of_an_open_reservation_arrive(pair: Pair) -> None:
    """Blocks of an open reservation arrive: some megabytes, in several parts."""
    copies = [(number, 63 - number) for number in range(OWN)]
    pair.memory.gate.open("a", [there for _, there in copies])
    job = pair.push(copies)
    landed = pair.wait()
    assert landed == Landed(job, LAYERS * OWN * WIDTH)
    for own, there in copies:
        assert torch.equal(pair.there[:, there], pair.own[:, own])
    assert not pair.there[:, : 64 - OWN].any()
    assert pair.memory.gate.refused == 0


def test_a_lost_writer_that_comes_back_writes_into_no_blocks(pair: Pair) -> None:
    """A lost writer that returns writes into no blocks: its reservation is closed, or another request's
    blocks are in the pool."""
    pair.memory.gate.open("a", [5, 6])
    pair.push([(0, 5)])
    assert not pair.wait().error
    pair.memory.gate.close("a")
    pair.memory.gate.open("b", [5, 6])
    before = pair.there.clone()
    for copies, reservation in (([(1, 6)], "a"), ([(1, 5), (2, 7)], "b"), ([(1, 6)], "")):
        pair.push(copies, reservation)
        landed = pair.wait()
        assert landed.error
        assert landed.sent == 0
    assert torch.equal(pair.there, before)
    assert pair.memory.gate.refused == 3


def test_memory_that_is_reopened_takes_writes_with_the_next_keys_alone(make: Callable[..., Pair]) -> None:
    """Reopened memory accepts writes only with the next keys. Writers of the previous fleet have another
    address, other keys and another incarnation."""
    pair, network = make(), make_network()
    pair.memory.gate.open("a", [1])
    pair.memory.close()
    pair.memory.reopen(network)
    address = pair.memory.address(THERE, FINGERPRINT)
    assert address.endpoint != pair.address.endpoint
    assert address.incarnation != pair.address.incarnation
    for to in (pair.address, address):
        pair.push([(0, 1)], to=to)
        assert pair.wait().error
    assert not pair.there.any()
    following = NetworkTransport(Pools([pair.own]), FINGERPRINT, network)
    following.check(address)
    following.push(address, [(0, 1)], reservation="a")
    while not (landed := following.landed()):
        time.sleep(0.002)
    following.close()
    assert not landed[0].error
    assert torch.equal(pair.there[:, 1], pair.own[:, 0])


def test_a_transport_that_is_aborted_writes_no_more(make: Callable[..., Pair]) -> None:
    pair = make(make_network(), rate=float(1 << 20))
    copies = [(number, number) for number in range(OWN)]
    pair.memory.gate.open("a", range(THERE))
    pair.push(copies)
    began = time.monotonic()
    pair.transport.abort()
    assert time.monotonic() - began < 1.0
    time.sleep(0.2)
    written = pair.there.clone()
    time.sleep(0.2)
    assert torch.equal(pair.there, written)
    assert not pair.transport.landed()


def test_another_incarnation_of_the_owner_is_not_written(pair: Pair) -> None:
    pair.memory.gate.open("a", [1])
    pair.push([(0, 1)], to=msgspec.structs.replace(pair.address, incarnation="old"))
    assert "restarted" in pair.wait().error
    assert not pair.there.any()


def test_without_the_fleets_key_nothing_is_written(make: Callable[..., Pair]) -> None:
    network = make_network()
    stranger = stranger_to(network)
    pair = make(network, writer=stranger)
    pair.memory.gate.open("a", [1])
    pair.push([(0, 1)])
    assert "has not answered" in pair.wait().error
    assert not pair.there.any()


def stranger_to(network: KVNetwork) -> KVNetwork:
    """Return a client with another key and the right server key: a listener must check who connects."""
    other = make_network()
    return KVNetwork(network.address, network.public, other.secret, True)


def test_an_owner_that_is_gone_costs_a_few_seconds(pair: Pair) -> None:
    pair.memory.gate.open("a", [1])
    pair.push([(0, 1)])
    assert not pair.wait().error
    pair.memory.close()
    started = time.monotonic()
    pair.push([(0, 1)])
    assert "has not answered" in pair.wait().error
    assert time.monotonic() - started < STALL_SECONDS + 2


def test_the_rate_limit_is_observed(make: Callable[..., Pair]) -> None:
    pair = make(rate=LAYERS * WIDTH * 10.0)
    pair.memory.gate.open("a", range(THERE))
    started = time.monotonic()
    for number in range(3):
        pair.push([(0, number)])
        assert not pair.wait().error
    assert time.monotonic() - started >= 0.19


def test_within_a_machine_shared_memory_is_chosen(make: Callable[..., Pair]) -> None:
    """Within a machine, shared memory is chosen: the TCP address is not used, as no reservation is open
    there."""
    pair = make(make_network(always=False))
    job = pair.push([(0, 7)])
    assert pair.wait() == Landed(job, LAYERS * WIDTH)
    assert torch.equal(pair.there[:, 7], pair.own[:, 0])
    pair.push([(0, 8)], to=msgspec.structs.replace(pair.address, host="elsewhere"))
    assert "closed" in pair.wait().error
    with pytest.raises(TransferError, match="gave no address"):
        pair.transport.check(msgspec.structs.replace(pair.address, host="elsewhere", endpoint=""))


@pytest.mark.parametrize(
    ("changed", "message"), [({"fingerprint": "other"}, "does not fit"), ({"size": 5}, "is not 64 blocks")]
)
def test_a_forged_address_is_refused(pair: Pair, changed: dict[str, object], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        pair.transport.check(msgspec.structs.replace(pair.address, **changed))


def test_hostile_writes_are_refused(make: Callable[..., Pair]) -> None:
    """Hostile writes from a holder of the key are refused: wrong sizes, rows that do not exist, invalid
    bytes."""
    network = make_network()
    pair = make(network)
    pair.memory.gate.open("a", range(THERE))
    own = pair.address.incarnation
    row = bytes(WIDTH)
    messages = [
        [b""], [b"\xc1", row],
        [encode(Write(own, "a", 1, 0, [0]))], [encode(Write(own, "a", 1, 0, [0])), b"x"],
        [encode(Write(own, "a", 1, LAYERS, [0])), row], [encode(Write(own, "a", 1, 2, [0])), row, row],
        [encode(Write(own, "a", 1, 0, [THERE])), row], [encode(Write(own, "a", 1, 0, [0, 1])), row],
        [encode(Write(own, "a", 1, 0, [0])), *[row] * 65], [bytes(300 << 10), row],
    ]  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        for option, value in {
            zmq.CURVE_SERVERKEY: network.public, zmq.CURVE_PUBLICKEY: network.public,
            zmq.CURVE_SECRETKEY: network.secret,
        }.items():  # fmt: skip
            socket.setsockopt(option, value)
        socket.connect(pair.address.endpoint)
        for message in messages:
            socket.send_multipart(message)
            assert socket.poll(5000)
            assert decode_written(socket.recv()).error
    assert not pair.there.any()
    pair.push([(0, 1)])
    assert not pair.wait().error
