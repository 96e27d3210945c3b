"""A draft service's audit log: one line per session, without any token of a prompt."""

import logging

from streamserve.draft_service.server.sessions import Session
from streamserve.protocol.drafting import printable

logger = logging.getLogger("streamserve.draft.audit")

SECONDS = 1.0
"""Minimum seconds between two lines about the same kind of refusal."""
LINES = 600
"""Lines a minute about sessions that open, and about sessions that close."""


class Audit:
    """Writes audit lines. Repeated refusals get one line a second, with the number since the last."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._since: dict[str, int] = {}
        self._lines: dict[str, tuple[int, int]] = {}

    def opened(self, session: Session) -> None:
        if self._may("opened", session.opened):
            logger.info("session %d opened: %s", session.tag, _description(session))

    def closed(self, session: Session, now: float, reason: str) -> None:
        """Log the end of a session, with its counters."""
        if not self._may("closed", now):
            return
        logger.info(
            "session %d closed, as %s: %s, %.1f s, %d requests, %d trees, %d of %d draft tokens accepted",
            session.tag, reason, _description(session), now - session.opened, session.requests, session.trees,
            session.accepted, session.tested,
        )  # fmt: skip

    def refused(self, reason: str, text: str, now: float) -> None:
        """Log a refusal, if none was logged for this reason recently."""
        if self._due(reason, now):
            text = printable(text, 200)
            logger.warning(
                "refused (%s): %s; %d refusals for this reason since the last line",
                reason,
                text,
                self._pop(reason),
            )

    def _may(self, kind: str, now: float) -> bool:
        """Return whether a line of this kind may be written, within the limit per minute."""
        minute = int(now // 60.0)
        before, count = self._lines.get(kind, (minute, 0))
        count = count + 1 if before == minute else 1
        self._lines[kind] = minute, count
        if count == LINES:
            logger.warning("many sessions are being %s: no more lines about this in this minute", kind)
        return count < LINES

    def _due(self, kind: str, now: float) -> bool:
        self._since[kind] = self._since.get(kind, 0) + 1
        if now - self._last.get(kind, float("-inf")) < SECONDS:
            return False
        self._last[kind] = now
        return True

    def _pop(self, kind: str) -> int:
        return self._since.pop(kind)


def _description(session: Session) -> str:
    key = f"key {session.key[:16]}…" if session.key else "no key"
    return f"target {printable(session.name)!r}, {key}"
