"""The agents that have joined a head, without I/O: registrations, sessions and leases.

    messages of peers, the clock ──▶ Registry ──▶ Reply, Joined, Body, AgentLeft

    unknown ── Knock ──▶ challenged ── Register ──▶ joined ── lease ends, misbehaves ──▶ left
                                          Resume ──▶   ▲ (from another connection, with the same key)

A peer is one connection; CURVE has checked its key before its first message. A registration is valid once, on
the connection to which its challenge was sent.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streamserve import __version__
from streamserve.extras.cluster.session import PacketSession, SessionError
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
    Reason,
    Register,
    Resume,
)
from streamserve.protocol.numbers import plain
from streamserve.system.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

CHALLENGE_SECONDS = 10.0
MAX_CHALLENGES = 256
MAX_AGENTS = 256
JOIN_RATE, JOIN_BURST = 100.0, 1200.0
"""Messages per second of all unregistered peers with one key, and in a burst. All machines may have the same
key: after a restart of the head, MAX_AGENTS of them come back at once, each with messages of its old session,
then two to join."""
RATE, BURST = 20_000.0, 40_000.0
"""Messages per second of an agent, and in a burst."""
BYTE_RATE, BYTE_BURST = float(256 << 20), float(512 << 20)
"""Bytes per second of an agent, and in a burst."""


@dataclass(eq=False)
class RegisteredAgent:
    """An agent that joined at `joined_at`. `peer` is its present connection. It was last heard at
    `seen_at`."""

    token: bytes
    key: str
    machine: Machine
    peer: bytes
    seen_at: float
    joined_at: float = 0.0
    kept: list[str] = field(default_factory=list)
    """Workers of another head that the agent has kept, and that were not started for this head yet."""
    session: PacketSession = field(default_factory=PacketSession)
    messages: TokenBucket = field(default_factory=lambda: TokenBucket(RATE, BURST))
    size: TokenBucket = field(default_factory=lambda: TokenBucket(BYTE_RATE, BYTE_BURST))

    @property
    def name(self) -> str:
        return self.machine.name


@dataclass(frozen=True)
class Reply:
    """Send a message to a peer."""

    peer: bytes
    message: FromHead


@dataclass(frozen=True)
class Joined:
    """An agent has joined."""

    agent: RegisteredAgent


@dataclass(frozen=True)
class Body:
    """A message of an agent, still encoded."""

    agent: RegisteredAgent
    data: bytes


@dataclass(frozen=True)
class AgentLeft:
    """An agent's session is over. Its workers may still run until its lease and the grace period have
    passed."""

    agent: RegisteredAgent
    reason: str


Effect = Reply | Joined | Body | AgentLeft


class Registry:
    """The agents of the head with this `epoch`. Each has a lease of `lease` seconds. `tokens` returns
    unpredictable bytes."""

    def __init__(self, epoch: int, lease: float, tokens: Callable[[int], bytes]) -> None:
        self.epoch, self.lease = epoch, lease
        self.agents: dict[bytes, RegisteredAgent] = {}
        """The agents by session."""
        self.refused: dict[Reason, int] = {}
        self.challenged = 0
        self._tokens = tokens
        self._by_peer: dict[bytes, RegisteredAgent] = {}
        self._challenges: dict[bytes, tuple[bytes, float]] = {}
        self._buckets: dict[str, TokenBucket] = {}

    def is_registered(self, peer: bytes) -> bool:
        """Return whether a peer is a registered agent."""
        return peer in self._by_peer

    def charge(self, peer: bytes, key: str, size: int, now: float) -> Iterator[Effect]:
        """Charge a peer's rate limits for a message of `size` bytes before it is decoded. If this yields any
        effect, the message is refused."""
        agent = self._by_peer.get(peer)
        if agent is None:
            bucket = self._buckets.setdefault(key, TokenBucket(JOIN_RATE, JOIN_BURST))
            if not bucket.spend(1, now):
                yield self.refuse(peer, "rate", f"at most {JOIN_RATE:g} messages a second before joining")
        elif not (agent.messages.spend(1, now) and agent.size.spend(size, now)):
            yield self.refuse(
                peer, "rate", f"at most {plain(RATE)} messages and {plain(BYTE_RATE)} bytes a second"
            )
            yield from self.end(agent, "it sent too much")

    def unreadable(self, peer: bytes, reason: Reason, text: str) -> Iterator[Effect]:
        """Refuse a message that cannot be decoded. If an agent sent it, the agent's session is ended."""
        yield self.refuse(peer, reason, text)
        if agent := self._by_peer.get(peer):
            yield from self.end(agent, text)

    def heard(self, peer: bytes, key: str, message: FromAgent, now: float) -> Iterator[Effect]:
        """Process a message of a peer with this public key."""
        agent = self._by_peer.get(peer)
        match message:
            case Knock():
                yield self._challenge(peer, message, now)
            case Register() if agent is None:
                yield from self._register(peer, key, message, now)
            case Resume():
                yield from self._resume(peer, key, message, now)
            case Packet() | Alive() if agent is None:
                yield Reply(peer, ClusterRefused("connection", "this connection has no session: join first"))
            case Packet() if agent:
                body = agent.session.accept(message)
                if body is not None:
                    yield Body(agent, body)
            case Alive() if agent:
                yield from self._alive(agent, message, now)
            case _:
                yield self.refuse(peer, "unexpected", "this connection already has a session")

    def send(self, agent: RegisteredAgent, body: bytes) -> Iterator[Effect]:
        if agent.token not in self.agents:
            return
        try:
            yield Reply(agent.peer, agent.session.send(body))
        except SessionError as error:
            yield from self.end(agent, str(error))

    def tick(self, now: float) -> Iterator[Effect]:
        """End the sessions whose leases have ended."""
        for agent in list(self.agents.values()):
            if now - agent.seen_at > self.lease:
                yield from self.end(agent, f"no message from its machine for {self.lease:g} s")
        self._challenges = {p: c for p, c in self._challenges.items() if now - c[1] < CHALLENGE_SECONDS}

    def end(self, agent: RegisteredAgent, reason: str) -> Iterator[Effect]:
        """End an agent's session."""
        if self.agents.pop(agent.token, None) is not None:
            self._by_peer.pop(agent.peer, None)
            yield Reply(agent.peer, ClusterRefused("session", reason))
            yield AgentLeft(agent, reason)

    def refuse(self, peer: bytes, reason: Reason, text: str) -> Reply:
        """Count, log and return a refusal."""
        self.refused[reason] = self.refused.get(reason, 0) + 1
        logger.warning("refused a machine that wants to join: %s", text)
        return Reply(peer, ClusterRefused(reason, text))

    def _challenge(self, peer: bytes, knock: Knock, now: float) -> Effect:
        if knock.version != CLUSTER_VERSION or knock.release != __version__:
            return self.refuse(
                peer,
                "version",
                f"it runs streamserve {knock.release[:32]!r} (protocol {knock.version}), but the head runs "
                f"{__version__} (protocol {CLUSTER_VERSION}): install the head's version on that machine",
            )
        while len(self._challenges) >= MAX_CHALLENGES:
            del self._challenges[next(iter(self._challenges))]
        nonce = self._tokens(16)
        self.challenged += 1
        self._challenges[peer] = nonce, now
        return Reply(peer, Challenge(nonce, self.epoch))

    def _register(self, peer: bytes, key: str, message: Register, now: float) -> Iterator[Effect]:
        nonce, asked = self._challenges.pop(peer, (b"", 0.0))
        if nonce != message.nonce or now - asked > CHALLENGE_SECONDS:
            yield self.refuse(peer, "challenge", "its registration is old, repeated, or was not requested")
            return
        if len(self.agents) >= MAX_AGENTS:
            yield self.refuse(peer, "rate", f"at most {MAX_AGENTS} machines can join")
            return
        agent = RegisteredAgent(
            self._tokens(16), key, message.machine, peer, now, now, list(message.machine.kept)
        )
        self.agents[agent.token] = self._by_peer[peer] = agent
        yield Reply(peer, AgentWelcome(agent.token, self.lease))
        yield Joined(agent)

    def _resume(self, peer: bytes, key: str, message: Resume, now: float) -> Iterator[Effect]:
        agent = self.agents.get(message.session)
        if agent is None or agent.key != key:
            yield self.refuse(peer, "session", "its session has ended")
            return
        self._by_peer.pop(agent.peer, None)
        agent.peer = peer
        agent.seen_at = now
        self._by_peer[peer] = agent

    def _alive(self, agent: RegisteredAgent, alive: Alive, now: float) -> Iterator[Effect]:
        session = agent.session
        try:
            again = session.answer(alive)
        except SessionError as error:
            yield from self.end(agent, str(error))
            return
        agent.seen_at = now
        yield from (Reply(agent.peer, packet) for packet in again)
        missing = session.lacks(alive)
        yield Reply(agent.peer, Alive(session.sent, session.received, alive.at, now, missing))
