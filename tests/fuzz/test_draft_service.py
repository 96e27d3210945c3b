"""Hostile clients of a draft service are refused and logged, and other clients are not affected."""

import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import zmq

from streamserve.draft_service.target.client import TargetIdentity
from streamserve.protocol.curve import KeyPair, parse_endpoints
from streamserve.protocol.drafting import MAX_MESSAGE_BYTES, Bye, DraftRequests, Ping, Refused, Welcome
from streamserve.workers.remote_drafter import RemoteDrafter
from tests.conftest import Scale
from tests.draft_service.network import Drafting, drafting
from tests.fuzz.draft_messages import HostileClient
from tests.fuzz.draft_peers import KeyedService, Peer, honest_drafter, nonsense, raw_bytes, tree_for
from tests.fuzz.zmtp import BODIES, INVALID_OPENINGS, handshakes, shake_hands


@pytest.fixture(scope="module")
def keyed_service(tmp_path_factory: pytest.TempPathFactory) -> KeyedService:
    return KeyedService(tmp_path_factory.mktemp("guarded"))


@pytest.fixture(scope="module")
def service(keyed_service: KeyedService) -> Iterator[Drafting]:
    with drafting(str(keyed_service.checkpoint), *keyed_service.flags) as running:
        yield running


@pytest.fixture
def peer(service: Drafting, keyed_service: KeyedService) -> Iterator[Callable[[KeyPair | None], Peer]]:
    peers: list[Peer] = []

    def make(keys: KeyPair | None) -> Peer:
        peers.append(Peer(service, keyed_service, keys))
        return peers[-1]

    yield make
    for each in peers:
        each.close()


def test_a_client_without_an_allowed_key_is_refused(
    service: Drafting, keyed_service: KeyedService, peer
) -> None:
    assert peer(keyed_service.unknown_client).hello(wait=0.5) is None
    assert peer(None).hello(wait=0.5) is None
    assert peer(keyed_service.good).welcome()
    assert until(lambda: service.printed("refused (key)"))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_crashed_target_leaves_no_session(service: Drafting, keyed_service: KeyedService) -> None:
    """A crashed target leaves no session: the session ends with its connection, long before its lease."""
    dead = Peer(service, keyed_service, keyed_service.other)
    welcome = dead.welcome("dead")
    dead.close()
    closed = f"session {welcome.tag} closed, as its connection ended: target 'other'"
    assert until(lambda: service.printed(closed), 20.0)


@pytest.mark.parametrize("what", ["version", "tokenizer", "vocabulary"])
def test_an_incompatible_client_is_refused_and_logged(service, keyed_service, peer, what) -> None:
    refused = peer(keyed_service.good).hello(**{what: 99 if what == "version" else "other"})
    assert isinstance(refused, Refused)
    assert refused.reason == what
    assert until(lambda: service.printed(f"refused ({what})"))


def test_another_clients_session_cannot_be_used(service, keyed_service, peer) -> None:
    victim = peer(keyed_service.good).welcome()
    for keys in (keyed_service.other, keyed_service.good):
        thief = peer(keys)
        for message in (
            Ping(victim.tag, b"0" * 16, 0.0),
            Bye(victim.tag, b""),
            DraftRequests(tag=victim.tag, channel=b"1" * 16, deltas=[]),
        ):
            assert isinstance(thief.send(message), Refused)
    assert isinstance(peer(keyed_service.other).send(Bye(victim.tag, victim.channel)), Refused), (
        "a leaked channel"
    )
    assert until(lambda: service.printed("refused (channel)"))


def test_a_message_that_is_too_large_is_refused_and_logged(service, keyed_service, peer) -> None:
    refused = peer(keyed_service.good).send(b"\0" * (MAX_MESSAGE_BYTES + 1))
    assert isinstance(refused, Refused)
    assert refused.reason == "size"
    assert until(lambda: service.printed("refused (size)"))


SECONDS, FULL_SECONDS = 1, 90
"""Seconds for which hostile clients send, in a small run and in a full run."""


def test_hostile_messages_do_not_affect_other_clients(
    service: Drafting, keyed_service: KeyedService, peer, scale: Scale, record: Callable[..., None]
) -> None:
    """With keys, hostile messages do not affect other clients: one client is hostile, another one still gets
    the same trees."""
    print(f"seed {scale.seed}")
    rng = random.Random(scale.seed)
    prompts = [[rng.randrange(4, 300) for _ in range(rng.randint(1, 60))] for _ in range(5)]
    drafter = honest_drafter(service, keyed_service, keyed_service.other)
    trees = [tree_for(drafter, number, prompt) for number, prompt in enumerate(prompts)]
    hostile = [peer(keyed_service.good) for _ in range(3)]
    client = HostileClient(rng, (keyed_service.tokenizer, keyed_service.vocabulary))
    client.sessions += [each for other in hostile if isinstance(each := other.hello(), Welcome)]
    end, sent, tree_count = time.monotonic() + scale.pick(SECONDS, FULL_SECONDS), 0, 0
    answers: Counter[str] = Counter()
    while time.monotonic() < end:
        for _ in range(40):
            each = rng.choice(hostile)
            whole = client.next() if rng.random() < 0.7 else nonsense(rng, rng.choice(client.sessions))
            with contextlib.suppress(zmq.Again):
                each.socket.send(whole, zmq.NOBLOCK)
                sent += 1
        if sent % 5 == 0:
            raw_bytes(service, rng)
        for each in hostile:
            answers += each.received_kinds(client.sessions)
        number = rng.randrange(len(prompts))
        tree_count += 1
        assert tree_for(drafter, 100 + tree_count, prompts[number]) == trees[number]
    drafter.close()
    assert until(lambda: service.printed("refused (unreadable)"))
    assert service.process.poll() is None
    assert not service.printed("Traceback")
    assert answers["Refused"] > 5
    assert sent > 50
    assert tree_count > 2
    print(f"{sent} messages, answers {dict(answers)}, {tree_count} trees")
    record(sent=sent, trees=tree_count, answers=dict(answers))


def test_an_unkeyed_service_survives_any_bytes(
    keyed_service: KeyedService, scale: Scale, record: Callable[..., None]
) -> None:
    """First a ZMTP 1.0 greeting with a message of one letter, which has no metadata. Then handshakes of all
    versions truncated anywhere, invalid openings, half-open connections by the hundred and hostile messages.
    An honest target still gets the same trees as before."""
    print(f"seed {scale.seed}")
    rng = random.Random(scale.seed)
    flags = "--threads", "1", "--num-blocks", "300", "--lease", "2"
    with drafting(str(keyed_service.checkpoint), *flags) as service, contextlib.ExitStack() as stack:
        drafter = RemoteDrafter(
            TargetIdentity(keyed_service.tokenizer, keyed_service.vocabulary, "honest", 320),
            parse_endpoints(service.address), None, 1,
        )  # fmt: skip
        stack.callback(drafter.close)
        prompt = [rng.randrange(4, 300) for _ in range(30)]
        expected = tree_for(drafter, 1, prompt)
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(bytes.fromhex("0100020041"))
            assert until(lambda: service.printed("refused (unreadable)"))
        end, tree_count, opened = time.monotonic() + scale.pick(SECONDS, FULL_SECONDS), 1, 0
        while time.monotonic() < end:
            with contextlib.ExitStack() as connections:
                for _ in range(rng.choice((1, 50, 300))):
                    connection = connections.enter_context(
                        socket.create_connection(("127.0.0.1", service.port))
                    )
                    with contextlib.suppress(OSError):
                        connection.sendall(random_opening(rng))
                    opened += 1
                with contextlib.suppress(OSError):
                    shake_hands(connection := open_connection(connections, service.port))
                    connection.sendall(rng.choice(BODIES) + rng.randbytes(rng.randrange(40)))
                strangers = [Peer(service, keyed_service, None) for _ in range(2)]
                for unknown_client in strangers:
                    connections.callback(unknown_client.close)
                    client = HostileClient(rng, (keyed_service.tokenizer, keyed_service.vocabulary))
                    if isinstance(welcome := unknown_client.hello(), Welcome):
                        client.sessions.append(welcome)
                    for _ in range(50):
                        with contextlib.suppress(zmq.Again):
                            unknown_client.socket.send(client.next(), zmq.NOBLOCK)
                tree_count += 1
                assert tree_for(drafter, tree_count, prompt) == expected
        tree_count += 1
        assert tree_for(drafter, tree_count, prompt) == expected
        assert service.process.poll() is None
        assert not service.printed("Traceback")
        assert until(lambda: service.printed("refused (unreadable)"))
        print(f"{opened} connections, {tree_count} trees")
        record(connections=opened, trees=tree_count)


def open_connection(connections: contextlib.ExitStack, port: int) -> socket.socket:
    return connections.enter_context(socket.create_connection(("127.0.0.1", port)))


def random_opening(rng: random.Random) -> bytes:
    """Return a truncated or corrupted handshake, or other bytes."""
    whole = bytearray(rng.choice([*INVALID_OPENINGS, *handshakes().values()]))
    for _ in range(rng.randrange(3)):
        if whole:
            whole[rng.randrange(len(whole))] = rng.randrange(256)
    if rng.random() < 0.5:
        del whole[rng.randrange(len(whole) + 1) :]
    return bytes(whole) + (rng.randbytes(rng.randrange(100)) if rng.random() < 0.3 else b"")
