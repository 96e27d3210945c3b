"""A draft service without sockets: what its targets say goes in, what to draft and what to answer comes out.

receiver ── heard ──▶ in-queue ── batch ──▶ drafter ── drafted ──▶ out-queue ──▶ sender
                      (fair_batcher.py)     (sequence_store.py)    (messages)

Every method is told the time. They may be called from several threads if one lock is held around each.
"""

from collections.abc import Callable, Mapping

from streamserve.draft_service.server.accounts import Account, Accounts
from streamserve.draft_service.server.admission import Admission, yielding
from streamserve.draft_service.server.audit import Audit
from streamserve.draft_service.server.fair_batcher import Turns
from streamserve.draft_service.server.held import Held
from streamserve.draft_service.server.intake import Intake
from streamserve.draft_service.server.memory import Memory
from streamserve.draft_service.server.sequence_store import Shelf
from streamserve.draft_service.server.sessions import DraftedSequence, Session
from streamserve.draft_service.server.statistics import GAP, Figures
from streamserve.draft_service.server.types import Answer, Batch, Identity, Out, ServiceConfig
from streamserve.draft_service.server.validation import misfit, wrong
from streamserve.engine.plan import DraftRequest
from streamserve.protocol.drafting import (
    Ask,
    Busy,
    Bye,
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

GONE_SECONDS = 3.0
"""In which a target whose connection ended may come back by another before its session ends."""

LOOK_SECONDS = 0.5
LEAST_SECONDS = 0.0005
"""Of a pause, even where a pass was due and there was no block for it."""


class Service:
    """The sessions of one draft service, its in-queue and its memory. `secret` makes channels, which nobody
    may guess; `cost` gives the seconds of a draft pass over so many rows until passes were timed."""

    def __init__(
        self,
        identity: Identity,
        config: ServiceConfig,
        secret: Callable[[], bytes],
        cost: Callable[[int, int], float] = lambda rows, kv_tokens: 0.001 + rows * 1e-5,
    ) -> None:
        self.identity = identity
        self.config = config
        self.memory = Memory(config.num_blocks, config.block_size)
        self.figures = Figures()
        self.sessions: dict[int, Session] = {}
        self.accounts = Accounts()
        self.intake = Intake(config.limits)
        self.held = Held(config.limits.held_bytes, self.sessions, self._drop)
        self.admission = Admission(config.limits)
        self.audit = Audit()
        self.shelf = Shelf(
            self.memory, min(identity.max_model_len, config.num_blocks * config.block_size), config.max_read
        )
        self.turns = Turns(config, self.shelf, self.figures, cost)
        self._secret = secret

    # The receiver's side

    def arrived(self, peer: bytes, size: int, now: float, key: str = "") -> list[Out] | None:
        """Charge for a message of `size` bytes before it is decoded: None if it is to be, else what to answer
        instead."""
        overdrawn = self.intake.charge(key.encode() or peer, size, now)
        if overdrawn is None:
            return None
        self._count(overdrawn.reason, f"{size} bytes of {printable(key[:16]) or 'a client'}", now)
        return [Out(peer, Busy(0, 0, overdrawn.retry, overdrawn.reason))] if overdrawn.tell else []

    def heard(self, peer: bytes, message: ToService, now: float, key: str = "", name: str = "") -> list[Out]:
        """Take a message from `peer`, who showed the public `key` of the client called `name`, if keys are
        shown here. Returns what to answer at once."""
        if isinstance(message, Hello):
            return [Out(peer, self._hello(peer, message, now, key, name))]
        session = self.sessions.get(message.tag)
        if session is None:
            return [Out(peer, Unknown(message.tag))]
        if not (message.channel == session.channel and session.key == key):
            return self.refuse(peer, "channel", f"tag {message.tag} is another target's", now)
        session.peer, session.heard, session.cut = peer, now, False
        match message:
            case Bye():
                self._close(session, now, "the target left")
                return []
            case Ping(_, _, sent):
                return [Out(peer, self._pong(session.tag, sent, now))]
            case Ask():
                return [Out(peer, answer) for answer in self._ask(session, message, now)]

    def refuse(self, peer: bytes, reason: Reason, text: str, now: float, nonce: int = 0) -> list[Out]:
        """Say no, count it, and log it, though not each of many."""
        self._count(reason, text, now)
        return [Out(peer, Refused(nonce, reason, text))]

    def _count(self, reason: Reason, text: str, now: float) -> None:
        counts = self.figures.counters.refused
        counts[reason] = counts.get(reason, 0) + 1
        self.audit.refused(reason, text, now)

    def _wait(self, session: Session, reason: Reason, now: float, retry: float = 0.0) -> Busy:
        """Turn a message of a session away for a while."""
        self._count(reason, f"session {session.tag}, target {session.name!r}", now)
        return Busy(0, session.tag, retry or self.config.limits.retry, reason)

    def tick(self, now: float) -> list[Out]:
        """Close sessions whose lease has run out. To be called now and then."""
        for session in list(self.sessions.values()):
            if now - session.heard > self.config.lease:
                self._close(session, now, "its connection ended" if session.cut else "its lease ran out")
        return []

    def disconnected(self, peer: bytes, now: float) -> None:
        """The connection by which `peer` came has ended. Its session does too, unless it is heard again."""
        for session in self.sessions.values():
            if session.peer == peer:
                session.cut = True
                session.heard = min(session.heard, now - self.config.lease + GONE_SECONDS)

    def active(self, now: float) -> list[Session]:
        """The sessions that were drafted for lately, or wait for it."""
        return [one for one in self.sessions.values() if self.admission.active(one, now)]

    def _hello(self, peer: bytes, hello: Hello, now: float, key: str, name: str) -> ToTarget:
        if refusal := misfit(hello, self.identity):
            return self.refuse(peer, *refusal, now, hello.nonce)[0].message
        before = self._before(peer, key)
        if before is not None and before.nonce == hello.nonce:
            return self._welcome(before, now)  # it has come twice
        if before is not None:
            self._close(before, now, "its target said Hello again")
        called = name or printable(hello.name)
        if reason := self._full(key, now):
            self._count(reason, f"target {called!r}", now)
            return Busy(hello.nonce, 0, self.config.limits.retry, reason)
        session = Session(
            # Not counted: a target that outlived this service's last life would take another's for its own.
            tag=int.from_bytes(self._secret()[:6], "little") | 1,
            channel=self._secret(),
            peer=peer,
            key=key,
            name=called,
            account=self.accounts.open(key, self.config.shares.get(called, 1.0)),
            opened=now,
            heard=now,
            nonce=hello.nonce,
        )
        self.sessions[session.tag] = session
        self.audit.opened(session)
        return self._welcome(session, now)

    def _before(self, peer: bytes, key: str) -> Session | None:
        """The session that a connection has already: one is enough."""
        return next((one for one in self.sessions.values() if one.peer == peer and one.key == key), None)

    def _full(self, key: str, now: float) -> Reason | None:
        """Why there is no session for another target with `key`, if there is none. Where there are as many as
        may be, the account with most ends one for it."""
        account = self.accounts.of(key) or Account(key)
        if self.admission.ahead(account, self.active(now), None) >= self.most():
            return "targets"
        if len(self.sessions) >= self.config.limits.max_sessions:
            victim = yielding(self.sessions.values(), account.sessions)
            if victim is None:
                return "sessions"
            self._close(victim, now, "another client has none")
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
        return Pong(tag, sent, self.backlog(), self.figures.turn.value, len(self.active(now)))

    def backlog(self) -> float:
        """Seconds of work that waits."""
        return self.turns.backlog(self.sessions.values())

    def most(self) -> int:
        """N_max by now."""
        return self.admission.most(self.figures, self.turns.capacity())

    def _admitted(self, session: Session, now: float) -> bool:
        """Whether it is among the N_max targets: who is new comes last."""
        new = not self.admission.active(session, now)
        ahead = self.admission.ahead(session.account, self.active(now), None if new else session)
        return ahead < self.most()

    def _turned_away(self, session: Session, ask: Ask, now: float) -> Busy | None:
        """Say no to a message before any work is done for it."""
        if reason := self.admission.overdrawn(session, ask, self.sessions.values()):
            return self._wait(session, reason, now)
        if ask.deltas and now < session.barred_until:
            return self._wait(session, "drafting", now, session.barred_until - now)
        if ask.deltas and not self._admitted(session, now):
            return self._wait(session, "targets", now)
        return None

    def _ask(self, session: Session, ask: Ask, now: float) -> list[ToTarget]:
        self._forget(session, ask.released)
        if busy := self._turned_away(session, ask, now):
            return [busy]
        if not ask.deltas:
            return []
        session.asks += 1
        if session.away_since is not None:
            self.figures.returned(now - session.away_since, ask.verify, ask.plain)
            session.away_since = None
        lost, again = [], []
        answers: list[ToTarget] = []
        for delta in ask.deltas:
            if refusal := wrong(delta, session, self.identity, self.config.limits):
                answers += [out.message for out in self.refuse(session.peer, "size", refusal, now)]
                break
            if not self.held.make_room(session, delta):
                answers.append(self._wait(session, "memory", now))
                break
            judged = self.shelf.take(session, delta, now)
            if judged is None:
                lost.append(delta.sequence)
                continue
            self._verified(session, *judged)
            known = session.sequences[delta.sequence]
            self.held.settle(session, known)
            if known.number == delta.number and known.answer:
                again.append(known.answer)
        if lost:
            answers.append(Lost(session.tag, lost))
        if again:
            answers.append(
                Drafts(tag=session.tag, drafts=again, waited=0.0, seconds=0.0, queue=self.backlog())
            )
        if session.waiting() and session.asked is None:
            self.turns.enqueue(session, now)
        if session.asked is not None:
            session.deadline = None if ask.need is None else now + ask.need
        return answers

    def _verified(self, session: Session, right: int, tested: int) -> None:
        self.figures.verified(right, tested)
        session.accepted += right
        session.guessed += tested

    # The drafting side

    def take_released(self) -> list[int]:
        """Sequences that the drafter may forget, if there is no batch that tells it."""
        return self.shelf.take_released()

    def batch(self, now: float) -> Batch | None:
        """What to draft next; None if nothing waits. Nothing else may be in hand."""
        return self.turns.batch(self.sessions, now)

    def drafted(self, done: Batch, trees: Mapping[int, TokenTree], now: float) -> list[Out]:
        """A batch is done: say who gets which tree."""
        return self._answers(self.turns.drafted(done, trees, now), now)

    def failed(self, done: Batch, now: float) -> list[Out]:
        """A batch could not be drafted. It is tried again for each session alone; one for which that fails as
        well is told to come back later."""
        answers = self._answers(self.turns.failed(done, now), now)
        barred = [session for session, _ in done.members if session.barred_until > now]
        for session in barred:
            if session.tag in self.sessions:
                busy = self._wait(session, "drafting", now, session.barred_until - now)
                answers.append(Out(session.peer, busy))
        return answers

    def warm_up(self, now: float) -> DraftRequest | None:
        """A pass that is for nobody, if it is time for one; `warmed` is to be told when it is made."""
        due = self.turns.warmth.due(now)
        return self.shelf.spare() if due is not None and due < LEAST_SECONDS else None

    def warmed(self, request: DraftRequest, now: float) -> None:
        """A pass for nobody has been made."""
        self.shelf.return_spare(request)
        self.turns.warmth.warmed(now)

    def pause(self, now: float) -> float:
        """Seconds after which to look again, if no request comes before."""
        due = self.turns.warmth.due(now)
        return LOOK_SECONDS if due is None else max(due, LEAST_SECONDS)

    def _answers(self, answers: list[Answer], now: float) -> list[Out]:
        return [self._answer(one, now) for one in answers if one.session.tag in self.sessions]

    def _answer(self, answer: Answer, now: float) -> Out:
        session, counters = answer.session, self.figures.counters
        session.trees += len(answer.drafts)
        for draft in answer.drafts:
            if known := session.sequences.get(draft.sequence):
                self.held.settle(session, known)
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

    # Ends

    def _forget(self, session: Session, names: list[int]) -> None:
        for name in names:
            if sequence := session.sequences.get(name):
                self._drop(session, sequence)
        self._rest(session)

    def _drop(self, session: Session, sequence: DraftedSequence) -> None:
        """Keep nothing of a sequence."""
        del session.sequences[sequence.name]
        self.held.release(session, sequence)
        self.shelf.drop(sequence)
        self._rest(session)

    def _rest(self, session: Session) -> None:
        """It waits no longer if nothing of it does."""
        if session.asked is not None and not session.waiting():
            session.asked = session.deadline = None

    def _close(self, session: Session, now: float, reason: str) -> None:
        del self.sessions[session.tag]
        session.asked = None
        for sequence in list(session.sequences.values()):
            self._drop(session, sequence)
        self.accounts.close(session.account)
        self.audit.closed(session, now, reason)
