"""A draft service without sockets: what its targets say goes in, what to draft and what to answer comes out.

receiver ── heard ──▶ in-queue ── batch ──▶ drafter ── drafted ──▶ out-queue ──▶ sender
                      (turns.py)            (shelf.py: sequences)  (messages)

Every method is told the time. They may be called from several threads if one lock is held around each.
"""

from collections.abc import Callable, Mapping

from streamserve.drafting.admission import Admission
from streamserve.drafting.audit import Audit
from streamserve.drafting.checks import misfit, wrong
from streamserve.drafting.figures import GAP, Figures
from streamserve.drafting.memory import Memory
from streamserve.drafting.parts import Answer, Batch, Identity, Out, ServiceConfig
from streamserve.drafting.sessions import Session
from streamserve.drafting.shelf import Shelf
from streamserve.drafting.turns import Turns
from streamserve.engine.plan import DraftRequest
from streamserve.policy.tree import TokenTree
from streamserve.protocol.drafting import (
    MAX_NAME,
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
)

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
        self.admission = Admission(config.limits)
        self.audit = Audit()
        self.shelf = Shelf(
            self.memory, min(identity.max_model_len, config.num_blocks * config.block_size), config.max_read
        )
        self.turns = Turns(config, self.shelf, self.figures, cost)
        self._secret = secret

    # The receiver's side

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
        counts = self.figures.counters.refused
        counts[reason] = counts.get(reason, 0) + 1
        self.audit.refused(reason, text, now)
        return [Out(peer, Refused(nonce, reason, text))]

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
        if len(self.sessions) >= self.config.limits.max_sessions or len(self.active(now)) >= self.most():
            self.audit.busy(hello.name, now)
            return Busy(hello.nonce, 0, self.config.limits.retry)
        called = name or hello.name[:MAX_NAME]
        session = Session(
            # Not counted: a target that outlived this service's last life would take another's for its own.
            tag=int.from_bytes(self._secret()[:6], "little") | 1,
            channel=self._secret(),
            peer=peer,
            key=key,
            name=called,
            weight=self.config.shares.get(called, 1.0),
            opened=now,
            heard=now,
            allowance=self.config.limits.burst,
            allowed_at=now,
        )
        self.sessions[session.tag] = session
        self.audit.opened(session)
        return Welcome(
            nonce=hello.nonce,
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
        """Whether it is among the N_max targets: who is new comes last, then who was the last to come."""
        new = not self.admission.active(session, now)
        place = session.opened, session.tag
        before = [one for one in self.active(now) if new or (one.opened, one.tag) < place]
        return len(before) < self.most()

    def _ask(self, session: Session, ask: Ask, now: float) -> list[ToTarget]:
        if not self.admission.allows(session, ask, now):
            return [Busy(0, session.tag, self.config.limits.retry)]
        self._forget(session, ask.released)
        if not ask.deltas:
            return []
        if not self._admitted(session, now):
            self.audit.busy(session.name, now)
            return [Busy(0, session.tag, self.config.limits.retry)]
        session.asks += 1
        if session.away_since is not None:
            self.figures.returned(now - session.away_since, ask.verify, ask.plain)
            session.away_since = None
        lost, again = [], []
        for delta in ask.deltas:
            if refusal := wrong(delta, session, self.identity, self.config.limits):
                return [out.message for out in self.refuse(session.peer, "size", refusal, now)]
            judged = self.shelf.take(session, delta, now)
            if judged is None:
                lost.append(delta.sequence)
                continue
            self._verified(session, *judged)
            known = session.sequences[delta.sequence]
            if known.number == delta.number and known.answer:
                again.append(known.answer)
        answers: list[ToTarget] = [Lost(session.tag, lost)] if lost else []
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
        """A batch could not be drafted: nobody gets a tree of it."""
        return self._answers(self.turns.failed(done, now), now)

    def warm_up(self, now: float) -> DraftRequest | None:
        """A pass that is for nobody, if it is time for one; `warmed` is to be told when it is made."""
        return self.shelf.spare() if self.turns.warmth.due(now) == 0.0 else None

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
            sequence = session.sequences.pop(name, None)
            if sequence is not None:
                self.shelf.drop(sequence)
        if session.asked is not None and not session.waiting():
            session.asked = session.deadline = None

    def _close(self, session: Session, now: float, reason: str) -> None:
        del self.sessions[session.tag]
        for sequence in session.sequences.values():
            self.shelf.drop(sequence)
        session.asked = None
        self.audit.closed(session, now, reason)
