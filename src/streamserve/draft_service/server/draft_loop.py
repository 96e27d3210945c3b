"""The drafting thread's calls to a draft service: the next batch or dummy pass, and the answers to targets
when it is done."""

from collections.abc import Mapping

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.server.fair_batcher import FairBatcher
from streamserve.draft_service.server.refusals import Refusals
from streamserve.draft_service.server.sequence_store import SequenceStore
from streamserve.draft_service.server.session_table import SessionTable
from streamserve.draft_service.server.statistics import GAP, Statistics
from streamserve.draft_service.server.types import DraftBatch, DraftReply, TargetReply
from streamserve.protocol.drafting import Draft, Drafts

IDLE_CHECK_SECONDS = 0.5
MIN_PAUSE_SECONDS = 0.0005
"""Lower bound of a pause, in seconds, also when a pass is due but no KV block is free for it."""


class DraftLoop:
    """Drafts for the sessions of `table`, one batch after another."""

    def __init__(
        self,
        table: SessionTable,
        batcher: FairBatcher,
        sequence_store: SequenceStore,
        statistics: Statistics,
        refusals: Refusals,
    ) -> None:
        self._table = table
        self._batcher = batcher
        self._sequence_store = sequence_store
        self._statistics = statistics
        self._refusals = refusals

    def backlog(self) -> float:
        """Return the seconds of queued draft work."""
        return self._batcher.backlog(self._table.sessions.values())

    def take_released(self) -> list[int]:
        """Return the sequences that the drafter may forget, when no batch follows."""
        return self._sequence_store.take_released()

    def batch(self, now: float) -> DraftBatch | None:
        """Return the next batch to draft; None if nothing waits. No other batch may be running."""
        return self._batcher.batch(self._table.sessions, now)

    def drafted(self, done: DraftBatch, trees: Mapping[int, TokenTree], now: float) -> list[TargetReply]:
        """Process the trees of a finished batch; return the answers to its targets."""
        return self._answers(self._batcher.drafted(done, trees, now), now)

    def failed(self, done: DraftBatch, now: float) -> list[TargetReply]:
        """Process the failure of a batch. Each of its sessions is retried alone. A session whose own batch
        fails as well receives Busy."""
        answers = self._answers(self._batcher.failed(done, now), now)
        blocked = [session for session, _ in done.members if session.blocked_until > now]
        for session in blocked:
            if session.tag in self._table.sessions:
                busy = self._refusals.wait(session, "drafting", now, session.blocked_until - now)
                answers.append(TargetReply(session.peer, busy))
        return answers

    def warm_up(self, now: float) -> DraftRequest | None:
        """Return a dummy pass if one is due, else None. `warmed` must be called when it is done."""
        due = self._batcher.keep_warm_controller.due(now)
        return self._sequence_store.dummy_pass() if due is not None and due < MIN_PAUSE_SECONDS else None

    def warmed(self, request: DraftRequest, now: float) -> None:
        """Record that a dummy pass is done."""
        self._sequence_store.release_dummy_pass(request)
        self._batcher.keep_warm_controller.warmed(now)

    def pause(self, now: float) -> float:
        """Return the seconds after which to check again, if no request arrives before."""
        due = self._batcher.keep_warm_controller.due(now)
        return IDLE_CHECK_SECONDS if due is None else max(due, MIN_PAUSE_SECONDS)

    def drafts(self, tag: int, drafts: list[Draft], waited: float = 0.0, seconds: float = 0.0) -> Drafts:
        """Return the message with trees for a session."""
        return Drafts(tag=tag, drafts=drafts, waited=waited, seconds=seconds, queue=self.backlog())

    def _answers(self, answers: list[DraftReply], now: float) -> list[TargetReply]:
        return [self._answer(reply, now) for reply in answers if reply.session.tag in self._table.sessions]

    def _answer(self, answer: DraftReply, now: float) -> TargetReply:
        session, counters = answer.session, self._statistics.counters
        session.trees += len(answer.drafts)
        for draft in answer.drafts:
            if known := session.sequences.get(draft.sequence):
                self._table.storage.recount(session, known)
        counters.trees += len(answer.drafts)
        if session.served is not None and now - session.served < GAP:
            counters.rounds += 1
            counters.round_seconds += now - session.served
        session.served = session.away_since = now
        return TargetReply(
            session.peer, self.drafts(session.tag, answer.drafts, answer.waited, answer.seconds)
        )
