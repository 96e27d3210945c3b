"""The work-conserving batch loop, without its thread: selects the next batch, charges its cost, returns its
answers.

in-queue        ── batch ──▶ drafter ── drafted ──▶ answers
(one per target)             (one batch at a time, never idle while anything waits)
"""

import math
from collections.abc import Callable, Iterable, Mapping

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.server import queue
from streamserve.draft_service.server.admission import block_seconds
from streamserve.draft_service.server.keep_warm import KeepWarmController
from streamserve.draft_service.server.sequence_store import SequenceStore
from streamserve.draft_service.server.sessions import DraftedSequence, Session
from streamserve.draft_service.server.statistics import Statistics
from streamserve.draft_service.server.types import DraftBatch, DraftReply, ServiceConfig
from streamserve.draft_service.star import Star
from streamserve.protocol.drafting import Draft
from streamserve.speculation.learned_cost import RefinedCost

FEW_TOKENS = 32
"""A batch that reads more tokens than this before it drafts is not used to estimate the cost of drafting."""


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
            config.max_batch, config.max_batch_seconds, limits.batch_nodes, limits.batch_tokens,
            config.max_read,
        )  # fmt: skip
        self._sequence_store = sequence_store
        self._statistics = statistics
        self._cost = RefinedCost(cost)
        self._virtual = 0.0
        self._idle_since: float | None = None

    def enqueue(self, session: Session, now: float) -> None:
        """Queue a session. An account that was idle may not make up for the time it did not use, except for
        `queue.LEAD_BATCHES` batches: its virtual time is raised."""
        account = session.account
        account.virtual = max(
            account.virtual, self._virtual - queue.LEAD_BATCHES * self._statistics.batch_seconds.value
        )
        session.requested_at = now

    def backlog(self, sessions: Iterable[Session]) -> float:
        """Return the seconds of queued draft work."""
        waiting = sum(s.requested_at is not None and s.wants_trees for s in sessions)
        return math.ceil(waiting / self._statistics.star().batch) * self._statistics.batch_seconds.value

    def capacity(self) -> Star:
        """Return the StarSD model (draft_service/star.py) with the batch size that takes the least time per
        target, as far as costs are known."""
        star, config = self._statistics.star(), self._config
        depth = max(1, round(self._statistics.depth.value))
        batch, seconds = 1, star.draft
        for size in range(2, config.max_batch + 1):
            expected = self._cost(size, 0) * depth
            if expected <= config.max_batch_seconds and expected / size < seconds / batch:
                batch, seconds = size, expected
        return Star(star.draft, star.return_seconds, batch, seconds)

    def batch(self, sessions: Mapping[int, Session], now: float) -> DraftBatch | None:
        """Return the next batch to draft; None if nothing waits. No other batch may be running."""
        assert not self.running, "one batch at a time"
        counters = self._statistics.counters
        ordered = queue.in_order(sessions.values(), self._statistics.batch_seconds.value)
        chosen = queue.batch(ordered, self._seconds, self._bounds, self._sequence_store.unread)
        requests: list[DraftRequest] = []
        members: list[tuple[Session, list[DraftedSequence]]] = []
        for session, sequences in chosen:
            made = [(s, request) for s in sequences if (request := self._sequence_store.request(s, now))]
            if made:
                members.append((session, [sequence for sequence, _ in made]))
                requests += [request for _, request in made]
        if not requests:
            self._idle_since = now if self._idle_since is None else self._idle_since
            return None
        self._virtual = max(self._virtual, min(session.account.virtual for session in ordered))
        waited = {session.tag: now - (session.requested_at or now) for session, _ in members}
        if self._idle_since is not None:
            counters.idle += now - self._idle_since
            self.keep_warm_controller.gap(now - self._idle_since)
            self._idle_since = None
        counters.waited += sum(waited.values())
        counters.requests += len(members)
        self.running = True
        return DraftBatch(requests, self._sequence_store.take_released(), members, waited, now)

    def drafted(self, done: DraftBatch, trees: Mapping[int, TokenTree], now: float) -> list[DraftReply]:
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
            if depth := max(request.depth for request in own):
                session.depth.add(depth)
            session.account.virtual += share / session.account.weight
            finished = [
                self._sequence_store.finish(sequence, request, trees)
                for sequence, request in zip(sequences, own, strict=True)
            ]
            drafts: list[Draft] = [draft for draft in finished if draft]
            if drafts:
                answers.append(DraftReply(session, drafts, done.waited[session.tag], seconds))
            if not session.waiting():
                session.requested_at = session.deadline = None
            elif drafts or session.requested_at is None:  # None: it requested more while the batch ran
                session.requested_at = now
            if drafts:
                session.draft_alone, session.failures = False, 0
        return answers

    def failed(self, done: DraftBatch, now: float) -> list[DraftReply]:
        """Process the failure of a batch; the KV of its sequences is computed again. A batch of several
        sessions is retried for each session alone. A batch of one session gets no trees, and the session is
        blocked for a while."""
        alone = len(done.members) == 1
        failures = [session.failures for session, _ in done.members]
        sequences = [sequence for _, members in done.members for sequence in members]
        if alone:
            for sequence in sequences:
                sequence.set_request(None)
        answers = self.drafted(done, {}, now) if alone else self._requeue(done, now)
        for (session, _), before in zip(done.members, failures, strict=True):
            session.draft_alone, session.failures = True, before + alone
            if alone:
                session.blocked_until = now + block_seconds(session.failures)
        for sequence in sequences:
            self._sequence_store.invalidate(sequence)
        return answers

    def _requeue(self, done: DraftBatch, now: float) -> list[DraftReply]:
        """Queue the members of a batch again."""
        self.running = False
        for session, sequences in done.members:
            for sequence in sequences:
                self._sequence_store.requeue(sequence)
            if not session.waiting():
                session.requested_at = session.deadline = None
            elif session.requested_at is None:
                session.requested_at = now
        self._statistics.counters.busy += now - done.started
        return []

    def _seconds(self, sequences: list[DraftedSequence]) -> float:
        """Return the estimated seconds to draft for these sequences in one batch; the first pass reads their
        unread tokens."""
        seconds = self._cost(max(sum(self._sequence_store.unread(sequence) for sequence in sequences), 1), 0)
        requested = [sequence.requested for sequence in sequences if sequence.requested]
        for level in range(1, max((delta.depth for delta in requested), default=0)):
            seconds += self._cost(sum(delta.width for delta in requested if delta.depth > level), 0)
        return seconds

    def _learn(self, done: DraftBatch, seconds: float, now: float) -> None:
        requests = done.requests
        depth = max(request.depth for request in requests)
        unread = sum(request.length - request.computed for request in requests)
        read = unread > FEW_TOKENS + len(requests)
        self._statistics.drafted(len(done.members), depth, seconds, read)
        waited = max(done.waited.values())
        self.keep_warm_controller.drafted((waited + seconds) / depth if depth and not read else None, now)
        if depth and not read:
            tokens = sum(request.width for request in requests if request.depth)
            self._cost.observe(max(tokens, 1), 0, seconds / depth)
        elif not depth:
            self._cost.observe(max(unread, 1), 0, seconds)


def _work(request: DraftRequest) -> int:
    """Return the units by which a request shares the cost of its batch: the tokens it reads and the nodes of
    its tree."""
    return request.length - request.computed + request.nodes + 1
