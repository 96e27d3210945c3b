"""Admission to a draft service: as many targets as gain by it, within its limits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamserve.draft_service.server.accounts import Account
from streamserve.draft_service.server.sessions import Session
from streamserve.draft_service.server.statistics import Statistics
from streamserve.draft_service.star import Star, all_gain
from streamserve.protocol.drafting import (
    MAX_DELTAS,
    MAX_DEPTH,
    MAX_MESSAGE_BYTES,
    MAX_NODES,
    MAX_TOKENS,
    DraftRequests,
    Reason,
)

FAILED_SECONDS, LONGEST_SECONDS = 0.5, 60.0
"""How long a session is not drafted for after a batch of it alone has failed, in seconds: the first time,
doubled each time, and the maximum."""


@dataclass(frozen=True)
class Limits:
    """Limits of one service. A refused message may be sent again after `retry` seconds, unless a better time
    is known. A session that was not drafted for in `active_for` seconds does not count as a target. With
    `by_model` there are never more active targets than N_max."""

    max_sessions: int = 64
    """Of the service. An account that has at least two more sessions than another gives one up for it."""
    max_sequences: int = 1024
    """Of a session."""
    max_tokens: int = MAX_TOKENS
    """Of a sequence."""
    max_bytes: int = MAX_MESSAGE_BYTES
    """Of a message."""
    max_depth: int = MAX_DEPTH
    max_nodes: int = MAX_NODES
    """Of a tree."""
    max_deltas: int = MAX_DELTAS
    request_nodes: int = 16384
    """Of the trees that one message requests."""
    in_flight: int = 4096
    """Sequences of an account with trees in flight."""
    total_in_flight: int = 16384
    batch_nodes: int = 4096
    batch_tokens: int = 2048
    """Nodes of all trees, and tokens read, in one batch."""
    storage_bytes: int = 512 << 20
    """Of all stored sequences and trees; see draft_service/server/storage.py."""
    rate: float = 2000.0
    burst: float = 4000.0
    """Messages of a client, per second and in a burst."""
    total_rate: float = 20000.0
    byte_rate: float = 16.0 * (1 << 20)
    byte_burst: float = 32.0 * (1 << 20)
    """Bytes of a client, per second and in a burst."""
    total_byte_rate: float = 64.0 * (1 << 20)
    retry: float = 1.0
    longest_retry: float = 30.0
    active_for: float = 1.0
    by_model: bool = True


class Admission:
    """Decides by `limits` and by the model of draft_service/star.py with measured values."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def active(self, session: Session, now: float) -> bool:
        """Return whether a session counts as one of the N targets."""
        if session.requested_at is not None:
            return True
        return session.served is not None and now - session.served < self._limits.active_for

    def n_max(self, statistics: Statistics, star: Star) -> int:
        """Return N_max, as far as it is known; else the limit of sessions."""
        if not (self._limits.by_model and statistics.known and statistics.plain.count):
            return self._limits.max_sessions
        return min(star.n_max(statistics.progress, statistics.plain.value), self._limits.max_sessions)

    def all_gain(self, sessions: Sequence[Session], statistics: Statistics, capacity: Star) -> bool:
        """Return whether each of these sessions gains if all are drafted for, as far as that is known, by its
        own depth, acceptance and plain steps; and whether that many may be."""
        if not (self._limits.by_model and statistics.known and statistics.plain.count):
            return len(sessions) <= self._limits.max_sessions
        rounds = [
            statistics.round_of(capacity, one.depth.value, one.plain.value, one.accepted, one.tested)
            for one in sessions
        ]
        return len(sessions) <= self._limits.max_sessions and all_gain(rounds, capacity.batch_seconds)

    def those_ahead(
        self, account: Account, active: Iterable[Session], session: Session | None
    ) -> list[Session]:
        """Return those of the `active` sessions that rank before `session` of `account` (None: a new one):
        the first of every account, then the second of every account; those of one account, and equals, by
        age."""
        ranks: dict[Account, int] = {}
        others: list[tuple[tuple[int, float, int], Session]] = []
        own: tuple[int, float, int] | None = None
        for other in sorted(active, key=lambda one: (one.opened, one.tag)):
            rank = ranks[other.account] = ranks.get(other.account, -1) + 1
            if other is session:
                own = rank, other.opened, other.tag
            else:
                others.append(((rank, other.opened, other.tag), other))
        if own is None:
            own = ranks.get(account, -1) + 1, float("inf"), 0
        return [other for rank_key, other in others if rank_key < own]

    def exceeded_limit(
        self, session: Session, message: DraftRequests, sessions: Iterable[Session]
    ) -> Reason | None:
        """Return the limit that a message of a session would exceed, or None."""
        limits = self._limits
        if len(message.deltas) > limits.max_deltas:
            return "rate"  # a way around the rate limit otherwise
        if sum(min(max(delta.nodes, 0), limits.max_nodes) for delta in message.deltas) > limits.request_nodes:
            return "nodes"
        if not message.deltas:
            return None
        accounts = {other.account for other in sessions}
        total = len(message.deltas) + sum(account.in_flight for account in accounts)
        own = len(message.deltas) + session.account.in_flight
        return "in-flight" if own > limits.in_flight or total > limits.total_in_flight else None


def block_seconds(failures: int) -> float:
    """Return the seconds for which a session is not drafted for after `failures` failed batches of it
    alone."""
    return min(FAILED_SECONDS * 2.0 ** min(failures - 1, 20), LONGEST_SECONDS)


def session_to_close(sessions: Iterable[Session], own: int) -> Session | None:
    """Return the session to close for another client that has `own` sessions: of the account with the most,
    if it has at least two more, the one that was heard longest ago. None if there is none."""
    oldest = min(sessions, key=lambda one: (-one.account.sessions, one.heard), default=None)
    return oldest if oldest is not None and oldest.account.sessions >= own + 2 else None
