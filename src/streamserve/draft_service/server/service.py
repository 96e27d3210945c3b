"""A draft service without sockets: messages of targets go in, draft batches and answers come out.

receiver ── heard ──▶ in-queue ── batch ──▶ drafter ── drafted ──▶ out-queue ──▶ sender
                      (fair_batcher.py)     (sequence_store.py)    (messages)

Every method takes the current time. Calls from several threads must hold one common lock.
"""

from collections.abc import Callable, Mapping

from streamserve.draft_service.server.accounts import Account, Accounts
from streamserve.draft_service.server.admission import Admission, session_to_close
from streamserve.draft_service.server.audit import Audit
from streamserve.draft_service.server.fair_batcher import FairBatcher
from streamserve.draft_service.server.memory import Memory
from streamserve.draft_service.server.rate_limits import RateLimiter
from streamserve.draft_service.server.sequence_store import SequenceStore
from streamserve.draft_service.server.sessions import DraftedSequence, Session
from streamserve.draft_service.server.statistics import GAP, Statistics
from streamserve.draft_service.server.storage import StorageLimiter
from streamserve.draft_service.server.types import Batch, DraftReply, Identity, Out, ServiceConfig
from streamserve.draft_service.server.validation import delta_error, incompatibility
from streamserve.engine.plan import DraftRequest
from streamserve.protocol.drafting import (
    Busy,
    Bye,
    DraftRequests,
    Drafts,
    Hello,
    Lost,
    Ping,
    Pong,
    Reason,
    Refused,
    ToService,
    ToTarget,
    Unknown,
    Welcome,
    printable,
)
from streamserve.speculation.tree import TokenTree

RECONNECT_SECONDS = 3.0
"""Seconds after the end of its connection in which a target may reconnect before its session ends."""

IDLE_CHECK_SECONDS = 0.5
MIN_PAUSE_SECONDS = 0.0005
"""Lower bound of a pause, in seconds, also when a pass is due but no KV block is free for it."""


class Service:
    """The sessions of one draft service, its in-queue and its memory. `secret` generates channels, which must
    be unguessable. `cost` gives the seconds of a draft pass over a number of tokens until passes have been
    timed."""

    def __init__(
        self,
        identity: Identity,
        config: ServiceConfig,
        secret: Callable[[], bytes],
        cost: Callable[[int, int], float] = lambda tokens, kv_tokens: 0.001 + tokens * 1e-5,
    ) -> None:
        self.identity = identity
        self.config = config
        self.memory = Memory(config.num_blocks, config.block_size)
        self.statistics = Statistics()
        self.sessions: dict[int, Session] = {}
        self.accounts = Accounts()
        self.rate_limiter = RateLimiter(config.limits)
        self.storage = StorageLimiter(config.limits.storage_bytes, self.sessions, self._drop)
        self.admission = Admission(config.limits)
        self.audit = Audit()
        self.sequence_store = SequenceStore(
            self.memory, min(identity.max_model_len, config.num_blocks * config.block_size), config.max_read
        )
        self.batcher = FairBatcher(config, self.sequence_store, self.statistics, cost)
        self._secret = secret

    # Receiving

    def arrived(self, peer: bytes, size: int, now: float, key: str = "") -> list[Out] | None:
        """Charge for a message of `size` bytes before it is decoded. Return None if it is to be decoded, else
        the messages to answer instead."""
        exceeded = self.rate_limiter.charge(key.encode() or peer, size, now)
        if exceeded is None:
            return None
        self._count(exceeded.reason, f"{size} bytes of {printable(key[:16]) or 'a client'}", now)
        return [Out(peer, Busy(0, 0, exceeded.retry, exceeded.reason))] if exceeded.notify else []

    def heard(self, peer: bytes, message: ToService, now: float, key: str = "", name: str = "") -> list[Out]:
        """Process a message from `peer`; return the immediate answers. With key authentication, `key` is the
        public key of the client and `name` the client's name."""
        if isinstance(message, Hello):
            return [Out(peer, self._hello(peer, message, now, key, name))]
        session = self.sessions.get(message.tag)
        if session is None:
            return [Out(peer, Unknown(message.tag))]
        if not (message.channel == session.channel and session.key == key):
            return self.refuse(peer, "channel", f"tag {message.tag} belongs to another target", now)
        session.peer, session.heard, session.disconnected = peer, now, False
        match message:
            case Bye():
                self._close(session, now, "the target left")
                return []
            case Ping(_, _, sent):
                return [Out(peer, self._pong(session.tag, sent, now))]
            case DraftRequests():
                return [Out(peer, answer) for answer in self._request_drafts(session, message, now)]

    def refuse(self, peer: bytes, reason: Reason, text: str, now: float, nonce: int = 0) -> list[Out]:
        """Refuse a message: count it and log it, with a limit on the log's rate."""
        self._count(reason, text, now)
        return [Out(peer, Refused(nonce, reason, text))]

    def _count(self, reason: Reason, text: str, now: float) -> None:
        counts = self.statistics.counters.refused
        counts[reason] = counts.get(reason, 0) + 1
        self.audit.refused(reason, text, now)

    def _wait(self, session: Session, reason: Reason, now: float, retry: float = 0.0) -> Busy:
        """Count a message of a session as turned away; return the answer that asks to retry later."""
        self._count(reason, f"session {session.tag}, target {session.name!r}", now)
        return Busy(0, session.tag, retry or self.config.limits.retry, reason)

    def tick(self, now: float) -> list[Out]:
        """Close sessions whose lease has expired. Must be called periodically."""
        for session in list(self.sessions.values()):
            if now - session.heard > self.config.lease:
                self._close(
                    session, now, "its connection ended" if session.disconnected else "its lease expired"
                )
        return []

    def disconnected(self, peer: bytes, now: float) -> None:
        """Record that the connection of `peer` has ended. Its session ends after `RECONNECT_SECONDS`
        unless it is heard again."""
        for session in self.sessions.values():
            if session.peer == peer:
                session.disconnected = True
                session.heard = min(session.heard, now - self.config.lease + RECONNECT_SECONDS)

    def active(self, now: float) -> list[Session]:
        """Return the sessions that were drafted for recently or wait for a draft."""
        return [session for session in self.sessions.values() if self.admission.active(session, now)]

    def _hello(self, peer: bytes, hello: Hello, now: float, key: str, name: str) -> ToTarget:
        if refusal := incompatibility(hello, self.identity):
            return self.refuse(peer, *refusal, now, hello.nonce)[0].message
        previous = self._previous(peer, key)
        if previous is not None and previous.nonce == hello.nonce:
            return self._welcome(previous, now)  # a repeated Hello
        if previous is not None:
            self._close(previous, now, "its target sent another Hello")
        label = name or printable(hello.name)
        if reason := self._full(key, now):
            self._count(reason, f"target {label!r}", now)
            return Busy(hello.nonce, 0, self.config.limits.retry, reason)
        session = Session(
            # Random, not counted: a target that outlived a restart of this service would take another
            # target's tag for its own.
            tag=int.from_bytes(self._secret()[:6], "little") | 1,
            channel=self._secret(),
            peer=peer,
            key=key,
            name=label,
            account=self.accounts.open(key, self.config.shares.get(label, 1.0)),
            opened=now,
            heard=now,
            nonce=hello.nonce,
        )
        self.sessions[session.tag] = session
        self.audit.opened(session)
        return self._welcome(session, now)

    def _previous(self, peer: bytes, key: str) -> Session | None:
        """Return the session that a connection already has: it may have one only."""
        return next((s for s in self.sessions.values() if s.peer == peer and s.key == key), None)

    def _full(self, key: str, now: float) -> Reason | None:
        """Return why another target with `key` cannot have a session, or None. At the limit of sessions, the
        account with the most sessions has one closed for it."""
        account = self.accounts.of(key) or Account(key)
        if self.admission.ahead(account, self.active(now), None) >= self.n_max():
            return "targets"
        if len(self.sessions) >= self.config.limits.max_sessions:
            victim = session_to_close(self.sessions.values(), account.sessions)
            if victim is None:
                return "sessions"
            self._close(victim, now, "another client has no session")
        return None

    def _welcome(self, session: Session, now: float) -> Welcome:
        return Welcome(
            nonce=session.nonce,
            tag=session.tag,
            channel=session.channel,
            model=self.identity.model,
            max_model_len=self.identity.max_model_len,
            lease=self.config.lease,
            max_bytes=self.config.limits.max_bytes,
            active=len(self.active(now)),
        )

    def _pong(self, tag: int, sent: float, now: float) -> Pong:
        return Pong(tag, sent, self.backlog(), self.statistics.batch_seconds.value, len(self.active(now)))

    def backlog(self) -> float:
        """Return the seconds of queued draft work."""
        return self.batcher.backlog(self.sessions.values())

    def n_max(self) -> int:
        """Return the present N_max."""
        return self.admission.n_max(self.statistics, self.batcher.capacity())

    def _admitted(self, session: Session, now: float) -> bool:
        """Return whether a session is among the N_max targets; new ones rank last."""
        new = not self.admission.active(session, now)
        ahead = self.admission.ahead(session.account, self.active(now), None if new else session)
        return ahead < self.n_max()

    def _rejection(self, session: Session, message: DraftRequests, now: float) -> Busy | None:
        """Return the refusal of a message, before any work is done for it, or None."""
        if reason := self.admission.exceeded_limit(session, message, self.sessions.values()):
            return self._wait(session, reason, now)
        if message.deltas and now < session.blocked_until:
            return self._wait(session, "drafting", now, session.blocked_until - now)
        if message.deltas and not self._admitted(session, now):
            return self._wait(session, "targets", now)
        return None

    def _request_drafts(self, session: Session, message: DraftRequests, now: float) -> list[ToTarget]:
        self._forget(session, message.released)
        if busy := self._rejection(session, message, now):
            return [busy]
        if not message.deltas:
            return []
        session.requests += 1
        if session.away_since is not None:
            self.statistics.returned(now - session.away_since, message.verify, message.plain)
            session.away_since = None
        lost, again = [], []
        answers: list[ToTarget] = []
        for delta in message.deltas:
            if refusal := delta_error(delta, session, self.identity, self.config.limits):
                answers += [out.message for out in self.refuse(session.peer, "size", refusal, now)]
                break
            if not self.storage.free_space(session, delta):
                answers.append(self._wait(session, "memory", now))
                break
            verified = self.sequence_store.take(session, delta, now)
            if verified is None:
                lost.append(delta.sequence)
                continue
            self._verified(session, *verified)
            known = session.sequences[delta.sequence]
            self.storage.recount(session, known)
            if known.number == delta.number and known.answer:
                again.append(known.answer)
        if lost:
            answers.append(Lost(session.tag, lost))
        if again:
            answers.append(
                Drafts(tag=session.tag, drafts=again, waited=0.0, seconds=0.0, queue=self.backlog())
            )
        if session.waiting() and session.requested_at is None:
            self.batcher.enqueue(session, now)
        if session.requested_at is not None:
            session.deadline = None if message.need is None else now + message.need
        return answers

    def _verified(self, session: Session, accepted: int, tested: int) -> None:
        self.statistics.verified(accepted, tested)
        session.accepted += accepted
        session.tested += tested

    # Drafting

    def take_released(self) -> list[int]:
        """Return the sequences that the drafter may forget, when no batch follows."""
        return self.sequence_store.take_released()

    def batch(self, now: float) -> Batch | None:
        """Return the next batch to draft; None if nothing waits. No other batch may be running."""
        return self.batcher.batch(self.sessions, now)

    def drafted(self, done: Batch, trees: Mapping[int, TokenTree], now: float) -> list[Out]:
        """Process the trees of a finished batch; return the answers to its targets."""
        return self._answers(self.batcher.drafted(done, trees, now), now)

    def failed(self, done: Batch, now: float) -> list[Out]:
        """Process the failure of a batch. Each of its sessions is retried alone. A session whose own batch
        fails as well receives Busy."""
        answers = self._answers(self.batcher.failed(done, now), now)
        blocked = [session for session, _ in done.members if session.blocked_until > now]
        for session in blocked:
            if session.tag in self.sessions:
                busy = self._wait(session, "drafting", now, session.blocked_until - now)
                answers.append(Out(session.peer, busy))
        return answers

    def warm_up(self, now: float) -> DraftRequest | None:
        """Return a dummy pass if one is due, else None. `warmed` must be called when it is done."""
        due = self.batcher.keep_warm_controller.due(now)
        return self.sequence_store.dummy_pass() if due is not None and due < MIN_PAUSE_SECONDS else None

    def warmed(self, request: DraftRequest, now: float) -> None:
        """Record that a dummy pass is done."""
        self.sequence_store.release_dummy_pass(request)
        self.batcher.keep_warm_controller.warmed(now)

    def pause(self, now: float) -> float:
        """Return the seconds after which to check again, if no request arrives before."""
        due = self.batcher.keep_warm_controller.due(now)
        return IDLE_CHECK_SECONDS if due is None else max(due, MIN_PAUSE_SECONDS)

    def _answers(self, answers: list[DraftReply], now: float) -> list[Out]:
        return [self._answer(reply, now) for reply in answers if reply.session.tag in self.sessions]

    def _answer(self, answer: DraftReply, now: float) -> Out:
        session, counters = answer.session, self.statistics.counters
        session.trees += len(answer.drafts)
        for draft in answer.drafts:
            if known := session.sequences.get(draft.sequence):
                self.storage.recount(session, known)
        counters.trees += len(answer.drafts)
        if session.served is not None and now - session.served < GAP:
            counters.rounds += 1
            counters.round_seconds += now - session.served
        session.served = session.away_since = now
        return Out(
            session.peer,
            Drafts(
                tag=session.tag,
                drafts=answer.drafts,
                waited=answer.waited,
                seconds=answer.seconds,
                queue=self.backlog(),
            ),
        )

    # Removal

    def _forget(self, session: Session, names: list[int]) -> None:
        for name in names:
            if sequence := session.sequences.get(name):
                self._drop(session, sequence)
        self._dequeue_if_idle(session)

    def _drop(self, session: Session, sequence: DraftedSequence) -> None:
        """Remove a sequence and all its state."""
        del session.sequences[sequence.name]
        self.storage.release(session, sequence)
        self.sequence_store.drop(sequence)
        self._dequeue_if_idle(session)

    def _dequeue_if_idle(self, session: Session) -> None:
        """Take a session out of the queue if none of its sequences waits."""
        if session.requested_at is not None and not session.waiting():
            session.requested_at = session.deadline = None

    def _close(self, session: Session, now: float, reason: str) -> None:
        del self.sessions[session.tag]
        session.requested_at = None
        for sequence in list(session.sequences.values()):
            self._drop(session, sequence)
        self.accounts.close(session.account)
        self.audit.closed(session, now, reason)
