"""What a draft service writes down about who used it: a line a session, never a token of a prompt."""

import logging

from streamserve.drafting.sessions import Session

logger = logging.getLogger("streamserve.draft.audit")

SECONDS = 1.0
"""Between two lines about the same kind of refusal."""


class Audit:
    """Lines for the log. Who is refused over and over gets one a second, with the number since the last."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._since: dict[str, int] = {}

    def opened(self, session: Session) -> None:
        logger.info("session %d opened: %s", session.tag, _who(session))

    def closed(self, session: Session, now: float, reason: str) -> None:
        logger.info(
            "session %d closed, as %s: %s, %.1f s, %d requests, %d trees, %d of %d guesses accepted",
            session.tag, reason, _who(session), now - session.opened, session.asks, session.trees,
            session.accepted, session.guessed,
        )  # fmt: skip

    def refused(self, reason: str, text: str, now: float) -> None:
        if self._due(reason, now):
            logger.warning("refused (%s): %s; %d since the last line", reason, text, self._take(reason))

    def busy(self, name: str, now: float) -> None:
        if self._due("busy", now):
            logger.info("no room for target %r; %d since the last line", name, self._take("busy"))

    def _due(self, kind: str, now: float) -> bool:
        self._since[kind] = self._since.get(kind, 0) + 1
        if now - self._last.get(kind, float("-inf")) < SECONDS:
            return False
        self._last[kind] = now
        return True

    def _take(self, kind: str) -> int:
        return self._since.pop(kind)


def _who(session: Session) -> str:
    key = f"key {session.key[:16]}…" if session.key else "no key"
    return f"target {session.name!r}, {key}"
