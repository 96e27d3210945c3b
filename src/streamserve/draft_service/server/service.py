"""A draft service without sockets: messages of targets go in, draft batches and answers come out.

receiver ── heard ──▶ in-queue ── batch ──▶ drafter ── drafted ──▶ out-queue ──▶ sender
                      (fair_batcher.py)     (sequence_store.py)    (messages)

Every method takes the current time. Calls from several threads must hold one common lock.
"""

from collections.abc import Callable, Sequence

from streamserve.draft_service.server.audit import Audit
from streamserve.draft_service.server.draft_loop import DraftLoop
from streamserve.draft_service.server.fair_batcher import FairBatcher
from streamserve.draft_service.server.memory import Memory
from streamserve.draft_service.server.rate_limits import RateLimiter
from streamserve.draft_service.server.refusals import Refusals
from streamserve.draft_service.server.sequence_store import SequenceStore
from streamserve.draft_service.server.session_table import SessionTable
from streamserve.draft_service.server.sessions import Session
from streamserve.draft_service.server.statistics import GAP, Statistics
from streamserve.draft_service.server.types import ServiceConfig, ServiceIdentity, TargetReply
from streamserve.draft_service.server.validation import delta_error, incompatibility
from streamserve.protocol.drafting import (
    Busy,
    Bye,
    Delta,
    DraftRequests,
    Hello,
    Lost,
    Ping,
    Pong,
    Reason,
    ToService,
    ToTarget,
    Unknown,
    Welcome,
    printable,
)


class Service:
    """One draft service: its sessions (`table`), its in-queue and drafting (`loop`), and its memory. `secret`
    generates channels, which must be unguessable. `cost` gives the seconds of a draft pass over a number of
    tokens until passes have been timed."""

    def __init__(
        self,
        identity: ServiceIdentity,
        config: ServiceConfig,
        secret: Callable[[], bytes],
        cost: Callable[[int, int], float] = lambda tokens, kv_tokens: 0.001 + tokens * 1e-5,
    ) -> None:
        self.identity = identity
        self.config = config
        self.memory = Memory(config.num_blocks, config.block_size)
        self.statistics = Statistics()
        self.rate_limiter = RateLimiter(config.limits)
        self.sequence_store = SequenceStore(
            self.memory, min(identity.max_model_len, config.num_blocks * config.block_size), config.max_read
        )
        self.batcher = FairBatcher(config, self.sequence_store, self.statistics, cost)
        audit = Audit()
        self.refusals = Refusals(self.statistics, audit, config.limits.retry)
        self.table = SessionTable(config, self.batcher, self.sequence_store, self.statistics, audit, secret)
        self.sessions = self.table.sessions
        self.loop = DraftLoop(self.table, self.batcher, self.sequence_store, self.statistics, self.refusals)

    def arrived(self, peer: bytes, size: int, now: float, key: str = "") -> list[TargetReply] | None:
        """Charge for a message of `size` bytes before it is decoded. Return None if it is to be decoded, else
        the messages to answer instead."""
        exceeded = self.rate_limiter.charge(key.encode() or peer, size, now)
        if exceeded is None:
            return None
        client = printable(key[:16]) or "a client"
        self.refusals.count(exceeded.reason, f"{size} bytes of {client}", now)
        return [TargetReply(peer, Busy(0, 0, exceeded.retry, exceeded.reason))] if exceeded.notify else []

    def heard(
        self, peer: bytes, message: ToService, now: float, key: str = "", name: str = ""
    ) -> list[TargetReply]:
        """Process a message from `peer`; return the immediate answers. With key authentication, `key` is the
        public key of the client and `name` the client's name."""
        if isinstance(message, Hello):
            return [TargetReply(peer, self._hello(peer, message, now, key, name))]
        session = self.sessions.get(message.tag)
        if session is None:
            return [TargetReply(peer, Unknown(message.tag))]
        if not (message.channel == session.channel and session.key == key):
            return self.refuse(peer, "channel", f"tag {message.tag} belongs to another target", now)
        session.peer, session.heard, session.disconnected = peer, now, False
        match message:
            case Bye():
                self.table.close(session, now, "the target left")
                return []
            case Ping(_, _, sent):
                return [TargetReply(peer, self._pong(session.tag, sent, now))]
            case DraftRequests():
                return [TargetReply(peer, answer) for answer in self._request_drafts(session, message, now)]

    def refuse(self, peer: bytes, reason: Reason, text: str, now: float) -> list[TargetReply]:
        """Refuse a message: count it and log it, with a limit on the log's rate."""
        return [self.refusals.refuse(peer, reason, text, now)]

    def tick(self, now: float) -> None:
        """Close sessions whose lease has expired. Must be called periodically."""
        self.table.expire(now)

    def _hello(self, peer: bytes, hello: Hello, now: float, key: str, name: str) -> ToTarget:
        if refusal := incompatibility(hello, self.identity):
            return self.refusals.refuse(peer, *refusal, now, hello.nonce).message
        label = name or printable(hello.name)
        opened = self.table.open(peer, hello, now, key, label)
        if isinstance(opened, Session):
            return self._welcome(opened, now)
        return self.refusals.turn_away(opened, f"target {label!r}", now, hello.nonce)

    def _welcome(self, session: Session, now: float) -> Welcome:
        return Welcome(
            nonce=session.nonce,
            tag=session.tag,
            channel=session.channel,
            model=self.identity.model,
            max_model_len=self.identity.max_model_len,
            lease=self.config.lease,
            max_bytes=self.config.limits.max_bytes,
            active=len(self.table.active(now)),
        )

    def _pong(self, tag: int, sent: float, now: float) -> Pong:
        seconds = self.statistics.batch_seconds.value
        return Pong(tag, sent, self.loop.backlog(), seconds, len(self.table.active(now)))

    def _rejection(self, session: Session, message: DraftRequests, now: float) -> Busy | None:
        """Return why a message is turned away before any work is done for it; None if it is accepted."""
        if reason := self.table.admission.exceeded_limit(session, message, self.sessions.values()):
            return self.refusals.wait(session, reason, now)
        if message.deltas and now < session.blocked_until:
            return self.refusals.wait(session, "drafting", now, session.blocked_until - now)
        if message.deltas and not self.table.admitted(session, now):
            return self.refusals.wait(session, "targets", now)
        return None

    def _request_drafts(self, session: Session, message: DraftRequests, now: float) -> list[ToTarget]:
        self.table.forget(session, message.released)
        if busy := self._rejection(session, message, now):
            return [busy]
        if not message.deltas:
            return []
        if not any(delta.depth for delta in message.deltas):  # nothing but prompts to read ahead
            answers = self._apply(session, message.deltas, now)
            self._enqueue(session, now)
            return answers
        session.requests += 1
        if session.away_since is not None:
            self.statistics.returned(now - session.away_since, message.verify, message.plain)
            if 0.0 < message.plain < GAP:
                session.plain.add(message.plain)
            session.away_since = None
        reading = not session.wants_trees
        answers = self._apply(session, message.deltas, now)
        self._enqueue(session, now)
        if session.requested_at is not None:
            session.requested_at = now if reading else session.requested_at
            session.deadline = None if message.need is None else now + message.need
        return answers

    def _enqueue(self, session: Session, now: float) -> None:
        if session.waiting() and session.requested_at is None:
            self.batcher.enqueue(session, now)

    def _apply(self, session: Session, deltas: Sequence[Delta], now: float) -> list[ToTarget]:
        """Apply the deltas up to the first that is refused; return the answers that need no drafting."""
        lost, again = [], []
        answers: list[ToTarget] = []
        for delta in deltas:
            if refusal := delta_error(delta, session, self.identity, self.config.limits):
                answers.append(self.refusals.refuse(session.peer, "size", refusal, now).message)
                break
            if not self.table.storage.free_space(session, delta):
                answers.append(self.refusals.wait(session, "memory", now))
                break
            verified = self.sequence_store.apply(session, delta, now)
            if verified is None:
                lost.append(delta.sequence)
                continue
            self._verified(session, *verified)
            known = session.sequences[delta.sequence]
            known.due = None if delta.need is None else now + delta.need
            self.table.storage.recount(session, known)
            if known.number == delta.number and known.answer:
                again.append(known.answer)
        if lost:
            answers.append(Lost(session.tag, lost))
        if again:
            answers.append(self.loop.drafts(session.tag, again))
        return answers

    def _verified(self, session: Session, accepted: int, tested: int) -> None:
        self.statistics.verified(accepted, tested)
        session.accepted += accepted
        session.tested += tested
