"""The work-conserving batch loop, without its thread: selects the next batch, charges its cost, returns its
answers.

in-queue        ── batch ──▶ drafter ── drafted ──▶ answers
(one per target)             (one batch at a time, never idle while anything waits)
"""

import math
from collections.abc import Callable, Iterable, Mapping

from streamserve.draft_service.server import queue
from streamserve.draft_service.server.admission import barred_for
from streamserve.draft_service.server.keep_warm import KeepWarmController
from streamserve.draft_service.server.sequence_store import SequenceStore
from streamserve.draft_service.server.sessions import DraftedSequence, Session
from streamserve.draft_service.server.statistics import Statistics
from streamserve.draft_service.server.types import Answer, Batch, ServiceConfig
from streamserve.draft_service.star import Star
from streamserve.engine.plan import DraftRequest
from streamserve.protocol.drafting import Draft
from streamserve.speculation.learned_cost import RefinedCost
from streamserve.speculation.tree import TokenTree

FEW_TOKENS = 32
"""A batch that first read more tokens than this is not used to estimate the cost of drafting."""


class FairBatcher:
    """Selects batches of waiting sessions in fair order, within the limits of `config`. `cost` gives the
    seconds of a draft pass over a number of tokens until passes have been timed."""

    def __init__(
        self,
        config: ServiceConfig,
        sequence_store: SequenceStore,
        statistics: Statistics,
        cost: Callable[[int, int], float],
    ) -> None:
        self.running = False
        self.keep_warm_controller = KeepWarmController(config.keep_warm)
        self._config = config
        limits = config.limits
        self._bounds = queue.Bounds(
            config.max_batch, config.max_batch_seconds, limits.batch_nodes, limits.batch_rows
        )
        self._shelf = sequence_store
        self._figures = statistics
        self._cost = RefinedCost(cost)
        self._virtual = 0.0
        self._idle_since: float | None = None

    def enqueue(self, session: Session, now: float) -> None:
        """Queue a session. A session that was idle does not accumulate the time it did not use, except for
        `queue.TURNS` passes."""
        account = session.account
        account.virtual = max(account.virtual, self._virtual - queue.TURNS * self._figures.turn.value)
        session.asked = now

    def backlog(self, sessions: Iterable[Session]) -> float:
        """Return the seconds of queued draft work."""
        waiting = sum(session.asked is not None for session in sessions)
        return math.ceil(waiting / self._figures.star().batch) * self._figures.turn.value

    def capacity(self) -> Star:
        """Return the model for the batch size with the least time per target, as far as costs are known."""
        star, config = self._figures.star(), self._config
        depth = max(1, round(self._figures.depth.value))
        batch, seconds = 1, star.draft
        for size in range(2, config.max_batch + 1):
            together = self._cost(size, 0) * depth
            if together <= config.max_batch_seconds and together / size < seconds / batch:
                batch, seconds = size, together
        return Star(star.draft, star.back, batch, seconds)

    def batch(self, sessions: Mapping[int, Session], now: float) -> Batch | None:
        """Return the next batch to draft; None if nothing waits. No other batch may be running."""
        assert not self.running, "one batch at a time"
        counters = self._figures.counters
        ordered = queue.in_order(sessions.values(), self._figures.turn.value)
        chosen = queue.batch(ordered, self._seconds, self._bounds, self._shelf.unread)
        requests: list[DraftRequest] = []
        members: list[tuple[Session, list[DraftedSequence]]] = []
        for session, sequences in chosen:
            made = [(one, request) for one in sequences if (request := self._shelf.request(one, now))]
            if made:
                members.append((session, [one for one, _ in made]))
                requests += [request for _, request in made]
        if not requests:
            self._idle_since = now if self._idle_since is None else self._idle_since
            return None
        self._virtual = max(self._virtual, min(session.account.virtual for session in ordered))
        waited = {session.tag: now - (session.asked or now) for session, _ in members}
        if self._idle_since is not None:
            counters.idle += now - self._idle_since
            self.keep_warm_controller.gap(now - self._idle_since)
            self._idle_since = None
        counters.waited += sum(waited.values())
        counters.requests += len(members)
        self.running = True
        return Batch(requests, self._shelf.take_released(), members, waited, now)

    def drafted(self, done: Batch, trees: Mapping[int, TokenTree], now: float) -> list[Answer]:
        """Process a finished batch: charge its time to its sessions and return the answers to its targets."""
        self.running = False
        seconds = now - done.started
        self._learn(done, seconds, now)
        answers = []
        requests = iter(done.requests)
        whole = sum(map(_work, done.requests))
        for session, sequences in done.members:
            own = [next(requests) for _ in sequences]
            share = seconds * sum(map(_work, own)) / whole
            session.virtual += share
            session.account.virtual += share / session.account.weight
            settled = [
                self._shelf.settle(one, request, trees) for one, request in zip(sequences, own, strict=True)
            ]
            drafts: list[Draft] = [draft for draft in settled if draft]
            if drafts:
                answers.append(Answer(session, drafts, done.waited[session.tag], seconds))
            if not session.waiting():
                session.asked = session.deadline = None
            elif drafts:
                session.asked = now
            if drafts:
                session.apart, session.failures = False, 0
        return answers

    def failed(self, done: Batch, now: float) -> list[Answer]:
        """Process the failure of a batch. A batch of several sessions is retried for each session alone. A
        batch of one session gets no trees, and the session is barred for a while. The sequences are prefilled
        again."""
        alone = len(done.members) == 1
        failures = [session.failures for session, _ in done.members]
        sequences = [one for _, members in done.members for one in members]
        if alone:
            for sequence in sequences:
                sequence.want(None)
        answers = self.drafted(done, {}, now) if alone else self._put_back(done, now)
        for (session, _), before in zip(done.members, failures, strict=True):
            session.apart, session.failures = True, before + alone
            if alone:
                session.barred_until = now + barred_for(session.failures)
        for sequence in sequences:
            self._shelf.read_anew(sequence)
        return answers

    def _put_back(self, done: Batch, now: float) -> list[Answer]:
        """Queue the members of a batch again."""
        self.running = False
        for session, sequences in done.members:
            for sequence in sequences:
                self._shelf.put_back(sequence)
            if not session.waiting():
                session.asked = session.deadline = None
        self._figures.counters.busy += now - done.started
        return []

    def _seconds(self, sequences: list[DraftedSequence]) -> float:
        """Return the estimated seconds to draft for these sequences in one batch; the first pass reads their
        unread tokens."""
        seconds = self._cost(max(sum(self._shelf.unread(one) for one in sequences), 1), 0)
        wanted = [one.wanted for one in sequences if one.wanted]
        for level in range(1, max((delta.depth for delta in wanted), default=0)):
            seconds += self._cost(sum(delta.width for delta in wanted if delta.depth > level), 0)
        return seconds

    def _learn(self, done: Batch, seconds: float, now: float) -> None:
        requests = done.requests
        depth = max(request.depth for request in requests)
        unread = sum(request.keep + len(request.new_tokens) - request.computed for request in requests)
        read = unread > FEW_TOKENS + len(requests)
        self._figures.drafted(len(done.members), depth, seconds, read)
        waited = max(done.waited.values())
        self.keep_warm_controller.drafted((waited + seconds) / depth if depth and not read else None, now)
        if depth and not read:
            rows = sum(request.width for request in requests if request.depth)
            self._cost.observe(max(rows, 1), 0, seconds / depth)
        elif not depth:
            self._cost.observe(max(unread, 1), 0, seconds)


def _work(request: DraftRequest) -> int:
    """Return the units by which a request shares the cost of its batch: the tokens it reads and the nodes of
    its tree."""
    return request.keep + len(request.new_tokens) - request.computed + request.nodes + 1
