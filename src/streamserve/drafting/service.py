"""A draft service without sockets: what its targets say goes in, what to draft and what to answer comes out.

receiver ── heard ──▶ in-queue ── batch ──▶ drafter ── drafted ──▶ out-queue ──▶ sender
                      (a request a target)  (never idle while     (messages)
                                             anything waits)

Every method is told the time. They may be called from several threads if one lock is held around each.
"""

import logging
import math
from collections.abc import Callable, Mapping

from streamserve.drafting import queue
from streamserve.drafting.admission import Admission
from streamserve.drafting.audit import Audit
from streamserve.drafting.checks import misfit, wrong
from streamserve.drafting.figures import Figures
from streamserve.drafting.memory import Memory
from streamserve.drafting.parts import Batch, Identity, Out, ServiceConfig
from streamserve.drafting.sessions import DraftedSequence, Session, accepted_guesses
from streamserve.engine.plan import DraftRequest
from streamserve.policy.refine import RefinedCost
from streamserve.policy.star import Star
from streamserve.policy.tree import TokenTree
from streamserve.protocol.drafting import (
    MAX_NAME,
    Ask,
    Busy,
    Bye,
    Delta,
    Draft,
    Drafts,
    Hello,
    Lost,
    Ping,
    Pong,
    Reason,
    Refused,
    ToService,
    ToTarget,
    Tree,
    Unknown,
    Welcome,
)

logger = logging.getLogger(__name__)

FEW_TOKENS = 32
"""A batch that first read more tokens than this says nothing about the cost of guessing."""


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
        self._secret = secret
        self._cost = RefinedCost(cost)
        self._ids = 0
        self._released: list[int] = []
        self._idle_since: float | None = None
        self._virtual = 0.0
        self._longest = min(identity.max_model_len, config.num_blocks * config.block_size)
        self.running = False

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
        session.peer, session.heard = peer, now
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
                self._close(session, now, "its lease ran out")
        return []

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
        waiting = sum(session.asked is not None for session in self.sessions.values())
        return math.ceil(waiting / self.figures.star().batch) * self.figures.turn.value

    def capacity(self) -> Star:
        """The model for as many targets in a pass as pays, as far as costs are known."""
        star, config = self.figures.star(), self.config
        depth = max(1, round(self.figures.depth.value))
        batch, seconds = 1, star.draft
        for size in range(2, config.max_batch + 1):
            together = self._cost(size, 0) * depth
            if together <= config.max_batch_seconds and together / size < seconds / batch:
                batch, seconds = size, together
        return Star(star.draft, star.back, batch, seconds)

    def most(self) -> int:
        """N_max by now."""
        return self.admission.most(self.figures, self.capacity())

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
            if not self._take(session, delta, now):
                lost.append(delta.sequence)
            elif (known := session.sequences[delta.sequence]).number == delta.number and known.answer:
                again.append(known.answer)
        answers: list[ToTarget] = [Lost(session.tag, lost)] if lost else []
        if again:
            answers.append(
                Drafts(tag=session.tag, drafts=again, waited=0.0, seconds=0.0, queue=self.backlog())
            )
        if session.waiting() and session.asked is None:
            self._queue(session, now)
        if session.asked is not None:
            session.deadline = None if ask.need is None else now + ask.need
        return answers

    def _take(self, session: Session, delta: Delta, now: float) -> bool:
        """Go on by a delta; false if what it builds on is not known."""
        known = session.sequences.get(delta.sequence)
        if known is None:
            if delta.base or delta.keep or delta.params is None:
                return False
            known = DraftedSequence(self._new_id(), delta.sequence, delta.params, used=now)
            session.sequences[delta.sequence] = known
        if delta.number <= known.number:
            return True
        if known.number < delta.base or len(known.tokens) < delta.keep:
            return False
        if known.answer is not None and delta.epoch == known.epoch and delta.keep == len(known.tokens):
            right, tested = accepted_guesses(known.answer, delta.tokens)
            self.figures.verified(right, tested)
            session.accepted += right
            session.guessed += tested
        if delta.epoch != known.epoch:
            self._rename(known)
        known.take(delta)
        if len(known.tokens) + delta.nodes > self._longest:
            known.wanted = None
            known.answer = Draft(known.name, known.epoch, known.number, None)
        return True

    def _rename(self, sequence: DraftedSequence) -> None:
        """To the drafter an edited sequence is another one, though its KV stays as far as it holds."""
        self._released.append(sequence.id)
        sequence.id, sequence.told = self._new_id(), 0

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _queue(self, session: Session, now: float) -> None:
        """Who has been away does not bring the time it did not use, a few turns excepted."""
        session.virtual = max(session.virtual, self._virtual - queue.TURNS * self.figures.turn.value)
        session.asked = now

    # The drafting side

    def take_released(self) -> list[int]:
        """Sequences that the drafter may forget, if there is no batch that tells it."""
        released, self._released = self._released, []
        return released

    def batch(self, now: float) -> Batch | None:
        """What to draft next; None if nothing waits. Nothing else may be in hand."""
        assert not self.running, "one batch at a time"
        turn = self.figures.turn.value
        ordered = queue.in_order(self.sessions.values(), turn)
        chosen = queue.batch(ordered, self._seconds, self.config.max_batch, self.config.max_batch_seconds)
        requests: list[DraftRequest] = []
        members: list[tuple[Session, list[DraftedSequence]]] = []
        for session, sequences in chosen:
            made = [(one, request) for one in sequences if (request := self._request(one, now))]
            if made:
                members.append((session, [one for one, _ in made]))
                requests += [request for _, request in made]
        if not requests:
            self._idle_since = now if self._idle_since is None else self._idle_since
            return None
        self._virtual = max(self._virtual, min(session.virtual for session in ordered))
        counters = self.figures.counters
        if self._idle_since is not None:
            counters.idle += now - self._idle_since
            self._idle_since = None
        waited = {session.tag: now - (session.asked or now) for session, _ in members}
        counters.waited += sum(waited.values())
        counters.requests += len(members)
        self.running = True
        return Batch(requests, self.take_released(), members, waited, now)

    def _request(self, sequence: DraftedSequence, now: float) -> DraftRequest | None:
        """The next piece of a sequence's prompt, or its tree; None if there is no memory for it now."""
        delta = sequence.wanted
        assert delta is not None
        length = len(sequence.tokens)
        reading = length - sequence.computed > self.config.max_read
        end = sequence.computed + self.config.max_read if reading else length
        others = [one for session in self.sessions.values() for one in session.sequences.values()]
        if not self.memory.reserve(sequence, end + (0 if reading else delta.nodes), others):
            return None
        if sequence.told > sequence.computed and not sequence.computed:
            self.figures.counters.rebuilt += 1
        if end < sequence.told:  # evicted: the drafter is told again what it has to read again
            self._rename(sequence)
        new = sequence.tokens[sequence.told : end]
        keep = sequence.told
        if not new:
            keep, new = end - 1, sequence.tokens[end - 1 : end]
        sequence.begin(end)
        sequence.used = now
        return DraftRequest(
            id=sequence.id,
            epoch=sequence.epoch,
            keep=keep,
            new_tokens=new,
            choice=delta.choice,
            output=delta.output if not reading else 0,
            params=sequence.params,
            depth=0 if reading else delta.depth,
            width=delta.width,
            nodes=0 if reading else delta.nodes,
            expansion=delta.expansion,
            computed=sequence.computed,
            blocks=list(sequence.blocks),
        )

    def _seconds(self, sequences: list[DraftedSequence]) -> float:
        """What drafting for these in the same passes takes: the first reads what was not read yet."""
        unread = sum(min(len(s.tokens) - s.computed, self.config.max_read) for s in sequences)
        seconds = self._cost(max(unread, 1), 0)
        wanted = [one.wanted for one in sequences if one.wanted]
        for level in range(1, max((delta.depth for delta in wanted), default=0)):
            seconds += self._cost(sum(delta.width for delta in wanted if delta.depth > level), 0)
        return seconds

    def drafted(self, done: Batch, trees: Mapping[int, TokenTree], now: float) -> list[Out]:
        """A batch is done: take back what it was for, and say who gets which tree."""
        self.running = False
        seconds = now - done.started
        self._learn(done, seconds)
        outs: list[Out] = []
        ids = {id(one): request for one, request in zip(_flat(done), done.requests, strict=True)}
        for session, sequences in done.members:
            session.virtual += seconds * len(sequences) / len(done.requests) / session.weight
            drafts = []
            for sequence in sequences:
                draft = self._settle(sequence, ids[id(sequence)], trees)
                drafts += [draft] if draft else []
            if session.tag not in self.sessions:
                continue
            if drafts:
                outs.append(self._answer(session, drafts, done.waited[session.tag], seconds, now))
            if session.waiting():
                session.asked = session.asked if not drafts else now
            else:
                session.asked = session.deadline = None
        return outs

    def failed(self, done: Batch, now: float) -> list[Out]:
        """A batch could not be drafted: nobody gets a tree of it, and its sequences are read anew."""
        for sequence in _flat(done):
            sequence.wanted = None
        outs = self.drafted(done, {}, now)
        for sequence in _flat(done):
            if not sequence.gone:
                self.memory.release(sequence)
                self._rename(sequence)
        return outs

    def _answer(
        self, session: Session, drafts: list[Draft], waited: float, seconds: float, now: float
    ) -> Out:
        session.trees += len(drafts)
        counters = self.figures.counters
        counters.trees += len(drafts)
        if session.served is not None and now - session.served < 2.0:
            self.figures.round.add(now - session.served)
            counters.rounds += 1
            counters.round_seconds += now - session.served
        session.served = session.away_since = now
        return Out(
            session.peer,
            Drafts(tag=session.tag, drafts=drafts, waited=waited, seconds=seconds, queue=self.backlog()),
        )

    def _settle(
        self, sequence: DraftedSequence, request: DraftRequest, trees: Mapping[int, TokenTree]
    ) -> Draft | None:
        """A sequence's part of a batch is done; what to tell of it, if it is not to be gone on with."""
        sequence.end()
        if sequence.gone:
            self.memory.release(sequence)
            return None
        delta, tree = sequence.wanted, trees.get(request.id)
        reached = request.keep + len(request.new_tokens)
        if delta is None or sequence.id != request.id or reached < len(sequence.tokens):
            return None  # there is more to read, or it was told otherwise meanwhile
        sequence.wanted = None
        sequence.answer = Draft(
            sequence.name,
            sequence.epoch,
            sequence.number,
            Tree(tree.tokens, tree.parents, tree.scores, tree.accept) if tree else None,
        )
        return sequence.answer

    def _learn(self, done: Batch, seconds: float) -> None:
        requests = done.requests
        depth = max(request.depth for request in requests)
        unread = sum(request.keep + len(request.new_tokens) - request.computed for request in requests)
        read = unread > FEW_TOKENS + len(requests)
        self.figures.drafted(len(done.members), depth, seconds, read)
        if depth and not read:
            rows = sum(request.width for request in requests if request.depth)
            self._cost.observe(max(rows, 1), 0, seconds / depth)
        elif not depth:
            self._cost.observe(max(unread, 1), 0, seconds)

    # Ends

    def _forget(self, session: Session, names: list[int]) -> None:
        for name in names:
            sequence = session.sequences.pop(name, None)
            if sequence is not None:
                self._drop(sequence)
        if session.asked is not None and not session.waiting():
            session.asked = session.deadline = None

    def _drop(self, sequence: DraftedSequence) -> None:
        self._released.append(sequence.id)
        sequence.gone = True
        if not sequence.running:
            self.memory.release(sequence)

    def _close(self, session: Session, now: float, reason: str) -> None:
        del self.sessions[session.tag]
        for sequence in session.sequences.values():
            self._drop(sequence)
        session.asked = None
        self.audit.closed(session, now, reason)


def _flat(batch: Batch) -> list[DraftedSequence]:
    return [sequence for _, sequences in batch.members for sequence in sequences]
