"""A draft service among clients that mean no good: they are refused and logged, and others do not notice."""

import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils import z85

from streamserve.draft_service.target.client import Identity
from streamserve.engine.plan import DraftRequest
from streamserve.execution.drafters.fingerprints import fingerprints
from streamserve.protocol.curve import KeyPair, parse_endpoints, write_key_pair
from streamserve.protocol.drafting import (
    DRAFT_VERSION,
    MAX_MESSAGE_BYTES,
    Ask,
    Bye,
    Delta,
    Hello,
    Ping,
    Refused,
    Welcome,
    decode_to_target,
    encode,
)
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.tree import TokenTree
from streamserve.workers.remote_drafter import RemoteDrafter
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.draft_service.network import Drafting, drafting
from tests.fuzz.draft_messages import HostileClient
from tests.fuzz.zmtp import BODIES, SCRAPS, handshakes, shake_hands

GREEDY = SamplingParams(temperature=0.0)


def key_pair() -> KeyPair:
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    return KeyPair(public, secret)


class Guarded:
    """A service with keys, and who knows them."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = make_checkpoint(folder / "draft")
        self.service_key, self.good, self.other, self.stranger = (key_pair() for _ in range(4))
        write_key_pair(folder / "service.key", self.service_key)
        lines = [f"{self.good.public.hex()} good", f"{self.other.public.hex()} other"]
        (folder / "clients").write_text("\n".join(lines))
        self.flags = (
            "--listen", "tcp://127.0.0.1:0", "--threads", "1", "--num-blocks", "300",
            "--key", str(folder / "service.key"), "--clients", str(folder / "clients"),
        )  # fmt: skip
        self.tokenizer, self.vocabulary = fingerprints(self.checkpoint, 320)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    return Guarded(tmp_path_factory.mktemp("guarded"))


@pytest.fixture(scope="module")
def service(guarded: Guarded) -> Iterator[Drafting]:
    with drafting(str(guarded.checkpoint), *guarded.flags) as running:
        yield running


class Peer:
    """Somebody who says what he likes."""

    def __init__(self, service: Drafting, guarded: Guarded, own: KeyPair | None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if own:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, guarded.service_key.public)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        self.socket.connect(service.address)
        self.guarded = guarded

    def say(self, message: object, wait: float = 5.0) -> object:
        self.socket.send(message if isinstance(message, bytes) else encode(message))
        return decode_to_target(self.socket.recv()) if self.socket.poll(int(wait * 1000)) else None

    def hello(self, wait: float = 5.0, **fields: object) -> object:
        own = {
            "version": DRAFT_VERSION, "tokenizer": self.guarded.tokenizer,
            "vocabulary": self.guarded.vocabulary, "name": "x", "nonce": 1,
        }  # fmt: skip
        return self.say(Hello(**{**own, **fields}), wait)

    def heard(self, sessions: list[Welcome]) -> Counter[str]:
        """What has come, by kind; new `sessions` are added."""
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


@pytest.fixture
def peer(service: Drafting, guarded: Guarded) -> Iterator[Callable[[KeyPair | None], Peer]]:
    made: list[Peer] = []

    def make(own: KeyPair | None) -> Peer:
        made.append(Peer(service, guarded, own))
        return made[-1]

    yield make
    for one in made:
        one.close()


def honest(service: Drafting, guarded: Guarded, own: KeyPair) -> RemoteDrafter:
    address = service.address.replace("tcp://", f"tcp://{guarded.service_key.public.hex()}@")
    identity = Identity(guarded.tokenizer, guarded.vocabulary, "honest", 320)
    return RemoteDrafter(identity, parse_endpoints(address), own, 1)


def tree_for(drafter: RemoteDrafter, sequence: int, prompt: list[int]) -> TokenTree:
    """What the service guesses behind a prompt, asked for until it comes."""
    request = DraftRequest(sequence, 0, 0, prompt, 0, 0, GREEDY, 4, 1, 4, 0, [])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        drafter.begin([request])
        tree = drafter.collect(time.monotonic() + 1.0).get(sequence)
        if tree:
            drafter.release([sequence])
            return tree
        time.sleep(0.01)
    raise AssertionError("no tree came")


def test_without_an_allowed_key_nobody_comes_in(service: Drafting, guarded: Guarded, peer) -> None:
    assert peer(guarded.stranger).hello(wait=0.5) is None
    assert peer(None).hello(wait=0.5) is None
    assert isinstance(peer(guarded.good).hello(), Welcome)
    assert until(lambda: service.printed("refused (key)"))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_target_that_dies_leaves_no_session(service: Drafting, guarded: Guarded) -> None:
    """Long before its lease ends: its connection has."""
    dead = Peer(service, guarded, guarded.other)
    welcome = dead.hello(name="dead")
    assert isinstance(welcome, Welcome)
    dead.close()
    closed = f"session {welcome.tag} closed, as its connection ended: target 'other'"
    assert until(lambda: service.printed(closed), 20.0)


@pytest.mark.parametrize("what", ["version", "tokenizer", "vocabulary"])
def test_who_speaks_otherwise_is_refused_and_logged(service, guarded, peer, what) -> None:
    refused = peer(guarded.good).hello(**{what: 99 if what == "version" else "other"})
    assert isinstance(refused, Refused)
    assert refused.reason == what
    assert until(lambda: service.printed(f"refused ({what})"))


def test_another_clients_session_cannot_be_used(service, guarded, peer) -> None:
    theirs = peer(guarded.good).hello()
    for own in (guarded.other, guarded.good):
        thief = peer(own)
        for message in (
            Ping(theirs.tag, b"0" * 16, 0.0),
            Bye(theirs.tag, b""),
            Ask(tag=theirs.tag, channel=b"1" * 16, deltas=[]),
        ):
            assert isinstance(thief.say(message), Refused)
    assert isinstance(peer(guarded.other).say(Bye(theirs.tag, theirs.channel)), Refused), "a leaked channel"
    assert until(lambda: service.printed("refused (channel)"))


def test_what_is_too_large_is_refused_and_logged(service, guarded, peer) -> None:
    refused = peer(guarded.good).say(b"\0" * (MAX_MESSAGE_BYTES + 1))
    assert isinstance(refused, Refused)
    assert refused.reason == "size"
    assert until(lambda: service.printed("refused (size)"))


SECONDS, FULL_SECONDS = 2, 600
"""Of a campaign of hostile clients, in a small run and in a full one."""


def test_hostile_messages_are_refused_and_others_do_not_notice(
    service: Drafting, guarded: Guarded, peer, scale: Scale, record: Callable[..., None]
) -> None:
    """With keys: one client means no good, another gets the trees that it got before."""
    print(f"seed {scale.seed}")
    rng = random.Random(scale.seed)
    prompts = [[rng.randrange(4, 300) for _ in range(rng.randint(1, 60))] for _ in range(5)]
    drafter = honest(service, guarded, guarded.other)
    trees = [tree_for(drafter, number, prompt) for number, prompt in enumerate(prompts)]
    hostile = [peer(guarded.good) for _ in range(3)]
    client = HostileClient(rng, (guarded.tokenizer, guarded.vocabulary))
    client.sessions += [one for other in hostile if isinstance(one := other.hello(), Welcome)]
    end, sent, asked = time.monotonic() + scale.pick(SECONDS, FULL_SECONDS), 0, 0
    answers: Counter[str] = Counter()
    while time.monotonic() < end:
        for _ in range(40):
            one = rng.choice(hostile)
            whole = client.next() if rng.random() < 0.7 else nonsense(rng, rng.choice(client.sessions))
            with contextlib.suppress(zmq.Again):
                one.socket.send(whole, zmq.NOBLOCK)
                sent += 1
        if sent % 5 == 0:
            raw_bytes(service, rng)
        for one in hostile:
            answers += one.heard(client.sessions)
        number = rng.randrange(len(prompts))
        asked += 1
        assert tree_for(drafter, 100 + asked, prompts[number]) == trees[number]
    drafter.close()
    assert until(lambda: service.printed("refused (unreadable)"))
    assert service.process.poll() is None
    assert not service.printed("Traceback")
    assert answers["Refused"] > 5
    assert sent > 50
    assert asked > 2
    print(f"{sent} messages, answers {dict(answers)}, {asked} trees")
    record(sent=sent, trees=asked, answers=dict(answers))


def test_an_unkeyed_service_takes_any_bytes(
    guarded: Guarded, scale: Scale, record: Callable[..., None]
) -> None:
    """First a ZMTP 1.0 greeting with a message of one letter, which has no metadata. Then handshakes of all
    versions cut anywhere, scraps, half-open connections by the hundred and hostile messages. An honest target
    gets the trees that it got before."""
    print(f"seed {scale.seed}")
    rng = random.Random(scale.seed)
    flags = "--threads", "1", "--num-blocks", "300", "--lease", "2"
    with drafting(str(guarded.checkpoint), *flags) as service, contextlib.ExitStack() as stack:
        drafter = RemoteDrafter(
            Identity(guarded.tokenizer, guarded.vocabulary, "honest", 320),
            parse_endpoints(service.address), None, 1,
        )  # fmt: skip
        stack.callback(drafter.close)
        prompt = [rng.randrange(4, 300) for _ in range(30)]
        expected = tree_for(drafter, 1, prompt)
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(bytes.fromhex("0100020041"))
            assert until(lambda: service.printed("refused (unreadable)"))
        end, asked, opened = time.monotonic() + scale.pick(SECONDS, FULL_SECONDS), 1, 0
        while time.monotonic() < end:
            with contextlib.ExitStack() as connections:
                for _ in range(rng.choice((1, 50, 300))):
                    connection = connections.enter_context(
                        socket.create_connection(("127.0.0.1", service.port))
                    )
                    with contextlib.suppress(OSError):
                        connection.sendall(scrap(rng))
                    opened += 1
                with contextlib.suppress(OSError):
                    shake_hands(connection := inside(connections, service.port))
                    connection.sendall(rng.choice(BODIES) + rng.randbytes(rng.randrange(40)))
                strangers = [Peer(service, guarded, None) for _ in range(2)]
                for stranger in strangers:
                    connections.callback(stranger.close)
                    client = HostileClient(rng, (guarded.tokenizer, guarded.vocabulary))
                    if isinstance(welcome := stranger.hello(), Welcome):
                        client.sessions.append(welcome)
                    for _ in range(50):
                        with contextlib.suppress(zmq.Again):
                            stranger.socket.send(client.next(), zmq.NOBLOCK)
                asked += 1
                assert tree_for(drafter, asked, prompt) == expected
        asked += 1
        assert tree_for(drafter, asked, prompt) == expected
        assert service.process.poll() is None
        assert not service.printed("Traceback")
        assert until(lambda: service.printed("refused (unreadable)"))
        print(f"{opened} connections, {asked} trees")
        record(connections=opened, trees=asked)


def inside(connections: contextlib.ExitStack, port: int) -> socket.socket:
    return connections.enter_context(socket.create_connection(("127.0.0.1", port)))


def scrap(rng: random.Random) -> bytes:
    """A handshake that is cut or disturbed, or something else altogether."""
    whole = bytearray(rng.choice([*SCRAPS, *handshakes().values()]))
    for _ in range(rng.randrange(3)):
        if whole:
            whole[rng.randrange(len(whole))] = rng.randrange(256)
    if rng.random() < 0.5:
        del whole[rng.randrange(len(whole) + 1) :]
    return bytes(whole) + (rng.randbytes(rng.randrange(100)) if rng.random() < 0.3 else b"")


def nonsense(rng: random.Random, welcome: Welcome) -> bytes:
    """Random bytes, random msgpack, truncated and disturbed messages, and well-formed ones out of bounds."""
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
                Ask(tag=welcome.tag, channel=welcome.channel, deltas=[delta] * rng.randrange(3)),
                Ask(tag=rng.getrandbits(40), channel=b"", deltas=[delta], need=-1.0),
                Ping(welcome.tag, welcome.channel, float("nan")),
            ]
        )
    )
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return msgspec.msgpack.encode({"type": rng.choice(["Ask", "Hello", "Nothing"]), "tag": [[]] * 50})
        case 2:
            return whole[: rng.randrange(len(whole))]
        case _:
            return whole


def raw_bytes(service: Drafting, rng: random.Random) -> None:
    """Something that does not even speak ZeroMQ."""
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(rng.randbytes(500))
