"""The refusals of a draft service: each is counted, written to the audit log, and told to the target."""

from streamserve.draft_service.server.audit import Audit
from streamserve.draft_service.server.sessions import Session
from streamserve.draft_service.server.statistics import Statistics
from streamserve.draft_service.server.types import TargetReply
from streamserve.protocol.drafting import Busy, Reason, Refused


class Refusals:
    """Makes refusals. A target that is turned away may retry after `retry` seconds, unless a better time is
    known."""

    def __init__(self, statistics: Statistics, audit: Audit, retry: float) -> None:
        self._statistics = statistics
        self._audit = audit
        self._retry = retry

    def count(self, reason: str, text: str, now: float) -> None:
        """Count a refusal and log it, with a limit on the log's rate."""
        counts = self._statistics.counters.refused
        counts[reason] = counts.get(reason, 0) + 1
        self._audit.refused(reason, text, now)

    def refuse(self, peer: bytes, reason: Reason, text: str, now: float, nonce: int = 0) -> TargetReply:
        """Return the refusal of a message for which a retry would be useless."""
        self.count(reason, text, now)
        return TargetReply(peer, Refused(nonce, reason, text))

    def turn_away(self, reason: Reason, text: str, now: float, nonce: int) -> Busy:
        """Return the answer to a Hello if no session is available now."""
        self.count(reason, text, now)
        return Busy(nonce, 0, self._retry, reason)

    def wait(self, session: Session, reason: Reason, now: float, retry: float = 0.0) -> Busy:
        """Return the answer that asks a session to retry later."""
        self.count(reason, f"session {session.tag}, target {session.name!r}", now)
        return Busy(0, session.tag, retry or self._retry, reason)
