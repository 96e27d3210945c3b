"""A target's link to one draft service: handshake and timeouts."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamserve.draft_service.target.answers import Flood, Reputation
from streamserve.draft_service.target.measures import AcceptanceRate, AnswerTimes
from streamserve.protocol.drafting import (
    DRAFT_VERSION,
    Busy,
    Bye,
    DraftRequests,
    Drafts,
    Hello,
    Lost,
    Ping,
    Pong,
    Refused,
    ToService,
    ToTarget,
    Unknown,
    Welcome,
    printable,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds between two Hellos."""
RESEND_SECONDS = 0.1
"""Seconds to the next Hello if the last could not be sent."""
ABSENT_SECONDS = 1.0
"""Seconds after which an unanswered Hello is logged."""
REFUSED_SECONDS = 30.0
"""Seconds after which even a service that refused is tried again: it may have been replaced."""
SILENCE_SECONDS = 3.0
"""Seconds without an answer after which a service counts as gone."""
PINGS = 16
"""Maximum number of Pings in flight."""


@dataclass(frozen=True)
class ServiceMessage:
    """A message to the service of link number `link`."""

    link: int
    message: ToService


@dataclass
class Absence:
    """Whether the service at `address` answers Hellos; its absence and its return are logged once each."""

    address: str
    hello_since: float | None = None
    """When the first of the Hellos that are still unanswered was sent."""
    logged: bool = False

    def check(self, now: float) -> None:
        """Log that the service does not answer Hellos, if that is so."""
        if self.hello_since is not None and now - self.hello_since >= ABSENT_SECONDS:
            self.log("does not answer")

    def said_hello(self, now: float) -> None:
        """Record that a Hello was sent."""
        if self.hello_since is None:
            self.hello_since = now

    def log(self, how: str) -> None:
        """Log once that the service is absent."""
        if not self.logged:
            self.logged = True
            logger.warning(
                "the draft service at %s %s: continuing without it until it answers", self.address, how
            )

    def end(self) -> None:
        """Record that the service answered a Hello in any way."""
        if self.logged:
            logger.warning("the draft service at %s answers again", self.address)
        self.hello_since, self.logged = None, False


@dataclass
class ServiceLink:
    """A session with a service, or the attempt to open one. `address` is for the log."""

    number: int
    address: str
    name: str
    tokenizer: str
    vocabulary: str
    ping: float
    models: tuple[str, ...] = ()
    nonce: int = 0
    tag: int = 0
    channel: bytes = b""
    model: str = ""
    max_model_len: int = 0
    retry_at: float = 0.0
    busy_until: float = 0.0
    pinged: float = float("-inf")
    unanswered: float | None = None
    active: int = 0
    sessions: int = 0
    refusal: str = ""
    max_bytes: int = 0
    """The service's limit of one message, in bytes."""
    opened: float = 0.0
    """When the session began."""
    had_trees: bool = False
    """Whether trees have arrived in this session."""
    reputation: Reputation = field(default_factory=Reputation)
    flood: Flood = field(default_factory=Flood)
    times: AnswerTimes = field(default_factory=AnswerTimes)
    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    absence: Absence = field(init=False)
    _logged: tuple[str, float] = ("", float("-inf"))
    _pings: deque[float] = field(default_factory=lambda: deque(maxlen=PINGS))
    _to_release: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.absence = Absence(self.address)

    @property
    def open(self) -> bool:
        return bool(self.tag)

    def usable(self, now: float) -> bool:
        """Return whether trees may be requested from the service."""
        return self.open and now >= self.busy_until

    def on_probation(self, now: float) -> bool:
        """Return whether the service must not be contacted because of its wrong answers."""
        return now < self.reputation.until

    def punish(self, now: float, fault: str, certain: bool) -> bool:
        """Record a wrong answer; return whether the service is on probation from now on."""
        if self.on_probation(now) or not self.reputation.strike(now, certain):
            return False
        logger.warning(
            "the draft service at %s sent a wrong answer (%s): it is not used for %.0f s",
            self.address, printable(fault, 120), self.reputation.until - now,
        )  # fmt: skip
        self._close(now)
        self.retry_at = self.reputation.until
        return True

    def answers_ping(self, message: Pong) -> bool:
        """Return whether a Pong answers a Ping that was sent in this session."""
        return message.tag != self.tag or message.sent in self._pings

    def fail(self, now: float) -> None:
        """Record that the service cannot be reached."""
        if self.open:
            self._close(now)
            self.absence.log("is gone")
        self.retry_at = now + RESEND_SECONDS

    def tick(self, now: float) -> list[ServiceMessage]:
        """Return the messages that are due: without a session a Hello; in a session a Ping, and the sequences
        to forget."""
        if self.open and self.unanswered is not None and now - self.unanswered > SILENCE_SECONDS:
            self._close(now)
            self.absence.log("stopped answering")
        if not self.open:
            return self._hello(now)
        outs = []
        if self._to_release:
            released, self._to_release = self._to_release, []
            outs.append(
                self.send(
                    DraftRequests(tag=self.tag, channel=self.channel, deltas=[], released=released),
                    now,
                    False,
                )
            )
        if now - self.pinged >= self.ping:
            self.pinged = now
            self._pings.append(now)
            outs.append(self.send(Ping(self.tag, self.channel, now), now))
        return outs

    def _hello(self, now: float) -> list[ServiceMessage]:
        """Return a Hello if one is due."""
        self.absence.check(now)
        if now < self.retry_at:
            return []
        self.absence.said_hello(now)
        self.nonce += 1
        self.retry_at = now + RETRY_SECONDS
        return [ServiceMessage(self.number, Hello(
            version=DRAFT_VERSION, tokenizer=self.tokenizer, vocabulary=self.vocabulary, name=self.name,
            nonce=self.nonce,
        ))]  # fmt: skip

    def send(self, message: ToService, now: float, answered: bool = True) -> ServiceMessage:
        """Address a message to this link's service, and return it for the caller to send. If `answered`, the
        wait for an answer begins now, unless an earlier message is still unanswered."""
        if answered and self.unanswered is None:
            self.unanswered = now
        return ServiceMessage(self.number, message)

    def heard(self, message: ToTarget, now: float) -> bool:
        """Process a message of the service; return False if it is about another session."""
        match message:
            case Welcome():
                return self._welcome(message, now)
            case Refused():
                if message.nonce in (0, self.nonce):
                    self._refused(message, now)
                return True
            case Busy(nonce, tag, retry):
                return self._busy(nonce, tag, min(max(retry, 0.0), REFUSED_SECONDS), now)
            case Unknown(tag):
                if tag == self.tag:
                    self._close(now)
                return True
            case Drafts() | Lost() | Pong():
                if message.tag != self.tag:
                    return False
                self.unanswered = None
                if isinstance(message, Pong):
                    self.active = message.active
                    self.times.ponged(message, now)
                return True

    def answered(self, seconds: float, drafts: Drafts) -> None:
        """Record that trees arrived `seconds` after their request."""
        self.had_trees = True
        self.times.answered(seconds, drafts)

    def abandon(self, sequences: Sequence[int]) -> None:
        """Leave the session open, but let the service forget these sequences."""
        self._to_release += sequences

    def resume(self, sequence: int) -> None:
        """Use the service for a sequence again: do not send its name among the sequences to forget."""
        if sequence in self._to_release:
            self._to_release.remove(sequence)

    def close(self, now: float) -> list[ServiceMessage]:
        """End the session."""
        if not self.open:
            return []
        out = ServiceMessage(self.number, Bye(self.tag, self.channel))
        self._close(now)
        return [out]

    def _welcome(self, welcome: Welcome, now: float) -> bool:
        if welcome.nonce != self.nonce or self.open or self.on_probation(now):
            return False
        self.absence.end()
        if self.models and welcome.model not in self.models:
            self.refusal = f"its draft model {printable(welcome.model)} is not one of the allowed models"
            logger.error("the draft service at %s: %s", self.address, self.refusal)
            self.retry_at = now + REFUSED_SECONDS
            return False
        if welcome.model != self.model:
            logger.info("the draft service at %s has model %s", self.address, printable(welcome.model))
            self.acceptance.clear()
        self.opened, self.had_trees = now, False
        self.max_bytes = welcome.max_bytes
        self._pings.clear()
        self.tag, self.channel, self.model = welcome.tag, welcome.channel, welcome.model
        self.max_model_len = welcome.max_model_len
        self.active, self.refusal, self.unanswered = welcome.active, "", None
        self.busy_until, self.sessions = 0.0, self.sessions + 1
        self._to_release = []
        return True

    def _refused(self, message: Refused, now: float) -> None:
        self.absence.end()
        self.refusal = printable(f"{message.reason}: {message.text}", 200)
        if self.refusal != self._logged[0] or now - self._logged[1] >= REFUSED_SECONDS:
            self._logged = self.refusal, now
            logger.error("the draft service at %s refuses: %s", self.address, self.refusal)
        self._close(now)
        permanent = message.reason in ("version", "tokenizer", "vocabulary", "key")
        self.retry_at = now + (REFUSED_SECONDS if permanent else RETRY_SECONDS)

    def _busy(self, nonce: int, tag: int, retry: float, now: float) -> bool:
        if tag == self.tag and not nonce:  # both are 0 if the message was not decoded
            self.unanswered = None
            self.busy_until = self.retry_at = now + retry
        elif self.open and not (tag or nonce):
            self.busy_until = now + retry
        elif nonce == self.nonce:
            self.absence.end()
            self.retry_at = now + retry
        return True

    def _close(self, now: float) -> None:
        short = not self.had_trees and now - self.opened < RETRY_SECONDS
        self.tag, self.channel, self.unanswered = 0, b"", None
        # After a session without any tree, wait before the next one: each session syncs all sequences from
        # the beginning.
        self.retry_at = now + RETRY_SECONDS if short else now
