"""Sessions deliver each message once and in order, whatever messages connections lose, in virtual time."""

import random
from collections import deque
from collections.abc import Iterator

import pytest

from streamserve import __version__
from streamserve.extras.cluster.membership import Begun, Command, JoinError, Membership, SessionLost
from streamserve.extras.cluster.registry import (
    BURST,
    JOIN_BURST,
    MAX_AGENTS,
    AgentLeft,
    Body,
    Effect,
    Joined,
    RegisteredAgent,
    Registry,
    Reply,
)
from streamserve.extras.cluster.session import MAX_KEPT, PacketSession, SessionError
from streamserve.protocol.cluster import (
    CLUSTER_VERSION,
    AgentWelcome,
    Alive,
    Challenge,
    ClusterRefused,
    FromAgent,
    FromHead,
    Knock,
    Machine,
    Packet,
    Register,
    Resume,
)
from tests.conftest import Scale

MACHINE = Machine("one", "boot/1/0", "10.0.0.1")
LEASE = 4.0
KEY = "aa" * 32


class Wire:
    """A head and an agent in virtual time, over connections that may lose messages in flight."""

    def __init__(self, seed: int = 0, epoch: int = 7) -> None:
        self.random = random.Random(seed)
        self.registry = Registry(epoch, LEASE, self.random.randbytes)
        self.member = Membership(MACHINE)
        self.now = 100.0
        self.clock_ahead = 0.0
        """Seconds by which the agent's clock is ahead of the head's clock."""
        self.peer = b"peer-0"
        self.up = True
        self.to_head: deque[tuple[float, bytes, FromAgent]] = deque()
        self.to_agent: deque[tuple[float, FromHead]] = deque()
        self.delay = 0.01
        self.bodies: list[bytes] = []
        self.commands: list[bytes] = []
        self.events: list[object] = []

    @property
    def agent(self) -> RegisteredAgent:
        return next(iter(self.registry.agents.values()))

    def agent_now(self) -> float:
        return self.now + self.clock_ahead

    def head_says(self, effects: Iterator[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(peer, message):
                    if self.up and peer == self.peer:
                        self.to_agent.append((self.now + self.delay, message))
                case Body(_, data):
                    self.bodies.append(data)
                case _:
                    self.events.append(effect)

    def agent_says(self, effects: Iterator[FromAgent | Begun | Command | SessionLost]) -> None:
        for effect in effects:
            match effect:
                case Begun() | SessionLost():
                    self.events.append(effect)
                case Command(data):
                    self.commands.append(data)
                case _:
                    if self.up:
                        self.to_head.append((self.now + self.delay, self.peer, effect))

    def reconnect(self) -> None:
        """Lose the messages in flight, and connect again."""
        self.to_head.clear()
        self.to_agent.clear()
        self.up = True
        self.peer = b"peer-%d" % self.random.getrandbits(32)
        self.agent_says(self.member.reconnected(self.agent_now()))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.01
            while self.to_head and self.to_head[0][0] <= self.now:
                _, peer, message = self.to_head.popleft()
                self.head_says(self.registry.heard(peer, KEY, message, self.now))
            while self.to_agent and self.to_agent[0][0] <= self.now:
                _, message = self.to_agent.popleft()
                self.agent_says(self.member.heard(message, self.agent_now()))
            self.head_says(self.registry.tick(self.now))
            self.agent_says(self.member.tick(self.agent_now()))

    def joined(self) -> "Wire":
        self.run(0.2)
        assert self.member.joined
        assert [type(event) for event in self.events] == [Joined, Begun]
        self.events.clear()
        return self


def test_messages_arrive_once_and_in_order_whatever_connections_lose(scale: Scale) -> None:
    resent = 0
    for seed in range(scale.pick(10, 300)):
        wire = Wire(seed).joined()
        sent: tuple[list[bytes], list[bytes]] = ([], [])
        for number in range(200):
            body = b"%d" % number
            if wire.random.random() < 0.5:
                sent[0].append(body)
                wire.agent_says(wire.member.send(body))
            else:
                sent[1].append(body)
                wire.head_says(wire.registry.send(wire.agent, body))
            wire.run(wire.random.choice((0.0, 0.0, 0.01, 0.03)))
            if wire.random.random() < 0.05:
                wire.up = False
                wire.run(wire.random.uniform(0, 1))
                wire.reconnect()
        wire.run(2 * LEASE)
        assert (wire.bodies, wire.commands) == sent
        assert wire.events == []
        assert wire.member.session
        resent += wire.member.session.resent + wire.agent.session.resent
    assert resent > 0


def test_the_lease_of_an_agent_ends_before_the_head_says_so() -> None:
    for seed in range(20):
        wire = Wire(seed)
        wire.delay = wire.random.uniform(0.01, 1.0)
        wire.run(5)
        wire.run(wire.random.uniform(0, 3))
        wire.events.clear()
        wire.up = False
        wire.to_head.clear()
        wire.run(3 * LEASE)
        assert [type(event) for event in wire.events] == [SessionLost, AgentLeft], (
            "the agent first, then the head"
        )
        assert not wire.registry.agents


def test_an_agent_joins_again_after_its_lease() -> None:
    wire = Wire().joined()
    wire.up = False
    wire.run(2 * LEASE)
    assert {type(event) for event in wire.events} == {SessionLost, AgentLeft}
    wire.events.clear()
    wire.reconnect()
    wire.run(2.0)
    assert [type(event) for event in wire.events] == [Joined, Begun]


@pytest.mark.parametrize("ahead", [-5000.0, 0.0, 1e6])
def test_the_offset_of_the_clocks_is_measured(ahead: float) -> None:
    wire = Wire()
    wire.clock_ahead, wire.delay = ahead, 0.2
    wire.run(5 * LEASE)
    assert wire.member.joined
    assert wire.member.offset == pytest.approx(-ahead, abs=0.02)


def replies(effects: Iterator[Effect]) -> list[FromHead]:
    return [effect.message for effect in effects if isinstance(effect, Reply)]


@pytest.fixture
def registry() -> Registry:
    return Registry(7, LEASE, random.Random(1).randbytes)


def register(registry: Registry, peer: bytes, key: str = KEY) -> tuple[Register, bytes]:
    """Register a peer; return its registration and session."""
    (challenge,) = replies(registry.heard(peer, key, Knock(CLUSTER_VERSION, __version__), 0.0))
    assert isinstance(challenge, Challenge)
    message = Register(challenge.nonce, MACHINE)
    (welcome,) = replies(registry.heard(peer, key, message, 0.0))
    assert isinstance(welcome, AgentWelcome)
    return message, welcome.session


def refusal(effects: Iterator[Effect]) -> str:
    (refused,) = replies(effects)
    assert isinstance(refused, ClusterRefused)
    return refused.reason


def test_other_versions_are_refused_with_what_to_do(registry: Registry) -> None:
    for knock in (Knock(CLUSTER_VERSION + 1, __version__), Knock(CLUSTER_VERSION, "0.0.1")):
        (refused,) = replies(registry.heard(b"a", KEY, knock, 0.0))
        assert isinstance(refused, ClusterRefused)
        assert refused.reason == "version"
        assert "install the head's version" in refused.text
        with pytest.raises(JoinError, match="install the head's version"):
            list(Membership(MACHINE).heard(refused, 0.0))
    assert registry.refused["version"] == 2


def test_a_replayed_registration_is_refused_and_logged(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    message, _ = register(registry, b"a")
    assert refusal(registry.heard(b"b", KEY, message, 0.0)) == "challenge"
    replies(registry.heard(b"b", KEY, Knock(CLUSTER_VERSION, __version__), 0.0))
    assert refusal(registry.heard(b"b", KEY, message, 0.0)) == "challenge", (
        "the message of another connection"
    )
    assert refusal(registry.heard(b"a", KEY, message, 0.0)) == "unexpected"
    (challenge,) = replies(registry.heard(b"c", KEY, Knock(CLUSTER_VERSION, __version__), 0.0))
    assert isinstance(challenge, Challenge)
    assert refusal(registry.heard(b"c", KEY, Register(challenge.nonce, MACHINE), 60.0)) == "challenge"
    assert len(registry.agents) == 1
    assert "registration is old, repeated, or was not requested" in caplog.text


def test_a_session_is_resumed_only_with_its_key(registry: Registry) -> None:
    _, session = register(registry, b"a")
    assert refusal(registry.heard(b"b", "bb" * 32, Resume(session), 0.0)) == "session"
    assert refusal(registry.heard(b"b", KEY, Resume(bytes(16)), 0.0)) == "session"
    assert refusal(registry.heard(b"b", KEY, Packet(1, b"x"), 0.0)) == "connection"
    assert registry.is_registered(b"a")
    assert replies(registry.heard(b"b", KEY, Resume(session), 0.0)) == []
    assert registry.is_registered(b"b")
    assert not registry.is_registered(b"a")
    assert refusal(registry.heard(b"a", KEY, Packet(1, b"x"), 0.0)) == "connection"


def test_rates_are_bounded(registry: Registry) -> None:
    refused = [list(registry.charge(b"x", KEY, 10, 0.0)) for _ in range(2 * int(JOIN_BURST))]
    assert sum(map(bool, refused)) == int(JOIN_BURST)
    assert not list(registry.charge(b"x", KEY, 10, 1.0)), "it may try again after some time"
    register(registry, b"a", "cc" * 32)
    for _ in range(int(BURST)):
        assert not list(registry.charge(b"a", "cc" * 32, 10, 0.0))
    effects = list(registry.charge(b"a", "cc" * 32, 10, 0.0))
    assert [type(effect) for effect in effects] == [Reply, Reply, AgentLeft]
    assert not registry.agents


def test_all_machines_that_one_head_can_have_join_at_once_with_one_key(registry: Registry) -> None:
    """All machines of a head join at the same time with one key. After a restart of the head, each first
    sends the messages of its old session."""
    for number in range(MAX_AGENTS):
        peer = b"%d" % number
        for old in (Resume(bytes(16)), Alive(1, 1, 0.0, missing=True)):
            assert not list(registry.charge(peer, KEY, 50, 0.0))
            list(registry.heard(peer, KEY, old, 0.0))
    for number in range(MAX_AGENTS):
        assert not list(registry.charge(b"%d" % number, KEY, 50, 0.0))
    challenges = [
        replies(registry.heard(b"%d" % number, KEY, Knock(CLUSTER_VERSION, __version__), 0.0))
        for number in range(MAX_AGENTS)
    ]
    for number, (challenge,) in enumerate(challenges):
        assert isinstance(challenge, Challenge)
        assert not list(registry.charge(b"%d" % number, KEY, 50, 0.0))
        list(registry.heard(b"%d" % number, KEY, Register(challenge.nonce, MACHINE), 0.0))
    assert len(registry.agents) == MAX_AGENTS
    assert "rate" not in registry.refused


@pytest.mark.parametrize("alive", [Alive(0, 5, 0.0), Alive(0, 1, 0.0)])
def test_impossible_acknowledgements_end_the_session(registry: Registry, alive: Alive) -> None:
    register(registry, b"a")
    effects = list(registry.heard(b"a", KEY, alive, 0.0))
    assert [type(effect) for effect in effects] == [Reply, AgentLeft]


def test_what_is_kept_for_a_silent_side_is_bounded() -> None:
    session = PacketSession()
    for _ in range(MAX_KEPT):
        session.send(b"")
    with pytest.raises(SessionError, match="not acknowledged"):
        session.send(b"")


def test_a_head_of_an_earlier_epoch_is_not_obeyed() -> None:
    member = Membership(MACHINE)
    assert [type(m) for m in member.heard(Challenge(bytes(16), 9), 0.0)] == [Register]
    assert list(member.heard(Challenge(bytes(16), 8), 0.0)) == []
    assert [type(m) for m in member.heard(Challenge(bytes(16), 10), 0.0)] == [Register]
    assert list(member.heard(Challenge(bytes(16), 9), 0.0)) == []
