"""Whom a draft service takes: as many targets as gain by it, and no more than its limits say."""

from dataclasses import dataclass

from streamserve.drafting.figures import Figures
from streamserve.drafting.sessions import Session
from streamserve.policy.star import Star
from streamserve.protocol.drafting import MAX_DELTAS, MAX_DEPTH, MAX_MESSAGE_BYTES, MAX_NODES, Ask


@dataclass(frozen=True)
class Limits:
    """Of one service: `max_sessions` in all; of one target: `rate` messages a second after a `burst` of so
    many, sequences, tokens a sequence, bytes a message. Who is turned away may come back after `retry`
    seconds. Who was not drafted for in `active_for` seconds does not count as a target. With `by_model` there
    are never more active targets than N_max."""

    max_sessions: int = 64
    max_sequences: int = 1024
    max_tokens: int = 1 << 18
    max_bytes: int = MAX_MESSAGE_BYTES
    max_depth: int = MAX_DEPTH
    max_nodes: int = MAX_NODES
    max_deltas: int = MAX_DELTAS
    rate: float = 2000.0
    burst: float = 4000.0
    retry: float = 1.0
    active_for: float = 1.0
    by_model: bool = True


class Admission:
    """Decides by `limits` and by the model of policy/star.py with live figures."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def active(self, session: Session, now: float) -> bool:
        """Whether a session counts as one of the N targets."""
        if session.asked is not None:
            return True
        return session.served is not None and now - session.served < self._limits.active_for

    def most(self, figures: Figures, star: Star) -> int:
        """N_max, as far as it can be told by now."""
        if not (self._limits.by_model and figures.known and figures.plain.count):
            return self._limits.max_sessions
        return min(star.most(figures.progress, figures.plain.value), self._limits.max_sessions)

    def allows(self, session: Session, ask: Ask, now: float) -> bool:
        """Whether a target keeps to its rate; counts this message. More than so many deltas at once would be
        a way around it."""
        limits = self._limits
        session.allowance = min(limits.burst, session.allowance + (now - session.allowed_at) * limits.rate)
        session.allowed_at = now
        if session.allowance < 1.0 or len(ask.deltas) > limits.max_deltas:
            return False
        session.allowance -= 1.0
        return True
