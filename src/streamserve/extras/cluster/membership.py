"""An agent's membership in a cluster, without I/O: how it joins a head, resumes, and when its lease ends.

    messages of the head, the clock ──▶ Membership ──▶ messages to send, Begun, Command, SessionLost

    knocking ── Challenge ──▶ registering ── Welcome ──▶ joined ── lease ends, session over ──▶ knocking

The lease counts from the time at which an answered Alive was *sent*: so it ends at the agent before it ends
at the head.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

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
    Register,
    Resume,
)

logger = logging.getLogger(__name__)

KNOCK_SECONDS = 3.0
"""Longer than the round trip of a slow link: another Knock makes the answer to the previous Knock useless."""
RESUME_SECONDS = 0.1
RENEWALS = 6
"""Number of renewals in the time of a lease."""
FASTEST_RENEWAL, SLOWEST_RENEWAL = 0.05, 1.0
LEAVING_SHARE, LEAVING_SECONDS = 0.25, 1.0
"""Time before the end of a lease in which workers leave their head: this share of the lease, and at most this
many seconds."""


@dataclass(frozen=True)
class Begun:
    """The agent has joined a head."""

    epoch: int


@dataclass(frozen=True)
class Command:
    """A command of the head, still encoded."""

    data: bytes


@dataclass(frozen=True)
class SessionLost:
    """The session is over, for a `reason`. By the time `until`, workers must have left the head, or ended.
    Blocks of other workers that they could write are used again a `lease` later."""

    reason: str
    until: float
    lease: float


class JoinError(Exception):
    """The head refuses this agent for good; the message says what to do."""


class Membership:
    """The membership of this `machine`. `expires` is when the lease ends, on this machine's clock. If workers
    `leave` their head instead of ending with it, the session ends some time before the lease."""

    def __init__(self, machine: Machine, leave: bool = False) -> None:
        self.machine = machine
        self._leave = leave
        self.expires = 0.0
        self.offset = 0.0
        """Difference of the head's clock and this machine's, from the quickest answer so far."""
        self.session: PacketSession | None = None
        self._quickest = float("inf")
        self._token = b""
        self._lease = 0.0
        self._epoch = self._highest_epoch = 0
        self._acted = self._resumed = float("-inf")
        self._refusal = ""

    @property
    def joined(self) -> bool:
        """Whether there is a session."""
        return self.session is not None

    def tick(self, now: float) -> Iterator[FromAgent | SessionLost]:
        """Yield what is due: a Knock or an Alive to send, or the end of the session with its lease."""
        if self.session is None:
            if now - self._acted >= KNOCK_SECONDS:
                self._acted = now
                yield Knock(CLUSTER_VERSION, __version__)
            return
        if now > self.expires - self._leaving_seconds:
            yield self._lose("the head has not answered, so the lease has ended")
        elif now - self._acted >= min(max(self._lease / RENEWALS, FASTEST_RENEWAL), SLOWEST_RENEWAL):
            yield self._alive(now)

    def heard(self, message: FromHead, now: float) -> Iterator[FromAgent | Begun | Command | SessionLost]:
        """Process a message of the head. Raises JoinError if the head refuses this agent for good."""
        match message:
            case Challenge() if self.session is None:
                if message.epoch < self._highest_epoch:
                    logger.warning(
                        "ignored a head of epoch %d: this machine knows a head of epoch %d",
                        message.epoch, self._highest_epoch,
                    )  # fmt: skip
                    return
                self._epoch = self._highest_epoch = message.epoch
                self._acted = now
                yield Register(message.nonce, self.machine)
            case AgentWelcome() if self.session is None:
                self._token, self._lease = message.session, message.lease
                # The lease began when the head processed the registration, which was sent after `_acted`.
                self.session, self.expires = PacketSession(), self._acted + message.lease
                self._quickest = float("inf")
                yield Begun(self._epoch)
                yield self._alive(now)
            case ClusterRefused():
                yield from self._refused(message, now)
            case Packet() if self.session:
                body = self.session.accept(message)
                if body is not None:
                    yield Command(body)
            case Alive() if self.session:
                yield from self._renewed(self.session, message, now)
            case _:
                logger.debug("ignored %s from the head", type(message).__name__)

    def reconnected(self, now: float) -> Iterator[FromAgent]:
        """Continue the session on a new connection."""
        self._resumed = now
        if self.session is None:
            self._acted = float("-inf")
            return
        yield Resume(self._token)
        yield self._alive(now, missing=True)

    def send(self, body: bytes) -> Iterator[FromAgent | SessionLost]:
        """Send a message to the head. It is dropped if there is no session."""
        if self.session is None:
            return
        try:
            yield self.session.send(body)
        except SessionError as error:
            yield self._lose(str(error))

    def _alive(self, now: float, missing: bool = False) -> Alive:
        assert self.session
        self._acted = now
        return Alive(self.session.sent, self.session.received, now, missing=missing)

    def _renewed(self, session: PacketSession, alive: Alive, now: float) -> Iterator[FromAgent | SessionLost]:
        try:
            again = session.answer(alive)
        except SessionError as error:
            yield self._lose(str(error))
            return
        if not alive.at <= now:
            return
        self.expires = max(self.expires, alive.at + self._lease)
        if now - alive.at < self._quickest:
            self._quickest = now - alive.at
            self.offset = alive.clock - (alive.at + now) / 2
        yield from again
        if session.lacks(alive):
            yield self._alive(now, missing=True)

    def _refused(self, refused: ClusterRefused, now: float) -> Iterator[FromAgent | SessionLost]:
        if refused.reason == "version":
            raise JoinError(f"the head refuses this machine: {refused.text}")
        if self.session is None:
            if refused.text != self._refusal:
                logger.warning("the head refuses this machine, which tries again: %s", refused.text)
            self._refusal = refused.text
        elif refused.reason == "connection":
            if now - self._resumed >= RESUME_SECONDS:
                yield from self.reconnected(now)
        elif refused.reason == "session":
            yield self._lose(refused.text)
        else:
            logger.warning("the head refused a message: %s", refused.text)

    @property
    def _leaving_seconds(self) -> float:
        return min(LEAVING_SHARE * self._lease, LEAVING_SECONDS) if self._leave else 0.0

    def _lose(self, reason: str) -> SessionLost:
        lost = SessionLost(reason, self.expires, self._lease)
        self.session, self._acted, self.expires = None, float("-inf"), 0.0
        return lost
